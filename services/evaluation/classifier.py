"""A classifier that judges answers, in this process: the source of a run's reward service."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.experience import Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.sources import ClassifierReward
from rolemesh.engine.specs import ClassifierRewardSpec
from rolemesh.services.evaluation.answers import Answer, UnscoredError
from rolemesh.services.runtime.ranks.device import rank_device


class TextClassifier:
    """Scores answers in one batch, as a run's reward service scores those of a step.

    Example: of answers that fit the model and one that is too long for it, the others are scored
    together, and that one says why it is not.
    """

    def __init__(self, spec: ClassifierRewardSpec) -> None:
        """Loads the model, on this process's GPU if it has one.

        Raises:
            ValueError: The folder is none of a classifier, or has no such label.
        """
        self._reward = ClassifierReward(spec, rank_device(), RankMesh.single())

    def score(self, answers: Sequence[Answer]) -> list[float | UnscoredError]:
        """A score for each answer, in their order, or why it has none."""
        faults = self._reward.faults(_batch(answers))
        fit = [number for number in range(len(answers)) if number not in faults]
        found: list[float | UnscoredError] = [
            UnscoredError(f"the row {faults.get(number)}") for number in range(len(answers))
        ]
        if fit:
            batch = _batch([answers[number] for number in fit])
            scores = self._reward.score(batch, lambda *_: None).tolist()
            for number, score in zip(fit, scores, strict=True):
                found[number] = score
        return found


def _batch(answers: Sequence[Answer]) -> Experience:
    return Experience.of_rows(
        {
            "prompt_text": [answer.prompt for answer in answers],
            "completion_text": [answer.completion for answer in answers],
        }
    )
