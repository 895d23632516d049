"""Trainer of one model, on one rank or many: scoring, gradients, optimizer steps, updates.

Gradients do not depend on how a mini-batch was cut into micro-batches or spread over ranks: every
loss divides by counts over the whole mini-batch, and shares add up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rolemesh.engine.algorithms.losses.base import Loss, make_loss
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.models import scoring
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring import Progress
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import (
    AdamwStepSpec,
    AnyOptimizerSpec,
    ClassifierRewardSpec,
    LossSpec,
    ModelSpec,
)
from rolemesh.engine.train.auxiliary import AuxiliaryLoss, check_auxiliary
from rolemesh.engine.train.expert_loads import LayerLoads
from rolemesh.engine.train.mini_batch import accumulate
from rolemesh.engine.train.model_in_training import ModelInTraining, TrainerKind
from rolemesh.engine.train.optimizers.optimizer import LossNotFiniteError, NoGradientError
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.step_metrics import StepMetrics

__all__ = ["LossNotFiniteError", "NoGradientError", "Trainer"]

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


class Trainer(ModelInTraining):
    """A model with its optimizer, and what changes its weights.

    Owned by the rank's compute thread. Invariant: `policy_version` is raised by one with each
    optimizer step, and nothing else changes a weight (save `load`).

    With many ranks (the model's mesh says so) each has a trainer of its part, and all of them make
    the same calls in the same order. Metrics and errors that come of numbers are then equal on all
    ranks.

    Example::

        trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec(learning_rate=2e-5))
        lengths = batch["tokens"].lengths().tolist()
        plan = UpdatePlan.of_update(
            lengths, trainer.mesh.parts, epochs=1, mini_batch_rows=32, seed=7
        )
        metrics = trainer.update(batch, PpoPolicyLossSpec(), plan)
        trainer.policy_version  # raised by ceil(rows / 32)
    """

    own_functions: OwnFunctions | None = None
    """Functions of the user that losses may be; None: there are none."""

    @classmethod
    def policy(
        cls,
        model: ModelSpec,
        optimizer: AnyOptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
        average: float | None = None,
    ) -> Trainer:
        """A trainer of a causal LM; raises ModelFolderError when its folder cannot be used."""
        return cls(CausalLm(model, device=device, mesh=mesh), optimizer, average=average)

    @classmethod
    def critic(
        cls,
        model: ModelSpec,
        optimizer: AnyOptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> Trainer:
        """A trainer of a value model; raises ModelFolderError when its folder cannot be used."""
        return cls(ScoringModel(model, VALUE_HEAD, device=device, mesh=mesh), optimizer)

    @classmethod
    def reward(
        cls,
        source: ClassifierRewardSpec,
        optimizer: AnyOptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> Trainer:
        """A trainer of a reward model; raises ModelFolderError when its folder cannot be used."""
        head = ScoreHead.of_reward(source)
        return cls(ScoringModel(source.model, head, device=device, mesh=mesh), optimizer)

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
        plan: UpdatePlan,
        progress: Progress | None = None,
        *,
        without_gradients: bool = False,
    ) -> tuple[dict[str, float], Experience]:
        """Adds the gradients of a loss over a mini-batch to those already accumulated.

        Whatever fails drops all gradients, so that a repeat does not add to a part of its own.

        Args:
            batch: With tokens, prompt_lengths and the columns that the loss names.
            loss_spec: The loss.
            plan: Of one step, which says what part of the mini-batch `batch` is and which rows of
                it this replica takes.
            progress: Called after each micro-batch.
            without_gradients: Computes the loss alone; gradients stay as they are, whatever fails.

        Returns:
            The loss's metrics, "loss" among them, over the whole mini-batch; and the column
            logprobs, values or scores of the forward pass for this replica's rows in the order of
            the plan, on the last stage; no rows on other stages.

        Raises:
            LossNotFiniteError: The loss is NaN or infinite; all gradients were dropped, but for a
                call without gradients.
            ColumnMissingError: The batch lacks a column.
            ValueError: Batch and plan do not fit together, on this rank or another one.
        """

        def prepare() -> tuple[None, None]:
            plan.check(batch, num_steps=1)
            return None, None

        try:
            prepare_together(prepare, self.mesh.parts, self.model.device)
            loss, temperature = self._loss_of(loss_spec)
            metrics, outputs = accumulate(
                self.rank_model,
                batch,
                plan.steps[0],
                loss,
                temperature=temperature,
                progress=progress,
                rows_per_unit=plan.rows_per_unit,
                trains=not without_gradients,
            )
        except BaseException:
            if not without_gradients:
                self.drop_gradients()
            raise
        self._has_gradient = self._has_gradient or not without_gradients
        return metrics, outputs

    def optim_step(
        self, learning_rate: float | None = None, adamw: AdamwStepSpec | None = None
    ) -> dict[str, float]:
        """Applies the accumulated gradients and raises policy_version by one.

        Args:
            learning_rate: For this step alone; None takes the spec's schedule.
            adamw: AdamW's other numbers, for this step alone; None takes the spec's.

        Returns:
            grad_norm (before clipping) and learning_rate; of a mixture, how even the loads of its
            experts were.

        Raises:
            NoGradientError: Nothing was accumulated.
            LossNotFiniteError: The gradient is not finite; it is dropped and no weight moves.
            ValueError: The optimizer is another one than the numbers are of.
        """
        if not self._has_gradient:
            raise NoGradientError("no gradient was accumulated: call forward_backward first")
        self._optimizer.check(adamw)
        self._has_gradient = False
        self._settle_cut()
        metrics = self._optimizer.step(learning_rate, adamw)
        if self._expert_loads is not None:
            metrics |= self._expert_loads.step()
        if self._average is not None:
            self._average.step()
        self.policy_version += 1
        return metrics

    def update(
        self,
        batch: Experience,
        loss_spec: LossSpec,
        plan: UpdatePlan,
        *,
        progress: Progress | None = None,
        auxiliary: Sequence[AuxiliaryLoss] = (),
    ) -> dict[str, float]:
        """Trains: an optimizer step for each mini-batch of the plan.

        Gradients left over from `forward_backward` are dropped first. When a mini-batch fails,
        the steps of those before it remain, and policy_version says how many they were.

        Args:
            batch: The rows of the plan, with the columns that the loss names.
            loss_spec: The loss.
            plan: Which rows this rank trains on in each step; the plans of all ranks are made of
                the same numbers.
            progress: Called after each micro-batch with rows done over all epochs (this rank's).
            auxiliary: Further losses over rows of their own.

        Returns:
            Means over mini-batches (maxima for names ending in "_max") of the loss's metrics,
            grad_norm and learning_rate; entropy and what compares with the sampler of the first
            mini-batch alone, the only one whose weights the sampler had; optimizer_steps; and
            metrics of auxiliary losses, "auxiliary/<type>/" before each name, over the steps that
            had rows of theirs.

        Raises:
            LossNotFiniteError: See `forward_backward` and `optim_step`.
            ValueError: A number is out of range, batch and plan do not fit together on this rank
                or another one, or a loss needs another output than this model has.
        """
        self.drop_gradients()
        check_auxiliary(auxiliary)
        loss, temperature = self._loss_of(loss_spec)
        extra_losses = [self._loss_of(extra.loss) for extra in auxiliary]
        num_steps = len(plan.steps)

        def prepare() -> tuple[None, None]:
            plan.check(batch, num_steps=num_steps)
            for extra in auxiliary:
                extra.plan.check(extra.batch, num_steps=num_steps)
            return None, None

        prepare_together(prepare, self.mesh.parts, self.model.device)
        plans = (plan, *(extra.plan for extra in auxiliary))
        num_rows = sum(len(places) for one in plans for places in one.steps)
        means = StepMetrics()
        done = 0
        for step, places in enumerate(plan.steps):
            try:
                metrics, _ = accumulate(
                    self.rank_model,
                    batch,
                    places,
                    loss,
                    temperature=temperature,
                    progress=_shifted(progress, done, num_rows),
                    rows_per_unit=plan.rows_per_unit,
                    reports_entropy=step == 0,
                )
                done += len(places)
                for extra, (extra_loss, extra_temperature) in zip(
                    auxiliary, extra_losses, strict=True
                ):
                    if not extra.plan.rows_of_steps[step]:
                        continue
                    found, _ = accumulate(
                        self.rank_model,
                        extra.batch,
                        extra.plan.steps[step],
                        extra_loss,
                        temperature=extra_temperature,
                        progress=_shifted(progress, done, num_rows),
                        weight=extra.weight,
                    )
                    metrics |= {extra.prefix + name: number for name, number in found.items()}
                    done += len(extra.plan.steps[step])
            except BaseException:
                self.drop_gradients()
                raise
            self._has_gradient = True
            means.add(metrics | self.optim_step())
        return {**means.result(), "optimizer_steps": float(num_steps)}

    def take_expert_loads(self) -> list[LayerLoads]:
        """How often the experts of each layer were chosen since they were last taken.

        All ranks call it, after an update or an optimizer step, and get the same: the sum over its
        optimizer steps and over replicas. Of a model without experts, nothing.
        """
        return [] if self._expert_loads is None else self._expert_loads.take()

    # --- inside ---------------------------------------------------------------------------

    def _loss_of(self, spec: LossSpec) -> tuple[Loss[Any], float]:
        """A loss that this model can be trained on, and the temperature of its softmax."""
        loss = make_loss(spec, self.own_functions)
        self._check_model(*_TRAINED_BY[loss.needs])
        loss.policy_version = self.policy_version
        return loss, spec.logprob_temperature

    def _check_model(self, kind: TrainerKind, what: str) -> None:
        if self.kind != kind:
            raise ValueError(
                f"{what} needs {_MODELS[kind]}, but this {self.kind} trains "
                f"{_MODELS[self.kind]}: send it to the other role"
            )


def _shifted(progress: Progress | None, done_before: int, total: int) -> Progress | None:
    """Progress of a mini-batch as progress of the whole update."""
    if progress is None:
        return None
    return lambda _stage, done, _rows: progress("update", done_before + done, total)
