"""Held-out evaluation: completions, judged, without touching what training depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import ExperienceFuture, Node
from rolemesh.coordinator.dataflow.roles import PromptBatch, RewardHandle, StepContext
from rolemesh.coordinator.recipe.schema import EvaluationSpec
from rolemesh.coordinator.run.metrics import combined_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The held-out score of one state of the policy."""

    step: int
    """Steps made before it."""
    score: float
    """Mean reward of the completions."""
    standard_error: float
    """Standard error of that mean."""
    num_prompts: int
    metrics: Mapping[str, float]
    """Everything that sampler and judge reported, e.g. "accuracy/mean"."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "step": self.step,
            "score": self.score,
            "standard_error": self.standard_error,
            "num_prompts": self.num_prompts,
            "metrics": dict(self.metrics),
        }

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Reads what `to_dict` wrote; raises TypeError for anything else."""
        return cls(**values)

    def scalars(self) -> dict[str, float]:
        """Returns them by name, for a step's record."""
        return {
            "held_out/score": self.score,
            "held_out/standard_error": self.standard_error,
            **{f"held_out/{name}": value for name, value in self.metrics.items()},
        }


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
