"""Agents that own their loop: OpenAI's client, a tool of their own, and a reward at the end.

recipes/agent-grpo.yaml names `run`, of which many calls live in one process. `main` is the same as
a program, a process for each trajectory:

    environment: {type: program, command: [python, examples/agents/calculator_agent.py]}
"""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

EXAMPLES = [
    ("12 * 3 = ?", "<calc>12 * 3</calc>", "36"),
    ("41 * 5 = ?", "<calc>41 * 5</calc>", "205"),
]
CALL = re.compile(r"<calc>\s*(\d+)\s*\*\s*(\d+)\s*</calc>")
MAX_CALLS = 3


async def run(task: dict[str, Any], client: AsyncOpenAI) -> float:
    """One trajectory: asks until the policy calls no tool; 1 where its last number is right."""
    system, question = task["messages"]
    messages = [system]
    for asked, call, result in EXAMPLES:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": call},
            {"role": "user", "content": f"Result: {result}"},
            {"role": "assistant", "content": result},
        ]
    messages.append(question)
    said = ""
    for _ in range(MAX_CALLS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=24
        )
        said = answer.choices[0].message.content or ""
        found = CALL.search(said)
        if found is None:
            break
        result = int(found[1]) * int(found[2])
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"Result: {result}"},
        ]
    numbers = re.findall(r"\d+", said)
    return float(bool(numbers) and numbers[-1] == task["answer"])


async def main(task: dict[str, Any]) -> None:
    """The same as a program, whose last line is the reward."""
    async with AsyncOpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY are this session's
        print(json.dumps({"reward": await run(task, client)}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(os.environ["ROLEMESH_TASK"]).read_text())))
