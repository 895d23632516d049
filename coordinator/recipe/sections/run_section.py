"""Section `run` of a recipe: steps, evaluation, checkpoints, recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rolemesh.coordinator.recipe.sections.checkpoints import CheckpointSpec, EarlyStoppingSpec
from rolemesh.coordinator.recipe.sections.health import HealthSpec
from rolemesh.coordinator.recipe.sections.tuning import TuningSpec
from rolemesh.engine.specs import Numerics, Spec


class EvaluationSpec(Spec):
    """Held-out evaluation before and after training, and in between.

    Algorithms that sample answer held-out prompts, which the reward judges. Those that learn from
    given rows compute their loss on held-out ones.
    """

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0 evaluates only before the first and after the last."""
    num_prompts: int = Field(default=128, ge=0)
    """Held-out prompts, or held-out rows of given data; 0 switches evaluation off."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions a prompt: 1 takes the greedy one, more are drawn as in training."""
    pass_at: tuple[int, ...] = ()
    """Reports pass@k for each of these k, at most samples_per_prompt (arXiv 2107.03374, eq. 1)."""

    @model_validator(mode="after")
    def _check_pass_at(self) -> Self:
        for k in self.pass_at:
            if not 1 <= k <= self.samples_per_prompt:
                raise ValueError(
                    f"pass_at has {k}, but samples_per_prompt is {self.samples_per_prompt}: pass@k "
                    "needs at least k samples of a prompt"
                )
        return self


class RecoverySpec(Spec):
    """How a run goes on after a process or a connection has failed."""

    attempts: int = Field(default=5, ge=0, le=1000)
    """Failures that a run survives without having made a step in between; 0: the first ends it.
    Services that are replaced while the step goes on count each by itself."""
    pause_s: float = Field(default=1.0, ge=0, le=60)
    """Pause before the second attempt, in seconds. It doubles with each further one, up to 30 s."""
    wait_s: float = Field(default=300.0, gt=0, le=86400)
    """Longest wait for a service that others start to come back, in seconds."""
    cuts: bool = True
    """Whether trained roles copy their state to shared memory after each step, which takes twice
    the bytes of weights and optimizer. Without, a failure costs the steps since the checkpoint."""
    cut_share: float = Field(default=0.05, gt=0, le=1)
    """Share of a run's time that these copies may take. Where a copy takes more than a second and
    more than this share of a step, only every k-th step is copied, and a failure costs up to k
    steps. A sampler that is one step ahead, health rules that skip steps, and tuning need the copy
    of each step, and have it."""


class RunSpec(Spec):
    """The run as a whole."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Short name: lower-case letters, digits and hyphens."""
    seed: int = Field(default=0, ge=0, lt=2**53)
    """Every random choice derives from it."""
    steps: int = Field(ge=1)
    """Steps of the run: each samples, judges and trains once."""
    prompts_per_step: int = Field(ge=1)
    """Prompts of one step."""
    numerics: Numerics = "exact"
    """How all roles compute that do not say so themselves. exact: log-probs of trainer and sampler
    agree as far as the device allows. fast: layers and sampler in bfloat16 from end to end, where
    the device has instructions for it; policy losses weigh each token against the difference."""
    deterministic: bool = False
    """Whether GPUs compute the same bits from the same work, which costs time there: a run that was
    killed and goes on then ends as an undisturbed one, as it does on CPUs in any case."""
    directory: Path | None = None
    """Where the run's files go; None: runs/<name>-<time>."""
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    early_stopping: EarlyStoppingSpec | None = None
    """Ends the run when evaluations do not get better; None: it makes all steps."""
    recovery: RecoverySpec = RecoverySpec()
    health: HealthSpec = HealthSpec()
    tuning: TuningSpec | None = None
    """Settings that the run tries while it goes on, to make shorter steps; None: none."""
    samples: int = Field(default=4, ge=0, le=64)
    """Rows of each step and evaluation that are kept for people, in samples.jsonl (32 MiB, the
    newest) and, of the newest steps, in the store; of agents all rows of some trajectories. 0 keeps
    none."""

    @model_validator(mode="after")
    def _check_health(self) -> Self:
        skipping = self.health.rules_that("skip")
        if skipping and not self.recovery.cuts:
            raise ValueError(
                f"health.{skipping[0]}.do is 'skip', which takes the cut of the step before, but "
                "recovery.cuts is false: set it to true, or do to 'stop' or 'roll_back'"
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        best, evaluation = self.checkpoint.keep_best, self.evaluation
        if self.early_stopping is not None and best is None:
            raise ValueError(
                f"early_stopping.patience is {self.early_stopping.patience}, but "
                "checkpoint.keep_best, which names the metric that it looks at, is not given: give "
                "checkpoint.keep_best, e.g. {metric: held_out/score, mode: max}"
            )
        for name in ("num_prompts", "every_steps"):
            if best is not None and getattr(evaluation, name) == 0:
                raise ValueError(
                    f"checkpoint.keep_best.metric is {best.metric!r}, but evaluation.{name} is 0, "
                    "so that no evaluations are made whose best could be kept: give at least 1, or "
                    "leave checkpoint.keep_best out"
                )
        return self
