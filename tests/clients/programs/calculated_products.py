"""A taskset of verifiers like examples/agents/calculator_agent.py: products, with a calculator.

Its examples are the rows of a run. docs/measurements.md says what a policy learns of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CalculatedProducts", "CalculatedProductsEnv"]

SHOWN = [
    ("12 * 3 = ?", "<calc>12 * 3</calc>", "36"),
    ("41 * 5 = ?", "<calc>41 * 5</calc>", "205"),
]
CALL = re.compile(r"<calc>\s*(\d+)\s*\*\s*(\d+)\s*</calc>")
MAX_CALLS = 3


class ProductData(vf.TaskData):
    answer: str


class ProductTask(vf.Task[ProductData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """1 where the last number of the last answer is right."""
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(bool(numbers) and numbers[-1] == self.data.answer)


class CalculatedProducts(vf.Taskset[ProductTask]):
    def load(self) -> Iterator[ProductTask]:
        for asked, _, result in SHOWN:
            yield ProductTask(ProductData(prompt=asked, answer=result), self.config.task)


class ProductsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class CalculatedProductsEnv(vf.Env[ProductsConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """The policy is shown how, and is told what its calculator says."""
        system, question = task.data.prompt
        prompt = [system]
        for asked, call, result in SHOWN:
            prompt += [
                vf.UserMessage(content=asked),
                vf.AssistantMessage(content=call),
                vf.UserMessage(content=f"Result: {result}"),
                vf.AssistantMessage(content=result),
            ]
        async with agents.agent.interaction(task.with_data(prompt=[*prompt, question])) as talk:
            await talk.turn()
            for _ in range(MAX_CALLS - 1):
                found = CALL.search(talk.trace.last_reply)
                if found is None:
                    break
                await talk.turn(f"Result: {int(found[1]) * int(found[2])}")
