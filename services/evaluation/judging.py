"""Scores of completions, one by one, by rewards of a recipe that need no service of ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Protocol

from rolemesh.engine import reasoning_tasks
from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import (
    ArithmeticRewardSpec,
    OutsideRewardSpec,
    ReasoningGymRewardSpec,
    RewardSourceSpec,
    SingleRewardSpec,
    named_sources,
)
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec
from rolemesh.services.reward.outside.base import OutsideReward, OutsideRewardError, RewardRow
from rolemesh.services.reward.outside.make import make_outside_reward
from rolemesh.services.runtime.server.config import sandbox_mode

_NO_ENTRY = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What scorers of reasoning-gym raise for something else than an entry of theirs."""


class UnscoredError(RuntimeError):
    """A completion could not be scored; says why."""


class _Scorer(Protocol):
    """One source of a reward."""

    async def open(self) -> None:
        """Prepares; raises OutsideRewardError where it cannot work."""

    async def score(self, row: PromptRow, prompt: str, completion: str) -> float | None:
        """One finite number; None: does not apply. Raises UnscoredError."""

    async def close(self) -> None:
        """Ends what it has begun."""


class Judge:
    """Scores completions of a task as the reward of a run would.

    Example: of sources of weight 1 and 0.5 that give 1 and 2 the score is 2.
    """

    def __init__(self, task: EvaluatedTaskSpec) -> None:
        """Makes the scorers; raises ValueError where one needs a service of a run."""
        assert task.reward is not None
        self._tag = task.answer_tag
        sources = named_sources(task.reward)
        self._scorers = [
            (one.weight, _scorer(task.name, str(one.name), one.source)) for one in sources
        ]
        self.full_score = _full_score(task.reward)
        """Of a fully right completion; None if there is no such score."""

    async def open(self) -> None:
        """Prepares; raises OutsideRewardError where a source cannot work at all."""
        for _, scorer in self._scorers:
            await scorer.open()

    async def score(self, row: PromptRow, prompt: str, completion: str) -> float:
        """The weighted sum of the sources that apply; raises UnscoredError if one of them fails."""
        answer = completion if self._tag is None else answer_in(completion, self._tag)
        total, applies = 0.0, False
        for weight, scorer in self._scorers:
            found = await scorer.score(row, prompt, answer)
            if found is not None:
                total, applies = total + weight * found, True
        if not applies:
            raise UnscoredError("no source of the reward applies to this row")
        return total

    async def close(self) -> None:
        """Ends processes and connections of the scorers."""
        for _, scorer in self._scorers:
            await scorer.close()


def answer_in(completion: str, tag: str) -> str:
    """What stands in the last <tag>...</tag>; empty where there is none, which no scorer likes.

    Example: answer_in("<answer>1</answer> or <answer> 2 </answer>", "answer") is "2".
    """
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", completion, re.DOTALL)
    return found[-1].strip() if found else ""


def _full_score(source: RewardSourceSpec) -> float | None:
    sources = named_sources(source)
    if len(sources) != 1 or sources[0].weight != 1.0:
        return None
    match sources[0].source:
        case ArithmeticRewardSpec(exact=exact):
            return exact
        case ReasoningGymRewardSpec():
            return 1.0
    return None


def _scorer(task: str, name: str, spec: SingleRewardSpec) -> _Scorer:
    match spec:
        case ReasoningGymRewardSpec():
            return _Own(_gym_score)
        case ArithmeticRewardSpec():
            return _Own(_arithmetic(spec))
    if isinstance(spec, OutsideRewardSpec):
        return _Outside(make_outside_reward(name, spec, find_sandbox(sandbox_mode(os.environ))))
    needs = {
        "classifier": "a model that the run's reward service holds",
        "environment": "what an environment says while the run's sampler answers it",
    }
    raise ValueError(
        f"task {task}: its reward {name!r} is of type {spec.type}, {needs[spec.type]}: the run's "
        "own evaluation scores that (run.evaluation); here take a task with another reward"
    )


class _Own:
    """A scorer that is a function of ours."""

    def __init__(self, function: Callable[[PromptRow, str], float]) -> None:
        self._function = function

    async def open(self) -> None:
        pass

    async def score(self, row: PromptRow, prompt: str, completion: str) -> float | None:
        return self._function(row, completion)

    async def close(self) -> None:
        pass


def _gym_score(row: PromptRow, completion: str) -> float:
    try:
        entry = {**json.loads(row.metadata), "answer": row.answer}
        return reasoning_tasks.score(completion.strip(), entry)
    except _NO_ENTRY as error:
        raise UnscoredError(
            f"{row.where} is of no task of reasoning-gym ({type(error).__name__}: {error})"
        ) from error


def _arithmetic(spec: ArithmeticRewardSpec) -> Callable[[PromptRow, str], float]:
    # Here: it comes with torch, which other scorers do without.
    from rolemesh.engine.rewards.sources import ArithmeticReward, RewardInvalidError

    reward = ArithmeticReward(spec)

    def score(row: PromptRow, completion: str) -> float:
        try:
            return reward.score_one(completion, row.answer)
        except RewardInvalidError as error:
            raise UnscoredError(f"{row.where}: {error}") from error

    return score


class _Outside:
    """A reward from outside: a function in the sandbox, or a server that is there anyway."""

    def __init__(self, reward: OutsideReward) -> None:
        self._reward = reward

    async def open(self) -> None:
        await self._reward.open()

    async def score(self, row: PromptRow, prompt: str, completion: str) -> float | None:
        asked = RewardRow(
            prompt=prompt,
            completion=completion,
            query=prompt + completion,
            answer=row.answer,
            metadata=json.loads(row.metadata or "{}"),
        )
        try:
            judgement = await self._reward.judge([asked])
        except OutsideRewardError as error:
            raise UnscoredError(str(error)) from error
        if judgement.failures:
            raise UnscoredError(str(judgement.failures[0]))
        return judgement.rewards[0]

    async def close(self) -> None:
        await self._reward.close()
