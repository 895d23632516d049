"""Trains one model, on one rank or many: scoring, gradients, steps, checkpoints, export.

Gradients do not depend on how a mini-batch was cut into micro-batches or spread over ranks: every
loss divides by counts over the whole mini-batch, and shares add up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rolemesh.engine.algorithms.losses import make_loss
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.models import scoring
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import Progress
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import (
    ClassifierRewardSpec,
    ComputeDtype,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
)
from rolemesh.engine.train import state as trainer_state
from rolemesh.engine.train.auxiliary import AuxiliaryLoss, check_auxiliary
from rolemesh.engine.train.gradients import Gradients
from rolemesh.engine.train.mini_batch import accumulate
from rolemesh.engine.train.optimizer import LossNotFiniteError, NoGradientError, Optimizer
from rolemesh.engine.train.rows import HeldRows
from rolemesh.engine.train.step_metrics import StepMetrics
from rolemesh.engine.weights.export import gathered, write_model_folder
from rolemesh.engine.weights.sharded_tensors import ShardedTensors

__all__ = ["GradientPendingError", "LossNotFiniteError", "NoGradientError", "Trainer"]

TrainerKind = Literal["policy", "critic", "reward"]
TrainedModel = CausalLm | ScoringModel
_MODELS: dict[TrainerKind, str] = {
    "policy": "a causal language model",
    "critic": "a value model",
    "reward": "a reward model",
}
_TRAINED_BY: dict[str, tuple[TrainerKind, str]] = {
    "logprobs": ("policy", "a policy loss"),
    "values": ("critic", "a value loss"),
    "scores": ("reward", "a reward model's loss"),
}
"""By a loss's needs: whose model has them, and what the loss is called."""


def kind_of(model: TrainedModel) -> TrainerKind:
    """What a trainer of this model is called, also in its checkpoints."""
    if isinstance(model, CausalLm):
        return "policy"
    return "critic" if model.head_spec.per == "token" else "reward"


class GradientPendingError(RuntimeError):
    """A checkpoint was asked for between forward_backward and optim_step."""


class Trainer:
    """A trained model with its optimizer.

    Owned by the rank's compute thread. Invariant: `policy_version` is raised by one with each
    optimizer step, and nothing else changes a weight (save `load`).

    With many ranks (the model's mesh says so) each has a trainer of its part, and all of them make
    the same calls in the same order. Metrics and errors that come of numbers are then equal on all
    ranks.

    Example::

        trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec(learning_rate=2e-5))
        metrics = trainer.update(
            batch, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=32, seed=7
        )
        trainer.policy_version  # raised by ceil(rows / 32)
    """

    def __init__(
        self,
        kind: TrainerKind,
        model: TrainedModel,
        optimizer: OptimizerSpec,
    ) -> None:
        self.kind = kind
        self.model = model
        self.rank_model = RankModel(model)
        self.policy_version = 0
        self._gradients = Gradients(self.rank_model)
        self._optimizer = Optimizer(optimizer, self._gradients)
        self._has_gradient = False

    @classmethod
    def policy(
        cls,
        model: ModelSpec,
        optimizer: OptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> Trainer:
        """A trainer of a causal LM; raises ModelFolderError when its folder cannot be used."""
        return cls("policy", CausalLm(model, device=device, mesh=mesh), optimizer)

    @classmethod
    def critic(
        cls,
        model: ModelSpec,
        optimizer: OptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> Trainer:
        """A trainer of a value model; raises ModelFolderError when its folder cannot be used."""
        return cls("critic", ScoringModel(model, VALUE_HEAD, device=device, mesh=mesh), optimizer)

    @classmethod
    def reward(
        cls,
        source: ClassifierRewardSpec,
        optimizer: OptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> Trainer:
        """A trainer of a reward model; raises ModelFolderError when its folder cannot be used."""
        head = ScoreHead.of_reward(source)
        return cls("reward", ScoringModel(source.model, head, device=device, mesh=mesh), optimizer)

    @property
    def mesh(self) -> RankMesh:
        """This rank's place."""
        return self.rank_model.mesh

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
        self._check_model("policy", "compute_logprobs")
        return scoring.compute_logprobs(
            self.rank_model,
            batch,
            temperature=temperature,
            with_entropy=with_entropy,
            progress=progress,
        )

    def compute_values(self, batch: Experience, progress: Progress | None = None) -> Column:
        """Column values; see `scoring.compute_values`."""
        self._check_model("critic", "compute_values")
        return scoring.compute_values(self.rank_model, batch, progress=progress)

    # --- training -------------------------------------------------------------------------

    def forward_backward(
        self,
        batch: Experience,
        loss_spec: LossSpec,
        progress: Progress | None = None,
        *,
        rows: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        rows_per_unit: int = 1,
    ) -> dict[str, float]:
        """Adds the gradients of a loss over a mini-batch to those already accumulated.

        Each data-parallel replica takes its rows of the mini-batch: `balanced_units` by length.

        Args:
            batch: with tokens, prompt_lengths and the columns that the loss names.
            loss_spec: the loss.
            progress: called after each micro-batch.
            rows: which rows of the mini-batch those of `batch` are; this rank's must be among them.
                None: all of them, in order.
            lengths: tokens in each row of the mini-batch, where `rows` is given.
            rows_per_unit: neighbouring rows of the mini-batch that go to the same replica and
                forward pass; 1: each row for itself.

        Returns:
            The loss's metrics, "loss" among them, over the whole mini-batch.

        Raises:
            LossNotFiniteError: the loss is NaN or infinite; all gradients were dropped.
            ColumnMissingError: the batch lacks a column.
        """
        metrics, _ = self.forward_backward_with_outputs(
            batch, loss_spec, progress, rows=rows, lengths=lengths, rows_per_unit=rows_per_unit
        )
        return metrics

    def forward_backward_with_outputs(
        self,
        batch: Experience,
        loss_spec: LossSpec,
        progress: Progress | None = None,
        *,
        rows: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        rows_per_unit: int = 1,
    ) -> tuple[dict[str, float], Experience]:
        """As `forward_backward`; also returns the column logprobs or values of its forward.

        Whatever fails drops all gradients, so that a repeat does not add to a part of its own.

        Returns:
            Metrics; and the outputs for this replica's rows in ascending order
            (`balanced_units(lengths, dp, rows_per_unit)[own]`), on the last stage; no rows on
            other stages.
        """
        try:
            places, _ = prepare_together(
                lambda: (
                    HeldRows(batch, rows, lengths).of_mini_batch(self.mesh.dp, rows_per_unit),
                    None,
                ),
                self.mesh.dp,
                self.model.device,
            )
            return self._accumulate(batch, places, loss_spec, progress, rows_per_unit=rows_per_unit)
        except BaseException:
            self.drop_gradients()
            raise

    def _accumulate(
        self,
        batch: Experience,
        places: Sequence[int],
        loss_spec: LossSpec,
        progress: Progress | None,
        *,
        rows_per_unit: int = 1,
        weight: float = 1.0,
    ) -> tuple[dict[str, float], Experience]:
        loss = make_loss(loss_spec)
        self._check_model(*_TRAINED_BY[loss.needs])
        metrics, outputs = accumulate(
            self.rank_model,
            batch,
            places,
            loss,
            temperature=getattr(loss_spec, "temperature", 1.0),
            progress=progress,
            rows_per_unit=rows_per_unit,
            weight=weight,
        )
        self._has_gradient = True
        return metrics, outputs

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
        rows: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        rows_per_unit: int = 1,
        auxiliary: Sequence[AuxiliaryLoss] = (),
    ) -> dict[str, float]:
        """Trains: for each epoch, an optimizer step for each mini-batch of shuffled rows.

        Gradients left over from `forward_backward` are dropped first. When a mini-batch fails,
        the steps of those before it remain, and policy_version says how many they were.

        Which rows a mini-batch has does not depend on the ranks; each data-parallel replica takes
        its part of every one: `update_assignment`.

        Args:
            batch: with the columns that the loss names.
            loss_spec: the loss.
            epochs: passes over the batch.
            mini_batch_rows: rows of one optimizer step, over all ranks; the last one may have
                fewer.
            seed: of the shuffles.
            progress: called after each micro-batch with rows done over all epochs (this rank's).
            rows: which rows of the whole batch those of `batch` are; all that this rank trains on
                must be among them. None: all of them, in order.
            lengths: tokens in each row of the whole batch, where `rows` is given.
            rows_per_unit: neighbouring rows of the whole batch that go to the same mini-batch,
                replica and forward pass; divides mini_batch_rows. 1: each row for itself.
            auxiliary: further losses over rows of their own.

        Returns:
            Means over mini-batches (maxima for names ending in "_max") of the loss's metrics,
            grad_norm and learning_rate; sampler_logprob_diff_* of the first mini-batch alone,
            the only one whose weights the sampler had; optimizer_steps; and metrics of auxiliary
            losses, "auxiliary/<type>/" before each name, over the steps that had rows of theirs.

        Raises:
            LossNotFiniteError: see `forward_backward` and `optim_step`.
            ValueError: a number is out of range, a row that this rank needs is not in `batch`, or
                a loss needs another output than this model has.
        """
        self.drop_gradients()
        check_auxiliary(auxiliary)
        for spec in (loss_spec, *(extra.loss for extra in auxiliary)):
            self._check_model(*_TRAINED_BY[make_loss(spec).needs])
        (steps, extra_steps), _ = prepare_together(
            lambda: (
                self._places_of_update(
                    HeldRows(batch, rows, lengths),
                    auxiliary,
                    epochs=epochs,
                    mini_batch_rows=mini_batch_rows,
                    seed=seed,
                    rows_per_unit=rows_per_unit,
                ),
                None,
            ),
            self.mesh.dp,
            self.model.device,
        )
        num_rows = sum(len(places) for part in (steps, *extra_steps) for places in part)
        means = StepMetrics()
        done = 0
        for step, places in enumerate(steps):
            try:
                metrics, _ = self._accumulate(
                    batch,
                    places,
                    loss_spec,
                    _shifted(progress, done, num_rows),
                    rows_per_unit=rows_per_unit,
                )
                done += len(places)
                for extra, extra_places in zip(auxiliary, extra_steps, strict=True):
                    if not extra.has_rows(step, len(steps)):
                        continue
                    found, _ = self._accumulate(
                        extra.batch,
                        extra_places[step],
                        extra.loss,
                        _shifted(progress, done, num_rows),
                        weight=extra.weight,
                    )
                    metrics |= {extra.prefix + name: number for name, number in found.items()}
                    done += len(extra_places[step])
            except BaseException:
                self.drop_gradients()
                raise
            means.add(metrics | self.optim_step())
        return {**means.result(), "optimizer_steps": float(len(steps))}

    # --- weights --------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name, float32, detached, tied ones once. They are not copies.

        With many ranks: this rank's parts, which are those of `layouts.train_layout` (some may be
        empty).
        """
        for name, weight in self.model.named_weights():
            yield name, local_part(weight.detach())

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """A moment or step count (one of STATE_NAMES) by weight; see `Optimizer.state`.

        Moments are cut as `named_weights` are.
        """
        return self._optimizer.state(name)

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
        moved = sum(local_part(tensor).nbytes for tensor in tensors if tensor.device != device)
        self.rank_model.to(device)
        self.model.device = device
        return moved + self._optimizer.move_to(device)

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint: weights, optimizer, schedule, random state, policy_version.

        With many ranks all of them call it, each writes its part, and any layout can load it.

        Args:
            directory: must not exist; on a disk that all ranks see. It is on disk and whole when
                this returns.
            extra: JSON-able state of the caller, returned by `load`; rank 0's is kept.

        Raises:
            GradientPendingError: gradients are accumulated, which a checkpoint does not hold.
            FolderExistsError: the directory exists.
            RuntimeError: another rank failed (its number and cause); nothing has the name.
        """
        if self._has_gradient:
            raise GradientPendingError(
                "gradients are accumulated: call optim_step or drop_gradients before save"
            )
        trainer_state.save(
            Path(directory),
            kind=self.kind,
            weights=self._trained_weights(),
            optimizer=self._optimizer,
            policy_version=self.policy_version,
            extra=dict(extra or {}),
        )

    def load(self, directory: Path) -> dict[str, Any]:
        """Takes over a checkpoint, whole or not at all; training goes on bit for bit.

        With many ranks all of them call it; the layout need not be the one that saved.

        Returns:
            The extra state given to `save`.

        Raises:
            ValueError: there is no checkpoint, or it belongs to another model or role. As the
                next, on all ranks alike.
            CheckpointCorruptError: a file is missing, cut or changed; names it.
        """
        self.drop_gradients()
        self.policy_version, extra = trainer_state.load(
            Path(directory),
            kind=self.kind,
            weights=self._trained_weights(),
            optimizer=self._optimizer,
        )
        return extra

    def export(self, directory: Path, dtype: ComputeDtype | None = None) -> None:
        """Writes a Hugging Face folder, tokenizer included; replaces an older one whole.

        A policy is saved as a causal LM, a critic as a token classifier with one label, a reward
        model as a sequence classifier. With many ranks all of them call it, and the files do not
        depend on the layout.

        Args:
            directory: the folder, on a disk that all ranks see.
            dtype: type of the saved weights; None: bfloat16, but float32 for a reward model, whose
                scores are then those that it gives here.
        """
        if dtype is None:
            dtype = "float32" if self.kind == "reward" else "bfloat16"
        weights = self._trained_weights()
        write_model_folder(
            Path(directory),
            config=self.model.config,
            architecture=type(self.model.lm).__name__,
            manifest=weights.layout.manifest,
            parameters=gathered(ShardedTensors(weights.layout, weights.tensors), dtype, self.mesh),
            source=self.model.spec.path,
            dtype=dtype,
            peers=weights.peers,
        )

    # --- inside ---------------------------------------------------------------------------

    def _places_of_update(
        self,
        held: HeldRows,
        auxiliary: Sequence[AuxiliaryLoss],
        *,
        epochs: int,
        mini_batch_rows: int,
        seed: int,
        rows_per_unit: int,
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        """This rank's places in each optimizer step: of the main loss, and of each further one."""
        steps = held.of_update(
            self.mesh.dp,
            epochs=epochs,
            mini_batch_rows=mini_batch_rows,
            seed=seed,
            rows_per_unit=rows_per_unit,
        )
        return steps, [extra.places(self.mesh.dp, len(steps)) for extra in auxiliary]

    def _check_model(self, kind: TrainerKind, what: str) -> None:
        if self.kind != kind:
            raise ValueError(
                f"{what} needs {_MODELS[kind]}, but this {self.kind} trains "
                f"{_MODELS[self.kind]}: send it to the other role"
            )

    def _trained_weights(self) -> trainer_state.TrainedWeights:
        return trainer_state.TrainedWeights.of(
            dict(self.named_weights()), self.model.shape, self.mesh, self.model.device
        )


def _shifted(progress: Progress | None, done_before: int, total: int) -> Progress | None:
    """Progress of a mini-batch as progress of the whole update."""
    if progress is None:
        return None
    return lambda _stage, done, _rows: progress("update", done_before + done, total)
