"""Section `run.tuning` of a recipe: which settings a run tries while it goes on, and which it may.

A closed list: each of them changes when and where something is computed, and none what is learnt
from what. Some change which rows are computed together, and so how sums are rounded.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError

from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.sections.schedule import AsyncSamplerSpec
from rolemesh.engine.specs import ClassifierRewardSpec, OutsideRewardSpec, Spec, named_sources
from rolemesh.engine.specs.columns import PROXIMAL_LOGPROBS

_R = TypeVar("_R", bound=BaseModel)
"""A recipe, whose class stands on this file."""

MAX_CANDIDATES = 256
"""Combinations of values that a space may have. The step is predicted for each of them."""

BLOCK_ROWS = "schedule.sampler.block_rows"

Settings = Mapping[str, JsonValue]
"""Values by key, the same keys in all settings of a space."""

_KEYS: Mapping[str, str] = {
    "pools": r"pools",
    BLOCK_ROWS: r"schedule\.sampler\.block_rows",
    "ROLE.source.concurrency": r"(reward|cost)\.source\.concurrency",
    "ROLE.model.micro_batch_tokens": r"(actor|critic|reference)\.model\.micro_batch_tokens",
    "ROLE.source.model.micro_batch_tokens": r"(reward|cost)\.source\.model\.micro_batch_tokens",
    "ROLE.rollout.max_num_seqs": r"(actor|rollout)\.rollout\.max_num_seqs",
}
"""Keys that can be tuned within a run, as messages name them, and their forms."""

SIZES = ("micro_batch_tokens", "max_num_seqs")
"""Last names of keys that always change which rows are computed together."""


class TuningSpec(Spec):
    """Self-tuning: the run tries settings between its steps, and keeps what measures better.

    Nothing that is learnt changes: the same prompts, mini-batches and random numbers.
    """

    space: Mapping[str, tuple[JsonValue, ...]] = Field(min_length=1)
    """Values to try for each key, e.g. {schedule.sampler.block_rows: [0, 8]}. Keys: pools (as in
    the section, on CPUs and without sleep), schedule.sampler.block_rows, source.concurrency of
    reward and cost; with rounding: true also model.micro_batch_tokens of a role, source.model's of
    reward and cost, and rollout.max_num_seqs of actor and rollout."""
    rounding: bool = False
    """Whether settings may be tried that change which rows are computed together, so that sums are
    rounded in another order. False: all that is learnt has the same bits as without tuning."""
    steps: int = Field(default=20, ge=4)
    """Steps of the run after which the best setting so far stays."""
    steps_per_trial: int = Field(default=2, ge=1)
    """Steps that are counted of a setting before it is kept. The first one after a change never
    counts, and a setting whose first counted step is no better is given up at once."""
    least_gain: float = Field(default=0.03, ge=0, lt=1)
    """Share by which a step has to be shorter for a setting to be kept. Where the steps of the best
    setting differ by more among themselves, that counts in its place."""


def key_of(settings: Settings) -> str:
    """The settings as one text, equal where they are."""
    return json.dumps(settings, sort_keys=True)


def with_settings(recipe: _R, settings: Settings) -> _R:
    """The recipe with other values; its other sections are left as they are.

    Raises:
        ValidationError: The recipe refuses them.
    """
    tree = recipe.model_dump(mode="json")
    tree["run"]["tuning"] = None
    for name, value in settings.items():
        *path, last = name.split(".")
        section = tree
        for part in path:
            section = section[part]
        section[last] = value
    changed = type(recipe).model_validate(tree)
    sections = {name.partition(".")[0] for name in settings}
    return recipe.model_copy(update={name: getattr(changed, name) for name in sections})


def space_of(recipe: Any) -> dict[str, list[JsonValue]]:
    """The values of each key as the recipe holds them, its own first; needs `run.tuning`."""
    space = {}
    for name, values in recipe.run.tuning.space.items():
        held = [_value(recipe, name)]
        held += [_value(with_settings(recipe, {name: value}), name) for value in values]
        # A pool says its defaults or leaves them out.
        space[name] = [one for index, one in enumerate(held) if one not in held[:index]]
    return space


def candidates(space: Mapping[str, list[JsonValue]]) -> Iterator[dict[str, JsonValue]]:
    """All settings of a space, the recipe's own first."""
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def check_tuning(recipe: Any) -> None:
    """Checks the section with all others.

    Raises:
        ValueError: It cannot be done, or would change what is learnt; names field and value.
    """
    spec = recipe.run.tuning
    if spec is None:
        return
    if recipe.algorithm.type == "external":
        raise ValueError(
            "run.tuning is given, but a client makes the steps of algorithm 'external': leave it "
            "out"
        )
    if not recipe.run.recovery.cuts:
        raise ValueError(
            "run.tuning is given, but run.recovery.cuts is false: settings change at a cut; set it "
            "to true, or leave run.tuning out"
        )
    if isinstance(recipe.schedule.sampler, AsyncSamplerSpec):
        raise ValueError(
            "run.tuning is given, but schedule.sampler.type is 'async', where timing decides which "
            "weights sample, so that a setting would change what is learnt: set the type to 'sync' "
            "or 'one_step_ahead', or leave run.tuning out"
        )
    for name, values in spec.space.items():
        _check_key(recipe, name, spec.rounding)
        if not values:
            raise ValueError(f"run.tuning.space.{name} has no values: give some, or leave it out")
        for value in values:
            _check_value(recipe, name, value)
    number = math.prod(len(values) for values in space_of(recipe).values())
    if not 1 < number <= MAX_CANDIDATES:
        raise ValueError(
            f"run.tuning.space has {number} combinations, the recipe's own values included: give 2 "
            f"to {MAX_CANDIDATES}"
        )


def _check_key(recipe: Any, name: str, may_round: bool) -> None:
    if not any(re.fullmatch(form, name) for form in _KEYS.values()):
        raise ValueError(
            f"run.tuning.space.{name}: no run can tune it while it goes on: keys are "
            f"{', '.join(_KEYS)}"
        )
    try:
        _value(recipe, name)
    except (KeyError, TypeError):
        raise ValueError(
            f"run.tuning.space.{name}: the recipe has no such key: leave it out of the space"
        ) from None
    if name == BLOCK_ROWS and recipe.sampling is None:
        raise ValueError(
            f"run.tuning.space.{name}: algorithm {recipe.algorithm.type!r} samples nothing: leave "
            "it out of the space"
        )
    if may_round:
        return
    why = "micro-batches" if name.endswith(SIZES) else ""
    if name == BLOCK_ROWS:
        why = _scorer(recipe)
    if why:
        raise ValueError(
            f"run.tuning.space.{name}: it decides which rows are computed together ({why}), so "
            "that results differ by rounding: set run.tuning.rounding to true if they may, or "
            "leave it out of the space"
        )


def _scorer(recipe: Any) -> str:
    """What computes on blocks of rows with a model; empty where nothing does."""
    loss = getattr(getattr(recipe.algorithm, "parts", None), "fields", {}).get("policy_loss")
    if loss is not None and PROXIMAL_LOGPROBS in loss.columns():
        return "actor.compute_logprobs"
    judges = [section for section in (recipe.reward, recipe.cost) if section is not None]
    sources = [one.source for judge in judges for one in named_sources(judge.source)]
    if any(isinstance(source, ClassifierRewardSpec) for source in sources):
        return "the classifier of a reward"
    scorers = (*recipe.roles, *recipe.served_by_actor)
    models = ("reference", "teacher", "critic")
    return next((role for kind in models for role in scorers if kind_of(role) == kind), "")


def _check_value(recipe: Any, name: str, value: JsonValue) -> None:
    given = f"run.tuning.space.{name} has {json.dumps(value)}"
    try:
        changed = with_settings(recipe, {name: value})
    except ValidationError as error:
        first = error.errors()[0]
        why = first.get("ctx", {}).get("error", first["msg"])
        raise ValueError(f"{given}, which the recipe refuses: {why}") from None
    if name == "pools":
        for placed in (recipe, changed):
            for pool_name, pool in placed.pools.items():
                if set(pool.devices) != {"cpu"} or pool.lets_roles_sleep:
                    raise ValueError(
                        f"{given}, but pools.{pool_name} has devices {list(pool.devices)} and "
                        f"sleep {pool.sleep!r}: services get their GPUs when they start, so that "
                        "pools are tuned on CPUs alone; `rolemesh plan --from-run` finds others "
                        "for the next run"
                    )
    if name == BLOCK_ROWS and recipe.run.tuning and not recipe.run.tuning.rounding:
        _check_requests(recipe, given, changed.schedule.sampler.block_rows)


def _check_requests(recipe: Any, given: str, block_rows: int) -> None:
    """A judge gets the same rows in each request, whatever comes in blocks."""
    for role in ("reward", "cost"):
        section = getattr(recipe, role)
        for one in () if section is None else named_sources(section.source):
            source = one.source
            if isinstance(source, OutsideRewardSpec) and block_rows % source.batch_size:
                raise ValueError(
                    f"{given}, which is no multiple of the batch_size of {role}.source "
                    f"({source.batch_size}): other rows would be judged together; give a multiple, "
                    "or lower the batch_size to a divisor"
                )


def _value(recipe: Any, name: str) -> JsonValue:
    value: Any = recipe.model_dump(mode="json")
    for part in name.split("."):
        value = value[part]
    return value  # type: ignore[no-any-return]
