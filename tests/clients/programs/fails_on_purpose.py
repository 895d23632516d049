"""A taskset of verifiers whose rollouts fail, each in a way of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["FailsOnPurpose", "FailsOnPurposeEnv"]

WAYS = ("reward", "environment", "late", "nothing")


class FailsData(vf.TaskData):
    way: str


class FailsTask(vf.Task[FailsData]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        """What a rollout that does not fail gets."""
        if self.data.way == "reward":
            raise ValueError("the judge is out of order")
        if self.data.way == "late":
            await asyncio.sleep(30)
        return float("nan") if self.data.way == "nothing" else 0.25


class FailsOnPurpose(vf.Taskset[FailsTask]):
    def load(self) -> Iterator[FailsTask]:
        for way in WAYS:
            timeout = vf.TaskTimeout(scoring=0.1)
            data = FailsData(prompt="Say a word.", way=way, timeout=timeout)
            yield FailsTask(data, self.config.task)


class FailsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class FailsOnPurposeEnv(vf.Env[FailsConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
        if task.data.way == "environment":
            raise OSError("the world is out of order")
