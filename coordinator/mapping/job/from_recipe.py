"""A recipe as a job: its models, rows and dataflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolemesh.coordinator.mapping.job.job import Job, Role, Wishes
from rolemesh.coordinator.mapping.job.layouts import Freedom
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, ROLEMESH_FAST
from rolemesh.coordinator.mapping.job.tasks import RecordedNode, sampled_step, step_of
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection, SampledSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.model_sizes import models_of, trained_models
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec
from rolemesh.engine.specs import AdapterSpec, HfSpec, ModelSpec, MuonSpec, VllmServerSpec, VllmSpec
from rolemesh.engine.specs.by_device import Device, model_choices

_MOST_ROWS = 1024
"""Rows of a sampler replica, where the recipe leaves max_num_seqs to the plan."""

_PASS_TOKENS = (4096, 8192, 16384)
"""Sizes of micro-batches that are tried, beside the recipe's own."""


def one_call_a_role(recipe: Recipe) -> Recipe:
    """The recipe with each role as one service that is called once for all rows.

    How calls are dealt out follows from a placement, and rows that stream in blocks only hide
    scoring behind sampling: neither changes which tasks there are.
    """
    sampler = recipe.schedule.sampler.model_copy(update={"batch_size": None, "block_rows": 0})
    services = {
        role: spec.model_copy(update={"replicas": 1, "addresses": ()})
        for role, spec in recipe.services.items()
    }
    schedule = recipe.schedule.model_copy(update={"sampler": sampler})
    return recipe.model_copy(update={"schedule": schedule, "services": services})


def work_of(
    recipe: Recipe, *, prompt_tokens: int | None = None, completion_tokens: float | None = None
) -> Work:
    """The rows of a step.

    Args:
        recipe: The recipe.
        prompt_tokens: Of a prompt, in the mean; None: as many as the sampler leaves room for.
        completion_tokens: Of a completion, in the mean; None: all are as long as they may be.

    Raises:
        RecipeError: The recipe does not say how long rows are, or they cannot be so.
    """
    section, kind = recipe.algorithm, recipe.algorithm.type
    if not isinstance(section, AlgorithmSection):
        raise RecipeError(
            f"algorithm.type is {kind!r}: a client makes its steps, so that there is no "
            "step to plan"
        )
    sampler, sampling = recipe.sampler, recipe.sampling
    if sampler is None or sampling is None:
        if prompt_tokens is None or completion_tokens is None:
            raise RecipeError(
                f"algorithm {kind!r} trains on rows that are given, and the recipe does "
                "not say how long they are: give --prompt-tokens and --completion-tokens"
            )
        samples, completions = section.rows_per_prompt or 1, Lengths.fixed(completion_tokens)
    else:
        samples, longest = sampling.samples_per_prompt, sampling.max_new_tokens
        if prompt_tokens is None:
            prompt_tokens = max(1, sampler.max_model_len - longest)
        if prompt_tokens + longest > sampler.max_model_len:
            raise RecipeError(
                f"--prompt-tokens is {prompt_tokens}, but max_model_len is "
                f"{sampler.max_model_len} and completions have up to {longest}: give at most "
                f"{sampler.max_model_len - longest}"
            )
        if completion_tokens is not None and not 0 < completion_tokens <= longest:
            raise RecipeError(
                f"--completion-tokens is {completion_tokens:g}, but sampling.max_new_tokens is "
                f"{longest}: give the mean, above 0 and at most that"
            )
        completions = (
            Lengths.fixed(longest)
            if completion_tokens is None
            else Lengths.spread(completion_tokens, longest)
        )
    return Work(
        prompts=recipe.run.prompts_per_step,
        samples=samples,
        prompt_tokens=prompt_tokens,
        completions=completions,
        mini_batch_rows=section.mini_batch_rows,
        epochs=section.epochs,
        # Rows of given answers share no prompt beyond a pair's, which is not counted.
        shares_prompts=isinstance(section, SampledSpec),
    )


def job_of(
    recipe: Recipe,
    nodes: Sequence[RecordedNode],
    work: Work,
    *,
    on_gpus: bool = True,
    wishes: Wishes | None = None,
    most_slices: int = 8,
    offload: bool = True,
) -> Job:
    """What a recipe's placement is to be found for.

    Args:
        recipe: The recipe, as `one_call_a_role` gives it.
        nodes: The graph of a step, as `run.checks.planning.plan_step` makes it of that.
        work: The rows of a step.
        on_gpus: Whether any of the devices is a GPU.
        wishes: Of the user.
        most_slices: Tensor slices of a role at most.
        offload: Whether moments may lie in host memory between steps.

    Raises:
        RecipeError: A step that cannot be planned, a role of several models, or samplers that are
            no part of the recipe.
        PlanError: A model of which nothing is known.
    """
    ahead = () if isinstance(recipe.schedule.sampler, SyncSamplerSpec) else ("rollout",)
    step = step_of(nodes, samples=work.samples, ahead=ahead)
    if recipe.sampling is not None and not any(task.kind == "generate" for task in step.tasks):
        if recipe.algorithm.type != "dapo":
            raise RecipeError(
                f"the step of algorithm {recipe.algorithm.type!r} decides while it runs what it "
                "samples, so that it cannot be planned"
            )
        reference = None
        if "reference" in recipe.served_by_actor:
            reference = ("actor", "compute_reference_logprobs")
        elif recipe.reference is not None:
            reference = ("reference", "compute_logprobs")
        step = sampled_step(step, reference=reference)
    free = Freedom(
        most_slices=most_slices,
        recompute=("none", "full") if on_gpus else ("none",),
        offload=(False, True) if on_gpus and offload else (False,),
    )
    roles = [role for name in step.roles if (role := _role(recipe, name, work, free, on_gpus))]
    if not roles:
        raise RecipeError("no role of the recipe has a model, so that nothing is to be placed")
    wishes = wishes or Wishes()
    # A sampler that is ahead computes while the others do.
    alone = [(one, role.name) for one in ahead for role in roles if role.name != one]
    return Job(
        roles=tuple(roles),
        step=step,
        work=work,
        system=ROLEMESH if recipe.run.numerics == "exact" else ROLEMESH_FAST,
        wishes=replace(wishes, apart=(*wishes.apart, *alone)),
    )


def _role(recipe: Recipe, name: str, work: Work, free: Freedom, on_gpus: bool) -> Role | None:
    """A role with a model; None for one that judges by rules, or asks others."""
    section: Any = recipe.section(name)
    models = models_of(recipe)[name]
    if len(models) > 1:
        raise RecipeError(
            f"{name}.source has {len(models)} models in one role, which is not planned: give one, "
            "or place it yourself"
        )
    if not models and name != "rollout":
        return None
    # A rollout service has a sampler's model alone, with all layers.
    spec = models[0] if models else None
    model = Model.from_folder(
        section.model.path if spec is None else spec.path,
        head="lm_head"
        if kind_of(name) in ("actor", "reference", "teacher", "rollout")
        else "score",
        num_layers=None if spec is None else spec.num_layers,
        adapter=_adapter(recipe, spec),
    )
    trains = name in trained_models(recipe)
    sampler = getattr(section, "rollout", None)
    samples = sampler is not None and not (name == "actor" and recipe.rollout is not None)
    if isinstance(sampler, VllmServerSpec):
        raise RecipeError(
            f"{name}.rollout.type is 'vllm_server': what its servers compute on is not part of the "
            "recipe, so that a step is not predicted; place the roles yourself"
        )
    longest = int(work.longest_row)
    sizes = () if spec is None else (spec.micro_batch_tokens, *_PASS_TOKENS)
    freedom = replace(
        free,
        cuts_over_data=(False,) if spec is None else (True, False),
        shares_experts=spec is not None,
        cuts_rows=spec is not None,
        generate_slices=not isinstance(sampler, HfSpec),
        same_generation=spec is None,
        micro_batch_tokens=tuple(sorted({max(longest, one) for one in sizes})) or (longest,),
    )
    given_rows = sampler.max_num_seqs if isinstance(sampler, VllmSpec | HfSpec) else None
    return Role(
        name=name,
        model=model,
        trains=trains,
        samples=samples,
        freedom=freedom,
        most_rows=given_rows or (_MOST_ROWS if on_gpus else 64),
        is_plain=isinstance(sampler, HfSpec),
        averages=name == "actor" and recipe.actor_average is not None,
        frozen_bytes=_frozen_bytes(recipe, name, spec, on_gpus=on_gpus, trains=trains),
        has_muon=trains and isinstance(section.optimizer, MuonSpec),
    )


def _adapter(recipe: Recipe, spec: ModelSpec | None) -> AdapterSpec | None:
    """That of a model; of a rollout service, whose model is None here, that of the actor."""
    if spec is not None:
        return spec.adapter
    return None if recipe.actor is None else recipe.actor.model.adapter


def _frozen_bytes(
    recipe: Recipe, name: str, spec: ModelSpec | None, *, on_gpus: bool, trains: bool
) -> int | None:
    """Of a parameter that is not trained, as the role's service would choose; None: there is none.

    A CPU counts as one without instructions for bfloat16.
    """
    if spec is None or (trains and spec.adapter is None):
        return None
    device = Device("cuda") if on_gpus else Device("cpu", multiplies_bfloat16=False)
    numerics = recipe.section(name).numerics or recipe.run.numerics
    choices = model_choices(spec, device, None, numerics=numerics, trains=trains)
    return 2 if choices["frozen_dtype"].value == "bfloat16" else 4
