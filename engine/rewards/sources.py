"""Rewards that come with rolemesh: each gives one number for each row of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from rolemesh.engine import reasoning_tasks
from rolemesh.engine.data.rows import PromptTooLongError
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.arithmetic import NoAnswerError, arithmetic_score
from rolemesh.engine.specs import (
    ArithmeticRewardSpec,
    ClassifierRewardSpec,
    EnvironmentRewardSpec,
    OwnRewardSpec,
    ReasoningGymRewardSpec,
)
from rolemesh.engine.specs.columns import ENVIRONMENT_REWARDS, IMAGES

if TYPE_CHECKING:
    from rolemesh.engine.models.rank_model import RankModel

Progress = Callable[[str, int, int], None]

_NO_ENTRY = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What scorers of reasoning_gym raise for something else than an entry of theirs."""


class RewardSource(Protocol):
    """Judges trajectories."""

    columns: tuple[str, ...]
    """Columns of the experience that it reads."""
    reads_images: bool
    """Whether it reads the images of prompts too, where there are any."""
    full_score: float | None
    """Reward of a fully right trajectory; None if there is no such reward."""

    def score(self, batch: Experience, progress: Progress) -> torch.Tensor:
        """Returns float32 [B], one finite reward for each row."""


class RewardInvalidError(RuntimeError):
    """A reward is not a finite number, or there are too few or too many."""


def checked(rewards: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns the rewards as float32 [num_rows]; RewardInvalidError names a wrong row."""
    if rewards.shape != (num_rows,):
        raise RewardInvalidError(
            f"the reward gave shape {tuple(rewards.shape)} for {num_rows} trajectories: it must "
            "give exactly one number a trajectory"
        )
    bad = torch.nonzero(~torch.isfinite(rewards))
    if len(bad):
        row = int(bad[0])
        raise RewardInvalidError(
            f"the reward of row {row} is {float(rewards[row])}: every reward must be finite; fix "
            "the reward function (a failed judgement must raise, not return NaN)"
        )
    return rewards.to(torch.float32)


def reward_metrics(
    rewards: torch.Tensor, full_score: float | None, name: str = "reward"
) -> dict[str, float]:
    """Scalars of float32 [B] rewards: mean, spread, standard error of the mean, extremes.

    If there is a full score, also the accuracy (the share of rows that reached it) and its standard
    error. `name` is the prefix of all others, e.g. "cost".
    """
    values = rewards.double()
    metrics = {**_mean_and_error(name, values)}
    metrics[f"{name}/std"] = float(values.std(correction=0))
    metrics[f"{name}/min"] = float(values.min())
    metrics[f"{name}/max"] = float(values.max())
    if full_score is not None:
        metrics.update(_mean_and_error("accuracy", (rewards >= full_score).double()))
    return metrics


def _mean_and_error(name: str, values: torch.Tensor) -> dict[str, float]:
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {f"{name}/mean": float(values.mean()), f"{name}/standard_error": error}


class ArithmeticReward:
    """How close a completion comes to being the bare answer; see `arithmetic_score`."""

    columns: tuple[str, ...] = ("completion_text", "answer")
    reads_images = False

    def __init__(self, spec: ArithmeticRewardSpec) -> None:
        self._spec = spec
        self.full_score: float | None = spec.exact

    def score(self, batch: Experience, progress: Progress) -> torch.Tensor:
        """float32 [B]; raises RewardInvalidError where a row has no answer."""
        rows = zip(batch["completion_text"].strings(), batch["answer"].strings(), strict=True)
        try:
            scores = [arithmetic_score(self._spec, text, answer) for text, answer in rows]
        except NoAnswerError as error:
            raise RewardInvalidError(str(error)) from error
        return torch.tensor(scores, dtype=torch.float32)


class ReasoningGymReward:
    """The scorer of the task that made the prompt, on the whole completion."""

    columns: tuple[str, ...] = ("completion_text", "answer", "metadata")
    reads_images = False
    full_score: float | None = 1.0

    def score(self, batch: Experience, progress: Progress) -> torch.Tensor:
        """float32 [B], 0 to 1."""
        rows = zip(
            batch["completion_text"].strings(),
            batch["answer"].strings(),
            batch["metadata"].strings(),
            strict=True,
        )
        scores = []
        for row, (text, answer, metadata) in enumerate(rows):
            try:
                entry = {**json.loads(metadata), "answer": answer}
                scores.append(reasoning_tasks.score(text.strip(), entry))
            except _NO_ENTRY as error:
                raise RewardInvalidError(
                    f"row {row} is of no task of reasoning_gym, which makes its metadata "
                    f"({type(error).__name__}: {error}): judge rows of data of that type"
                ) from error
        return torch.tensor(scores, dtype=torch.float32)


class EnvironmentReward:
    """The reward that the environment gave while the trajectory was sampled."""

    columns: tuple[str, ...] = (ENVIRONMENT_REWARDS,)
    reads_images = False

    def __init__(self, spec: EnvironmentRewardSpec) -> None:
        self.full_score = spec.full_score

    def score(self, batch: Experience, progress: Progress) -> torch.Tensor:
        """float32 [B]."""
        return batch[ENVIRONMENT_REWARDS].values.to(torch.float32)


class ClassifierReward:
    """A logit of a sequence classifier over the text of prompt and completion.

    The text is encoded with the classifier's own tokenizer, which need not be the policy's. A text
    has one placeholder for each image of its prompt, as the policy's chat template writes it.
    """

    columns: tuple[str, ...] = ("prompt_text", "completion_text")
    reads_images = True
    full_score: float | None = None

    def __init__(
        self,
        spec: ClassifierRewardSpec,
        device: torch.device,
        mesh: RankMesh,
        trained: RankModel | None = None,
    ) -> None:
        """Loads the folder, or scores with a reward model of it that is being trained."""
        from rolemesh.engine.models.classifier import Classifier

        self._classifier = Classifier(
            spec.model, label=spec.label, device=device, mesh=mesh, trained=trained
        )
        self.max_tokens = self._classifier.max_tokens

    def score(self, batch: Experience, progress: Progress) -> torch.Tensor:
        """float32 [B]."""
        return self._classifier.score(self._encode(batch), progress, _images(batch))

    def faults(self, batch: Experience) -> dict[int, str]:
        """Why rows cannot be scored, by their number: `score` would refuse the whole batch."""
        rows = self._placed(self._encode(batch), batch)
        found = {row: self._classifier.fault(ids) for row, ids in enumerate(rows)}
        return {row: fault for row, fault in found.items() if fault is not None}

    def as_scored(self, batch: Experience) -> Experience:
        """Returns the same trajectories in exactly the tokens that `score` judges, for training.

        A given completion ends with the tokens that end a turn, and prompt and completion were
        encoded apart. `score` sees the text of both without these tokens, so training must see the
        same. prompt_lengths is the length of the prompt encoded by itself, at most that of the row.
        Images stand before it. A score belongs to a whole row, so it has no other effect.

        Args:
            batch: Batch with the columns prompt_text and completion_text.

        Raises:
            ImageInvalidError: The classifier takes no images, or a row's do not fit its text.
            PromptTooLongError: A row is longer than the model can see.
        """
        rows = self._placed(self._encode(batch), batch)
        if self.max_tokens is not None:
            for index, row in enumerate(rows):
                if len(row) > self.max_tokens:
                    raise PromptTooLongError(
                        f"row {index} has {len(row)} tokens, but the classifier sees at most "
                        f"{self.max_tokens}: set data.max_row_tokens below that"
                    )
        prompts = self._placed(self._classifier.encode(batch["prompt_text"].strings()), batch)
        prompt_lengths = [
            max(1, min(len(prompt), len(row))) for prompt, row in zip(prompts, rows, strict=True)
        ]
        masks = [
            [True] * (len(row) - length) for row, length in zip(rows, prompt_lengths, strict=True)
        ]
        kept = {
            name: column
            for name, column in batch.columns.items()
            if column.kind in (ColumnKind.ROW, ColumnKind.TEXT)
        }
        return Experience(
            {
                **kept,
                "tokens": Column.named("tokens", rows),
                "prompt_lengths": Column.named("prompt_lengths", prompt_lengths),
                "loss_mask": Column.named("loss_mask", masks),
            }
        )

    def _placed(self, rows: list[list[int]], batch: Experience) -> list[list[int]]:
        images = _images(batch)
        return self._classifier.placed(rows, images) if any(images) else rows

    def _encode(self, batch: Experience) -> list[list[int]]:
        texts = [
            prompt + completion
            for prompt, completion in zip(
                batch["prompt_text"].strings(), batch["completion_text"].strings(), strict=True
            )
        ]
        return self._classifier.encode(texts)


def _images(batch: Experience) -> list[str]:
    """Rows of the column `images`; nothing where the data has none."""
    return batch[IMAGES].strings() if IMAGES in batch else []


def make_reward(
    spec: OwnRewardSpec, device: torch.device, mesh: RankMesh | None = None
) -> RewardSource:
    """Builds the reward that the spec describes.

    Args:
        spec: Spec of the reward.
        device: Device of its own model, if it has one.
        mesh: Ranks over which such a model is spread; None means this one only.
    """
    if isinstance(spec, ArithmeticRewardSpec):
        return ArithmeticReward(spec)
    if isinstance(spec, ReasoningGymRewardSpec):
        return ReasoningGymReward()
    if isinstance(spec, EnvironmentRewardSpec):
        return EnvironmentReward(spec)
    return ClassifierReward(spec, device, mesh or RankMesh.single())
