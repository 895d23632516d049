"""Trains one model on one rank: scoring, gradients, optimizer steps, checkpoints, export.

Gradients do not depend on how a mini-batch was cut into micro-batches: every loss divides by
counts over the whole mini-batch, and shares add up in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.losses import Loss, ModelOutputs, add_metrics, make_loss
from rolemesh.engine.batching import PaddedRows, pad_rows
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.models import scoring
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring import Progress
from rolemesh.engine.models.value_model import ValueModel
from rolemesh.engine.specs import ComputeDtype, LossSpec, ModelSpec, OptimizerSpec
from rolemesh.engine.train import state as trainer_state
from rolemesh.engine.train.optimizer import LossNotFiniteError, NoGradientError, Optimizer
from rolemesh.engine.weights.export import write_model_folder

__all__ = ["GradientPendingError", "LossNotFiniteError", "NoGradientError", "Trainer"]

TrainedModel = CausalLm | ValueModel
ModelT = TypeVar("ModelT", CausalLm, ValueModel)

SAMPLER_METRICS = ("sampler_logprob_diff_mean", "sampler_logprob_diff_max")
"""They compare sampler and trainer at equal weights, which only the first mini-batch has."""


class GradientPendingError(RuntimeError):
    """A checkpoint was asked for between forward_backward and optim_step."""


class Trainer:
    """A trained model with its optimizer.

    Owned by the rank's compute thread. Invariant: `policy_version` is raised by one with each
    optimizer step, and nothing else changes a weight (save `load`).

    Example::

        trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec(learning_rate=2e-5))
        metrics = trainer.update(
            batch, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=32, seed=7
        )
        trainer.policy_version  # raised by ceil(rows / 32)
    """

    def __init__(
        self,
        kind: Literal["policy", "critic"],
        model: TrainedModel,
        optimizer: OptimizerSpec,
    ) -> None:
        self.kind = kind
        self.model = model
        self.policy_version = 0
        self._optimizer = Optimizer(optimizer, model.named_weights())
        self._has_gradient = False

    @classmethod
    def policy(
        cls, model: ModelSpec, optimizer: OptimizerSpec, *, device: torch.device | str = "cpu"
    ) -> Trainer:
        """A trainer of a causal LM; raises ModelFolderError when its folder cannot be used."""
        return cls("policy", CausalLm(model, device=device), optimizer)

    @classmethod
    def critic(
        cls, model: ModelSpec, optimizer: OptimizerSpec, *, device: torch.device | str = "cpu"
    ) -> Trainer:
        """A trainer of a value model; raises ModelFolderError when its folder cannot be used."""
        return cls("critic", ValueModel(model, device=device), optimizer)

    # --- scoring --------------------------------------------------------------------------

    def compute_logprobs(
        self,
        batch: Experience,
        *,
        temperature: float,
        with_entropy: bool = False,
        progress: Progress | None = None,
    ) -> Experience:
        """Column logprobs, and entropy on request; see `scoring.compute_logprobs`."""
        return scoring.compute_logprobs(
            self._model_as(CausalLm, "compute_logprobs"),
            batch,
            temperature=temperature,
            with_entropy=with_entropy,
            progress=progress,
        )

    def compute_values(self, batch: Experience, progress: Progress | None = None) -> Column:
        """Column values; see `scoring.compute_values`."""
        return scoring.compute_values(
            self._model_as(ValueModel, "compute_values"), batch, progress=progress
        )

    # --- training -------------------------------------------------------------------------

    def forward_backward(
        self, batch: Experience, loss_spec: LossSpec, progress: Progress | None = None
    ) -> dict[str, float]:
        """Adds the gradients of a loss over a mini-batch to those already accumulated.

        Args:
            batch: with tokens, prompt_lengths and the columns that the loss names.
            loss_spec: the loss.
            progress: called after each micro-batch.

        Returns:
            The loss's metrics, "loss" among them.

        Raises:
            LossNotFiniteError: the loss is NaN or infinite; all gradients were dropped.
            ColumnMissingError: the batch lacks a column.
        """
        metrics, _ = self.forward_backward_with_outputs(batch, loss_spec, progress)
        return metrics

    def forward_backward_with_outputs(
        self, batch: Experience, loss_spec: LossSpec, progress: Progress | None = None
    ) -> tuple[dict[str, float], Experience]:
        """As `forward_backward`; also returns the column logprobs or values of its forward.

        Whatever fails drops all gradients, so that a repeat does not add to a part of its own.
        """
        try:
            return self._accumulate(batch, loss_spec, progress)
        except BaseException:
            self.drop_gradients()
            raise

    def _accumulate(
        self, batch: Experience, loss_spec: LossSpec, progress: Progress | None
    ) -> tuple[dict[str, float], Experience]:
        loss = make_loss(loss_spec)
        if batch.num_rows == 0:
            raise ValueError("the batch has 0 rows: give at least one")
        batch = batch.require(dict.fromkeys((*scoring.INPUT_COLUMNS, *loss.columns, "loss_mask")))
        scale = LossScale.of(batch)
        temperature = getattr(loss_spec, "temperature", 1.0)
        metrics: dict[str, float] = {}
        parts, order = [], []
        done = 0
        for rows in scoring.row_groups(batch, self.model.spec.micro_batch_tokens):
            part = batch.select(rows)
            outputs = self._outputs(loss, pad_rows(part, self.model.device), temperature)
            part_loss, part_metrics = loss(outputs, part, scale)
            self._check_finite(part_loss, part_metrics)
            part_loss.backward()  # type: ignore[no-untyped-call]
            add_metrics(metrics, part_metrics)
            trained_N = outputs.logprobs_N if loss.needs == "logprobs" else outputs.values_N
            assert trained_N is not None  # _outputs fills what the loss needs
            parts.append(scoring.completion_columns(part, {loss.needs: trained_N}))
            order.append(rows)
            done += len(rows)
            if progress is not None:
                progress("forward_backward", done, batch.num_rows)
        self._has_gradient = True
        return metrics, scoring.in_batch_order(parts, order)

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Applies the accumulated gradients and raises policy_version by one.

        Args:
            learning_rate: for this step alone; None takes the spec's schedule.

        Returns:
            grad_norm (before clipping) and learning_rate.

        Raises:
            NoGradientError: nothing was accumulated.
            LossNotFiniteError: the gradient is not finite; it is dropped and no weight moves.
        """
        if not self._has_gradient:
            raise NoGradientError("no gradient was accumulated: call forward_backward first")
        self._has_gradient = False
        metrics = self._optimizer.step(learning_rate)
        self.policy_version += 1
        return metrics

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._optimizer.drop_gradients()
        self._has_gradient = False

    def update(
        self,
        batch: Experience,
        loss_spec: LossSpec,
        *,
        epochs: int,
        mini_batch_rows: int,
        seed: int,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Trains: for each epoch, an optimizer step for each mini-batch of shuffled rows.

        Gradients left over from `forward_backward` are dropped first. When a mini-batch fails,
        the steps of those before it remain, and policy_version says how many they were.

        Args:
            batch: with the columns that the loss names.
            loss_spec: the loss.
            epochs: passes over the batch.
            mini_batch_rows: rows of one optimizer step; the last one may have fewer.
            seed: of the shuffles.
            progress: called after each micro-batch with rows done over all epochs.

        Returns:
            Means over mini-batches (maxima for names ending in "_max") of the loss's metrics,
            grad_norm and learning_rate; sampler_logprob_diff_* of the first mini-batch alone,
            the only one whose weights the sampler had; and optimizer_steps.

        Raises:
            LossNotFiniteError: see `forward_backward` and `optim_step`.
        """
        for name, number in (("epochs", epochs), ("mini_batch_rows", mini_batch_rows)):
            if number < 1:
                raise ValueError(f"{name} is {number}: give at least 1")
        self.drop_gradients()
        shuffle = torch.Generator().manual_seed(seed)
        totals: dict[str, float] = {}
        first: dict[str, float] = {}
        num_steps = done = 0
        for _ in range(epochs):
            order = torch.randperm(batch.num_rows, generator=shuffle)
            for rows in torch.split(order, mini_batch_rows):
                within = _shifted(progress, done, epochs * batch.num_rows)
                metrics = self.forward_backward(batch.select(rows), loss_spec, within)
                metrics |= self.optim_step()
                sampler = {name: metrics.pop(name) for name in SAMPLER_METRICS if name in metrics}
                first = first or sampler
                add_metrics(totals, metrics)
                num_steps += 1
                done += len(rows)
        means = {
            name: total if name.endswith("_max") else total / num_steps
            for name, total in totals.items()
        }
        return {**means, **first, "optimizer_steps": float(num_steps)}

    # --- weights --------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name, float32, detached, tied ones once. They are not copies."""
        for name, weight in self.model.named_weights():
            yield name, weight.detach()

    def move_to(self, device: torch.device) -> int:
        """Moves weights and optimizer state, e.g. to host memory while another role computes.

        Returns:
            Bytes that changed places; 0 when they were there already.

        Raises:
            GradientPendingError: gradients are accumulated, which would stay behind.
        """
        if self._has_gradient:
            raise GradientPendingError(
                "gradients are accumulated: call optim_step or drop_gradients before sleep"
            )
        tensors = [*self.model.parameters(), *self.model.buffers()]
        moved = sum(tensor.nbytes for tensor in tensors if tensor.device != device)
        self.model.to(device)
        self.model.device = device
        return moved + self._optimizer.move_to(device)

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint: weights, optimizer, schedule, random state, policy_version.

        Args:
            directory: must not exist; it is on disk and whole when this returns.
            extra: JSON-able state of the caller, returned by `load`.

        Raises:
            GradientPendingError: gradients are accumulated, which a checkpoint does not hold.
            FolderExistsError: the directory exists.
        """
        if self._has_gradient:
            raise GradientPendingError(
                "gradients are accumulated: call optim_step or drop_gradients before save"
            )
        trainer_state.save(
            Path(directory),
            kind=self.kind,
            weights=dict(self.named_weights()),
            optimizer=self._optimizer,
            policy_version=self.policy_version,
            extra=dict(extra or {}),
        )

    def load(self, directory: Path) -> dict[str, Any]:
        """Takes over a checkpoint, whole or not at all; training goes on bit for bit.

        Returns:
            The extra state given to `save`.

        Raises:
            ValueError: there is no checkpoint, or it belongs to another model or role.
            CheckpointCorruptError: a file is missing, cut or changed; names it.
        """
        self.drop_gradients()
        self.policy_version, extra = trainer_state.load(
            Path(directory),
            kind=self.kind,
            weights=dict(self.named_weights()),
            optimizer=self._optimizer,
        )
        return extra

    def export(self, directory: Path, dtype: ComputeDtype = "bfloat16") -> None:
        """Writes a Hugging Face folder, tokenizer included; replaces an older one whole.

        A policy is saved as a causal LM, a critic as a token classifier with one label.

        Args:
            directory: the folder.
            dtype: type of the saved weights.
        """
        write_model_folder(
            Path(directory),
            self.model.lm,
            self.named_weights(),
            source=self.model.spec.path,
            dtype=dtype,
        )

    # --- inside ---------------------------------------------------------------------------

    def _outputs(self, loss: Loss, rows: PaddedRows, temperature: float) -> ModelOutputs:
        if loss.needs == "values":
            return ModelOutputs(values_N=self._model_as(ValueModel, "a value loss")(rows))
        logprobs_N, entropy_N = self._model_as(CausalLm, "a policy loss").score(
            rows, temperature=temperature, with_entropy=loss.needs_entropy
        )
        return ModelOutputs(logprobs_N=logprobs_N, entropy_N=entropy_N)

    def _check_finite(self, loss: torch.Tensor, metrics: Mapping[str, float]) -> None:
        number = float(loss.detach())
        if not math.isfinite(number):
            raise LossNotFiniteError(
                f"loss is {number} (metrics {dict(metrics)}): gradients were dropped, weights "
                "not touched; look for rewards, advantages or log-probs that are not finite"
            )

    def _model_as(self, model_class: type[ModelT], what: str) -> ModelT:
        if not isinstance(self.model, model_class):
            raise ValueError(
                f"{what} needs a {model_class.__name__}, but this {self.kind} trains a "
                f"{type(self.model).__name__}: send it to the other role"
            )
        return self.model


def _shifted(progress: Progress | None, done_before: int, total: int) -> Progress | None:
    """Progress of a mini-batch as progress of the whole update."""
    if progress is None:
        return None
    return lambda _stage, done, _rows: progress("update", done_before + done, total)
