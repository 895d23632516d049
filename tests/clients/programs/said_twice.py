"""A taskset of verifiers: the model is asked for a word, and then asked again.

vf-eval finds it by its name where this folder is on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SaidTwice", "SaidTwiceEnv"]

WORDS = ("moon", "river", "stone", "bread")


class SaidTwiceData(vf.TaskData):
    word: str


class SaidTwiceTask(vf.Task[SaidTwiceData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """Of the letters of both answers, the share that the word has, too."""
        said = "".join(str(message.content) for message in trace.assistant_messages)
        letters = [letter for letter in said.lower() if letter.isalpha()]
        return sum(letter in self.data.word for letter in letters) / max(1, len(letters))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class SaidTwice(vf.Taskset[SaidTwiceTask]):
    def load(self) -> Iterator[SaidTwiceTask]:
        for word in WORDS:
            yield SaidTwiceTask(SaidTwiceData(prompt=f"Say {word}.", word=word), self.config.task)


class SaidTwiceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class SaidTwiceEnv(vf.Env[SaidTwiceConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("Once more.")
