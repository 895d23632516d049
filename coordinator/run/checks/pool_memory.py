"""What the GPUs of a pool hold at each moment of a step, by roles awake and asleep.

Arithmetic on what `services/preview/memory.py` finds of each role. All figures are bytes of one
GPU, and its worst moment is what has to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rolemesh.coordinator.mapping.job.systems import PROCESS_BYTES, TIGHT
from rolemesh.coordinator.recipe.model_sizes import trained_models
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.roles.placement import PoolSpec
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.cautions import Caution
from rolemesh.coordinator.run.checks.footprint import footprint_of, gib
from rolemesh.engine.specs import VllmSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFound:
    """A role on its GPU, as the process of the engine's side found it."""

    role: str
    rest: int = 0
    """Between calls, awake."""
    peak: int = 0
    """While it trains, or scores."""
    at_rest: Mapping[str, int] = field(default_factory=dict)
    """`rest` by purpose."""
    at_peak: Mapping[str, int] = field(default_factory=dict)
    """`peak` by purpose."""
    trains: bool = False
    sampler: Mapping[str, int] = field(default_factory=dict)
    """vLLM's needs; empty: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What the GPUs of a pool do at one time, and hold."""

    what: str
    """E.g. "actor trains"."""
    role: str
    """Who is at work."""
    held: Mapping[str, int]
    """Bytes by role, what processes hold anyway with them; "sampler" beside them."""

    @property
    def total(self) -> int:
        """Bytes of the GPU."""
        return sum(self.held.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFound:
    """The moments of a pool, against the memory of its GPUs."""

    pool: str
    gpu_bytes: int
    moments: Sequence[Moment]
    advice: Sequence[str] = ()
    """What to change, the cheapest first; empty where it fits well."""

    @property
    def worst(self) -> Moment:
        """When most is held."""
        idle = Moment(what="nothing is done", role="", held={})
        return max(self.moments, key=lambda moment: moment.total, default=idle)

    @property
    def headroom(self) -> int:
        """Bytes that are left at the worst moment; below 0 it does not fit."""
        return self.gpu_bytes - self.worst.total

    @property
    def is_tight(self) -> bool:
        """Whether less is left than should be."""
        return self.headroom < TIGHT * self.gpu_bytes

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            **asdict(self),
            "worst": self.worst.what,
            "headroom": self.headroom,
            "moments": [{**asdict(moment), "total": moment.total} for moment in self.moments],
        }


def pool_memory(
    recipe: Recipe, name: str, found: Mapping[str, RoleFound], gpu_bytes: int
) -> PoolFound:
    """Puts the roles of a pool together.

    Args:
        recipe: The recipe.
        name: Of the pool.
        found: By role, those that were estimated.
        gpu_bytes: Memory of each of its GPUs.
    """
    pool = recipe.pools[name]
    roles = [found[role] for role in pool.roles if role in found]
    moments = [moment for one in roles for moment in _moments(recipe, pool, one, roles, gpu_bytes)]
    whole = PoolFound(pool=name, gpu_bytes=gpu_bytes, moments=moments)
    advice = list(_advice(recipe, name, whole, found)) if whole.is_tight else []
    advice += [line for one in roles for line in _short_samplers(recipe, one, gpu_bytes)]
    return PoolFound(pool=name, gpu_bytes=gpu_bytes, moments=moments, advice=advice)


def gpu_cautions(
    recipe: Recipe, own_services: Mapping[str, str | None], gpu_bytes: int
) -> Iterator[Caution]:
    """Pools that the sizes of model files alone show to be too large, or nearly.

    Weights, gradients, moments and the share of a sampler count; activations do not, which
    `rolemesh fit` counts.

    Args:
        recipe: The recipe.
        own_services: As in footprint_of.
        gpu_bytes: Memory of each GPU of this host.
    """
    footprint = footprint_of(recipe, own_services)
    trained = trained_models(recipe)
    found: dict[str, RoleFound] = {}
    for service, size in footprint.device_memory.items():
        role = role_of(service)
        found[role] = RoleFound(
            role=role,
            rest=footprint.device_rest[service],
            peak=size,
            trains=role in trained,
            sampler={"least": 0},
        )
    for name, pool in recipe.pools.items():
        if set(pool.devices) == {"cpu"} or not any(role in found for role in pool.roles):
            continue
        whole = pool_memory(recipe, name, found, gpu_bytes)
        if whole.is_tight:
            yield Caution(
                f"pools.{name}: about {gib(whole.worst.total)} on each GPU of {gib(gpu_bytes)} "
                f"while {whole.worst.what}, activations not counted",
                "`rolemesh fit` counts them, and says what to change",
            )


def _moments(
    recipe: Recipe,
    pool: PoolSpec,
    role: RoleFound,
    roles: Sequence[RoleFound],
    gpu_bytes: int,
) -> Iterator[Moment]:
    others = {}
    for one in roles:
        if one.role == role.role:
            continue
        others[one.role] = PROCESS_BYTES
        if not pool.lets_roles_sleep:
            # A sampler sleeps while its trainer computes, and no other role makes it sleep.
            others[one.role] += one.rest + _budget(recipe, one, gpu_bytes)
    if role.peak:
        doing = "trains" if role.trains else "scores"
        yield Moment(
            what=f"{role.role} {doing}",
            role=role.role,
            held={role.role: PROCESS_BYTES + role.peak, **others},
        )
    budget = _budget(recipe, role, gpu_bytes)
    if budget:
        # Weights that come by an exchange lie beside those that they replace.
        comes = role.role == "rollout" and recipe.schedule.sampler.weights == "nccl"
        arriving = role.sampler.get("arriving", 0) if comes else 0
        held = {role.role: PROCESS_BYTES + role.rest + arriving, "sampler": budget, **others}
        yield Moment(what=f"{role.role} samples", role=role.role, held=held)


def _budget(recipe: Recipe, role: RoleFound, gpu_bytes: int) -> int:
    """What a role's sampler takes."""
    sampler = getattr(recipe.section(role.role), "rollout", None)
    if not role.sampler or not isinstance(sampler, VllmSpec):
        return 0
    return int(sampler.gpu_memory_utilization * gpu_bytes)


def _short_samplers(recipe: Recipe, role: RoleFound, gpu_bytes: int) -> Iterator[str]:
    """A sampler whose share does not hold its weights and one row does not start."""
    budget = _budget(recipe, role, gpu_bytes)
    if budget and budget < role.sampler["least"]:
        rounded = math.ceil(100 * role.sampler["least"] / gpu_bytes) / 100
        yield (
            f"{role.role}.rollout.gpu_memory_utilization: {rounded:g} at least, or a "
            f"larger {role.role}.generate.tp: weights, a pass and one row take "
            f"{role.sampler['least'] / 2**30:.1f} GiB"
        )


def _advice(
    recipe: Recipe, name: str, found: PoolFound, roles: Mapping[str, RoleFound]
) -> Iterator[str]:
    """Keys to change for the worst moment, those that cost least time first."""
    worst = found.worst
    pool, role = recipe.pools[name], roles[worst.role]
    section: Any = recipe.section(worst.role)
    if len(pool.roles) > 1 and not pool.lets_roles_sleep:
        yield f"pools.{name}.sleep: always (roles leave the GPU to the one that computes)"
    if "sampler" in worst.held:
        room = found.gpu_bytes * (1 - TIGHT) - (worst.total - worst.held["sampler"])
        least = role.sampler["least"]
        if room >= least:
            share = int(100 * room / found.gpu_bytes) / 100
            yield f"{worst.role}.rollout.gpu_memory_utilization: {share:g}"
        else:
            yield f"{worst.role}.generate.tp: more slices of the sampler, on more GPUs"
    else:
        yield from _advice_for_model(worst.role, section, role, recipe.layout(worst.role).tp)
    layout = recipe.layout(worst.role)
    where = "train" if hasattr(section, "train") else "layout"
    if layout.num_parts > 1 and role.at_peak.get("activations", 0) > role.peak / 10:
        more = next(size for size in range(layout.cp + 1, layout.dp + 1) if layout.dp % size == 0)
        yield f"{worst.role}.{where}.cp: {more} (ranks cut a row among them, if it is a long one)"
    if layout.fsdp < layout.dp:
        yield f"{worst.role}.{where}.fsdp: {layout.dp} (each rank holds a part of the weights)"
    if role.trains and not section.optimizer.offload:
        yield f"{worst.role}.optimizer.offload: true (moments lie in host memory)"
    yield f"{worst.role}.{where}.dp or .tp: more GPUs, which cut the model further"
    if worst.role == "critic":
        yield "critic.model.num_layers: a critic of the first layers alone"


def _advice_for_model(name: str, section: Any, role: RoleFound, tp: int) -> Iterator[str]:
    model = getattr(section, "model", None) or getattr(section.source, "model", None)
    if model is None:
        return
    part = f"{name}.model" if hasattr(section, "model") else f"{name}.source.model"
    if role.at_peak.get("activations", 0) > role.peak / 10:
        if tp > 1 and not model.sequence_parallel and role.trains:
            yield f"{part}.sequence_parallel: true (slices share the tokens between their blocks)"
        if model.recompute != "full" and role.trains:
            yield f"{part}.recompute: full (layers are computed again in the backward pass)"
        yield f"{part}.micro_batch_tokens: less than {model.micro_batch_tokens}, down to one row"
    if role.at_peak.get("head", 0) > role.peak / 10:
        yield f"{part}.logprob_chunk_tokens: less than {model.logprob_chunk_tokens}"
