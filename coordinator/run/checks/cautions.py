"""Cautions: settings with which a run works, but seldom as its user means it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.coordinator.algorithms.registry import roles_in
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import AsyncSamplerSpec, OneStepAheadSpec
from rolemesh.coordinator.run.results.evaluation import can_evaluate
from rolemesh.engine.specs import GspoPolicyLossSpec, PolicyTermsSpec


@dataclass(frozen=True, slots=True)
class Caution:
    """One such setting."""

    text: str
    remedy: str


def cautions(recipe: Recipe, num_train: int | None, num_held_out: int | None) -> Iterator[Caution]:
    """Looks at the sizes of a recipe's steps and data.

    Args:
        recipe: The recipe.
        num_train: Training prompts; None: not known.
        num_held_out: Held-out prompts; None: not known.
    """
    section, sampling, run = recipe.algorithm, recipe.sampling, recipe.run
    if not isinstance(section, AlgorithmSection):
        return
    if sampling is not None:
        group, rows = sampling.samples_per_prompt, section.mini_batch_rows
        num_rows = run.prompts_per_step * group
        if rows < num_rows and rows % group:
            yield Caution(
                f"algorithm.mini_batch_rows is {rows} and algorithm.sampling.samples_per_prompt is "
                f"{group}, so that optimizer steps split the completions of a prompt, and their "
                "prompt is computed more than once",
                f"give mini_batch_rows as a multiple of {group}",
            )
        loss = section.parts.fields.get("policy_loss")
        if isinstance(loss, PolicyTermsSpec):
            yield from _of_old_weights(recipe, loss)
        if (
            run.numerics == "fast"
            and isinstance(loss, GspoPolicyLossSpec)
            and loss.off_policy is None
        ):
            yield Caution(
                "run.numerics is 'fast', in which log-probs of sampler and trainer differ by about "
                f"0.02 a token, but algorithm.policy_loss clips ratios at {loss.clip_low:g} and "
                f"{loss.clip_high:g} from 1 and algorithm.off_policy is null: the clip takes most "
                "gradients away",
                "leave algorithm.off_policy out, or set run.numerics to 'exact'",
            )
    evaluation = run.evaluation
    is_asked = evaluation.num_prompts > 0 and "num_prompts" in evaluation.model_fields_set
    if is_asked and not can_evaluate(recipe, roles_in(recipe)):
        held_out = "held-out rows" if num_held_out is None else f"{num_held_out} held-out rows"
        yield Caution(
            f"run.evaluation.num_prompts is {evaluation.num_prompts}, but algorithm "
            f"{section.type!r} uses no reward that could judge completions: there is no "
            f"evaluation, and the {held_out} are not used",
            "set run.evaluation.num_prompts to 0, and lower held_out_size of the data to train on "
            "all rows",
        )
    if sampling is None and evaluation.num_prompts:
        for name in ("samples_per_prompt", "pass_at"):
            if name in evaluation.model_fields_set:
                yield Caution(
                    f"run.evaluation.{name} is {getattr(evaluation, name)}, but algorithm "
                    f"{section.type!r} samples no completion: the loss of given ones is computed",
                    f"take run.evaluation.{name} out",
                )
    if num_train is not None and run.prompts_per_step > num_train:
        yield Caution(
            f"run.prompts_per_step is {run.prompts_per_step}, but there are {num_train} training "
            "prompts: every step has the same ones several times",
            f"lower run.prompts_per_step to {num_train} at most, or give more data",
        )
    if num_train is not None and num_held_out is not None and num_held_out > num_train:
        yield Caution(
            f"{num_held_out} prompts are held out and {num_train} are left to train on",
            "lower held_out_size of the data",
        )


def _of_old_weights(recipe: Recipe, loss: PolicyTermsSpec) -> Iterator[Caution]:
    """A schedule that samples with old weights, and a loss that takes them for new ones."""
    sampler = recipe.schedule.sampler
    if not isinstance(sampler, AsyncSamplerSpec | OneStepAheadSpec):
        return
    if loss.off_policy is not None or loss.corrects_itself:
        return
    steps = sampler.max_staleness if isinstance(sampler, AsyncSamplerSpec) else 1
    name = getattr(loss, "type", None)
    old = f"weights up to {steps} step{'s' * (steps > 1)} old"
    harm = (
        f"the loss {name!r} takes their samples for its own, and its gradient is biased"
        if loss.weighs_now
        else f"the clip of the loss {name!r} is around them, so that tokens which have moved "
        "since lose their gradient, and updates are held back to old weights (arXiv 2505.24298, "
        "section 5.2)"
    )
    yield Caution(
        f"schedule.sampler.type is {sampler.type!r}, so that {old} sample, but "
        f"algorithm.off_policy corrects for nothing: {harm}",
        "give algorithm.off_policy: {type: token_truncation, cap: 2.0}, or another form of "
        "docs/algorithms.md",
    )
