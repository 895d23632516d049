"""Held-out evaluation, without touching what training depends on.

Completions are sampled and judged, or, where an algorithm learns from given rows, its own loss is
computed on held-out ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rolemesh.coordinator.algorithms.registry import Algorithm, start_step
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import ExperienceFuture, Node
from rolemesh.coordinator.dataflow.roles import PromptBatch, RewardHandle, StepContext
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.run_section import EvaluationSpec
from rolemesh.coordinator.run.results.metrics import combined_metrics, merged_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What held-out rows say of one state of the weights."""

    step: int
    """Steps made before it."""
    score: float | None = None
    """Mean reward of the completions; None where a loss was computed."""
    standard_error: float | None = None
    """Standard error of that mean."""
    num_prompts: int
    """Held-out rows."""
    metrics: Mapping[str, float]
    """Everything that services reported, e.g. "accuracy/mean" of a judge; or "loss" and, where rows
    are compared or judged, "preference_accuracy"."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Reads what `to_dict` wrote; raises TypeError for anything else."""
        return cls(**values)

    def scalars(self) -> dict[str, float]:
        """Returns them by name, for a step's record."""
        found = {f"held_out/{name}": value for name, value in self.metrics.items()}
        if self.score is None or self.standard_error is None:
            return found
        score = {"held_out/score": self.score, "held_out/standard_error": self.standard_error}
        return score | found

    def told(self) -> str:
        """A line for people."""
        if self.score is not None:
            return (
                f"held-out score after {self.step} steps: {self.score:.3f} "
                f"(standard error {self.standard_error:.3f}, {self.num_prompts} prompts)"
            )
        found = f"held-out loss after {self.step} steps: {self.metrics['loss']:.3f}"
        if "preference_accuracy" in self.metrics:
            found += f", accuracy {self.metrics['preference_accuracy']:.3f}"
        return f"{found} ({self.num_prompts} rows)"


def can_evaluate(recipe: Recipe, roles: Collection[str]) -> bool:
    """Whether held-out rows say something: a loss on given rows, or a reward of completions.

    Args:
        recipe: The recipe.
        roles: Roles that its algorithm uses.
    """
    if recipe.sampling is None:
        return isinstance(recipe.algorithm, AlgorithmSection)
    return {"actor", "reward"} <= set(roles)


async def evaluate_loss(
    context: StepContext, spec: EvaluationSpec, algorithm: Algorithm
) -> Evaluation:
    """Has the algorithm make a step of the first held-out rows, with losses in place of updates.

    So they are read, scored and compared by the very calls that training makes. All rows are one
    batch, whose means they are.

    Args:
        context: A context with is_evaluation set.
        spec: How many rows; at least 1.
        algorithm: Works on given data, and samples nothing.

    Raises:
        RunError: A call failed, or reports no loss.
    """
    async with context.dataflow:
        start_step(
            algorithm, PromptBatch(start=0, count=spec.num_prompts, is_held_out=True), context
        )
    metrics = merged_metrics(context.dataflow.nodes)
    if "loss" not in metrics:
        raise RunError(
            f"the evaluation of {spec.num_prompts} held-out rows reports "
            f"{', '.join(sorted(metrics)) or 'nothing'}, but not the loss: ForwardBackward must "
            "report it"
        )
    return Evaluation(step=context.step, num_prompts=spec.num_prompts, metrics=metrics)


async def evaluate(
    context: StepContext, spec: EvaluationSpec
) -> tuple[Evaluation, ExperienceFuture]:
    """Judges completions of the first held-out prompts: greedy ones, or several drawn ones each.

    Seeds derive from prompt and sample, so training draws the same with and without evaluation.

    Args:
        context: A context with is_evaluation set, which gives nodes and operations own names.
        spec: How many prompts and samples; at least 1 prompt.

    Returns:
        The score, and the completions with their rewards, which services hold until a release.

    Raises:
        RunError: A call failed, or the reward service reports no mean.
    """
    number = spec.samples_per_prompt
    sampling = context.parts.sampling.model_copy(
        update={"greedy": number == 1, "samples_per_prompt": number}
    )
    prompts = PromptBatch(start=0, count=spec.num_prompts, is_held_out=True)
    async with context.dataflow:
        rollouts = context.sampler.generate(context, prompts, sampling)
        # One call judges all completions, so its mean and pass@k are those of the whole.
        rewards = RewardHandle(context).compute_reward(rollouts.whole(), pass_at=spec.pass_at)
    sampled, (judged,) = rollouts.nodes, rewards.nodes
    found = Evaluation(
        step=context.step,
        score=_reported(judged, "reward/mean"),
        standard_error=_reported(judged, "reward/standard_error"),
        num_prompts=spec.num_prompts,
        metrics={**combined_metrics(sampled), **judged.metrics},
    )
    return found, rollouts | rewards


def _reported(node: Node, name: str) -> float:
    if name not in node.metrics:
        if node.notes:
            raise RunError(
                f"{node.name}: no held-out completion is left that could be judged: "
                f"{'; '.join(node.notes)}"
            )
        raise RunError(
            f"{node.name}: the report lacks the metric {name!r}, which evaluation needs: the reward"
            " service must report the mean and its standard error over the rows of the call"
        )
    return node.metrics[name]
