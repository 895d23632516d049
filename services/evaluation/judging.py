"""Scores of completions by the rewards of a recipe, without a service of a run.

Most sources judge each completion as it comes. A classifier judges all completions of a task in one
batch, as in a run, whose scores depend on it by rounding.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rolemesh.engine import reasoning_tasks
from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.rewards.arithmetic import NoAnswerError, arithmetic_score
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import (
    ArithmeticRewardSpec,
    ClassifierRewardSpec,
    EnvironmentRewardSpec,
    OutsideRewardSpec,
    ReasoningGymRewardSpec,
    RewardSourceSpec,
    SingleRewardSpec,
    named_sources,
)
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec
from rolemesh.services.evaluation.answers import Answer, UnscoredError
from rolemesh.services.reward.outside.base import OutsideReward, OutsideRewardError, RewardRow
from rolemesh.services.reward.outside.make import make_outside_reward
from rolemesh.services.runtime.server.config import sandbox_mode

if TYPE_CHECKING:
    from rolemesh.services.evaluation.classifier import TextClassifier

_NO_ENTRY = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What scorers of reasoning-gym raise for something else than an entry of theirs."""


@dataclass(slots=True, kw_only=True)
class Judged:
    """The sum of what the sources give an answer, in the making."""

    answer: Answer
    total: float = 0.0
    applies: bool = False
    """Whether a source does."""

    def add(self, weight: float, found: float | None) -> None:
        """Adds what a source gives; None: it does not apply."""
        if found is not None:
            self.total, self.applies = self.total + weight * found, True


class _Scorer(Protocol):
    """One source of a reward that judges each answer by itself."""

    async def open(self) -> None:
        """Prepares; raises OutsideRewardError where it cannot work."""

    async def score(self, answer: Answer) -> float | None:
        """One finite number; None: does not apply. Raises UnscoredError."""

    async def close(self) -> None:
        """Ends what it has begun."""


class Judge:
    """Scores completions of a task as the reward of a run would.

    Example: of sources of weight 1 and 0.5 that give 1 and 2 the score is 2.
    """

    def __init__(self, task: EvaluatedTaskSpec) -> None:
        """Makes the scorers, and loads the models of those that have one.

        Raises:
            ValueError: A model cannot be loaded.
        """
        assert task.reward is not None
        self._tag = task.answer_tag
        self._scorers: list[tuple[float, _Scorer]] = []
        self._models: list[tuple[float, TextClassifier]] = []
        for one in named_sources(task.reward):
            if isinstance(one.source, ClassifierRewardSpec):
                self._models.append((one.weight, _classifier(task, str(one.name), one.source)))
            else:
                self._scorers.append((one.weight, _scorer(str(one.name), one.source)))
        self.full_score = _full_score(task.reward)
        """Of a fully right completion; None if there is no such score."""

    @property
    def judges_together(self) -> bool:
        """Whether `finish` wants all answers of the task at once."""
        return bool(self._models)

    async def open(self) -> None:
        """Prepares; raises OutsideRewardError where a source cannot work at all."""
        for _, scorer in self._scorers:
            await scorer.open()

    async def begin(
        self,
        row: PromptRow,
        prompt: str,
        completion: str,
        given: float | None = None,
        images: tuple[str, ...] | None = None,
    ) -> Judged:
        """Asks the sources that judge an answer by itself; raises UnscoredError if one fails."""
        text = completion if self._tag is None else answer_in(completion, self._tag)
        answer = Answer(row=row, prompt=prompt, completion=text, given=given, images=images)
        judged = Judged(answer=answer)
        for weight, scorer in self._scorers:
            judged.add(weight, await scorer.score(judged.answer))
        return judged

    def finish(self, judged: Sequence[Judged]) -> list[float | UnscoredError]:
        """The weighted sum of the sources that apply, for each answer that has begun.

        Args:
            judged: Of these, in the order of a run's batch; with `judges_together` all of the task.

        Returns:
            A score for each, or why it has none.
        """
        failed: dict[int, UnscoredError] = {}
        for weight, model in self._models if judged else ():
            for number, found in enumerate(model.score([one.answer for one in judged])):
                if isinstance(found, UnscoredError):
                    failed.setdefault(number, found)
                else:
                    judged[number].add(weight, found)
        for number, one in enumerate(judged):
            if not one.applies and number not in failed:
                failed[number] = UnscoredError("no source of the reward applies to this row")
        return [failed.get(number, one.total) for number, one in enumerate(judged)]

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
        case EnvironmentRewardSpec(full_score=full_score):
            return full_score
    return None


def _classifier(task: EvaluatedTaskSpec, name: str, spec: ClassifierRewardSpec) -> TextClassifier:
    # Here: it comes with torch, which most rewards do without.
    from rolemesh.services.evaluation.classifier import TextClassifier

    try:
        return TextClassifier(spec)
    except ValueError as error:
        raise ValueError(
            f"task {task.name}: the classifier of its reward {name!r} cannot be loaded: {error}"
        ) from error


def _scorer(name: str, spec: SingleRewardSpec) -> _Scorer:
    match spec:
        case ReasoningGymRewardSpec():
            return _Own(_gym_score)
        case ArithmeticRewardSpec():
            return _Own(_arithmetic(spec))
        case EnvironmentRewardSpec():
            return _Own(lambda answer: answer.given)
    assert isinstance(spec, OutsideRewardSpec)
    return _Outside(make_outside_reward(name, spec, find_sandbox(sandbox_mode(os.environ))))


class _Own:
    """A scorer that is a function of ours."""

    def __init__(self, function: Callable[[Answer], float | None]) -> None:
        self._function = function

    async def open(self) -> None:
        pass

    async def score(self, answer: Answer) -> float | None:
        return self._function(answer)

    async def close(self) -> None:
        pass


def _gym_score(answer: Answer) -> float:
    row = answer.row
    try:
        entry = {**json.loads(row.metadata), "answer": row.answer}
        return reasoning_tasks.score(answer.completion.strip(), entry)
    except _NO_ENTRY as error:
        raise UnscoredError(
            f"{row.where} is of no task of reasoning-gym ({type(error).__name__}: {error})"
        ) from error


def _arithmetic(spec: ArithmeticRewardSpec) -> Callable[[Answer], float]:
    def score(answer: Answer) -> float:
        try:
            return arithmetic_score(spec, answer.completion, answer.row.answer)
        except NoAnswerError as error:
            raise UnscoredError(f"{answer.row.where}: {error}") from error

    return score


class _Outside:
    """A reward from outside: a function in the sandbox, or a server that is there anyway."""

    def __init__(self, reward: OutsideReward) -> None:
        self._reward = reward

    async def open(self) -> None:
        await self._reward.open()

    async def score(self, answer: Answer) -> float | None:
        asked = RewardRow(
            prompt=answer.prompt,
            completion=answer.completion,
            query=answer.prompt + answer.completion,
            answer=answer.row.answer,
            metadata=json.loads(answer.row.metadata or "{}"),
            images=answer.images,
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
