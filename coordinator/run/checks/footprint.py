"""Estimates of what a run takes: memory, shared memory, disk. From the recipe and file headers.

They count what grows with the models. Activations are not among it: they grow with
micro_batch_tokens and are freed after each pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolemesh.coordinator.recipe.model_sizes import (
    models_of,
    num_orthogonalised,
    num_parameters,
    num_trained_parameters,
    trained_models,
)
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import ModelSpec, RolloutSpec, VllmSpec
from rolemesh.engine.specs.by_device import Device, model_choices

WEIGHT_BYTES = 4
"""Bytes of a weight where it is scored with: float32."""

_NARROW_BYTES = 2
"""Bytes of a weight beneath an adapter where it lies in bfloat16."""

TRAINED_BYTES = 16
"""Bytes of a trained weight: itself, its gradient and two moments, in float32."""

SAVED_BYTES = 12
"""Bytes of a trained weight in a checkpoint or a cut: itself and two moments, in float32."""

AVERAGE_BYTES = 4
"""Bytes of its moving average, in float32, where one is kept: in memory, checkpoint and cut."""

_MOMENT_BYTES = 4
"""Bytes of the moment that a weight lacks which Muon steps."""

EXPORTED_BYTES = 2
"""Bytes of a weight in the exported model: bfloat16. An adapter is exported in float32."""

PROCESS_BYTES = 1 << 30
"""Bytes of a process with torch, of which one with vLLM takes about twice as much."""

_CUTS = 2


@dataclass(kw_only=True)
class Footprint:
    """What a run takes, in bytes, as far as its models can be read here."""

    memory: dict[str, int] = field(default_factory=dict)
    """By role that this machine starts and that computes on the CPU: its ranks together."""
    device_memory: dict[str, int] = field(default_factory=dict)
    """By role that computes on GPUs: of each rank."""
    device_rest: dict[str, int] = field(default_factory=dict)
    """The same between calls, when there is no gradient."""
    cuts: int = 0
    """Of shared memory, for the cuts of all trained roles."""
    checkpoint: int = 0
    """Of one checkpoint."""
    checkpoints_kept: int = 0
    """Checkpoints on disk at most: all, or one more than are kept, while the newest is written."""
    export: int = 0
    """Of the exported model."""
    unknown: list[str] = field(default_factory=list)
    """Folders whose weights cannot be read here, and which are counted as nothing."""

    @property
    def disk(self) -> int:
        """Bytes on disk at most, of checkpoints and the model."""
        return self.checkpoints_kept * self.checkpoint + self.export

    def disk_in(self, directory: Path) -> str:
        """What a run takes in its folder, for people."""
        return (
            f"at most {gib(self.disk)} in {directory}: {self.checkpoints_kept} x "
            f"{gib(self.checkpoint)} of checkpoints and a model of {gib(self.export)}"
        )


def gib(size: int) -> str:
    """A size in bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def free_bytes(directory: Path) -> int:
    """Free bytes where a folder lies, or would lie."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free


def footprint_of(recipe: Recipe, own_services: Mapping[str, str | None]) -> Footprint:
    """Estimates what a run of a recipe takes.

    Args:
        recipe: The recipe.
        own_services: By name of each service that the run uses: its address, None where this
            machine starts it.
    """
    found = Footprint()
    trained = trained_models(recipe)
    sizes: dict[str, _Weights] = {}
    for role, models in models_of(recipe).items():
        for model in models:
            count = num_parameters(model.path, model.num_layers)
            if count is None and str(model.path) not in found.unknown:
                found.unknown.append(str(model.path))
            changing = (num_trained_parameters(model) or 0) if role in trained else 0
            spared = num_orthogonalised(recipe, role)
            one = _Weights(count or 0, changing, orthogonalised=spared)
            if model.adapter is not None:
                one = _Weights(one.all + one.trained, one.trained, _base_bytes(recipe, role, model))
            if role == "actor" and recipe.actor_average is not None:
                one = replace(one, averaged=changing)
            sizes[role] = sizes.get(role, _Weights()).beside(one)
        sizes.setdefault(role, _Weights())
    for service, address in own_services.items():
        if address is None:
            _add_service(found, recipe, service, sizes)
    saved = sum(sizes[role].saved for role in trained if role in own_services)
    found.checkpoint = saved
    num_best = 0 if recipe.run.checkpoint.keep_best is None else 1
    # One more while it is written.
    most_kept = recipe.run.checkpoint.keep + num_best + 1
    found.checkpoints_kept = min(_num_checkpoints(recipe), most_kept)
    found.cuts = _CUTS * saved if recipe.run.recovery.cuts else 0
    exported = "actor" if "actor" in own_services else "reward"
    if exported in sizes:
        has_adapter = exported in trained and trained[exported].adapter is not None
        each = WEIGHT_BYTES if has_adapter else EXPORTED_BYTES
        found.export = each * (sizes[exported].trained if has_adapter else sizes[exported].all)
    return found


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of a role's models."""

    all: int = 0
    trained: int = 0
    """Of all, those that change."""
    frozen_bytes: int = WEIGHT_BYTES
    """Of each that does not."""
    orthogonalised: int = 0
    """Of those that change, those that Muon steps."""
    averaged: int = 0
    """Of those that change, those of which a moving average is kept."""

    def beside(self, other: _Weights) -> _Weights:
        """Those of both."""
        widest = max(self.frozen_bytes if self.all else 0, other.frozen_bytes)
        return _Weights(
            self.all + other.all,
            self.trained + other.trained,
            widest,
            self.orthogonalised + other.orthogonalised,
            self.averaged + other.averaged,
        )

    @property
    def saved(self) -> int:
        """Bytes of those that change, of their moments and of their average."""
        moments = SAVED_BYTES * self.trained - _MOMENT_BYTES * self.orthogonalised
        return moments + AVERAGE_BYTES * self.averaged

    @property
    def rest(self) -> int:
        """Bytes between calls."""
        return self.saved + self.frozen_bytes * (self.all - self.trained)

    @property
    def peak(self) -> int:
        """Bytes while gradients are there."""
        return self.rest + (TRAINED_BYTES - SAVED_BYTES) * self.trained


def _base_bytes(recipe: Recipe, role: str, model: ModelSpec) -> int:
    """Bytes of a weight beneath an adapter."""
    on_gpu = recipe.pool_of(role).has_gpus
    # Whether a CPU multiplies bfloat16 is not asked here; without, weights are wider.
    device = Device("cuda") if on_gpu else Device("cpu", multiplies_bfloat16=False)
    numerics = recipe.section(role).chosen_numerics
    chosen = model_choices(model, device, None, numerics=numerics)["frozen_dtype"].value
    return _NARROW_BYTES if chosen == "bfloat16" else WEIGHT_BYTES


def _num_checkpoints(recipe: Recipe) -> int:
    """Checkpoints that a run writes at most, the one after the last step among them."""
    every, steps = recipe.run.checkpoint.every_steps, recipe.run.steps
    due = {steps, *(range(every, steps, every) if every else ())}
    if recipe.run.checkpoint.keep_best is not None:
        # Each evaluation may be the best one.
        due.update(range(0, steps, recipe.run.evaluation.every_steps))
    return len(due - {0})


def _add_service(
    found: Footprint, recipe: Recipe, service: str, sizes: Mapping[str, _Weights]
) -> None:
    role = role_of(service)
    section, layout = recipe.section(role), recipe.layout(role)
    sampler: RolloutSpec | None = getattr(section, "rollout", None)
    weights = sizes[role]
    # Ranks that do not cut parameters among them hold whole copies.
    copies = layout.dp // layout.fsdp
    devices = next(pool.devices for pool in recipe.pools.values() if role in pool.roles)
    num_ranks = layout.world_size
    if set(devices) != {"cpu"}:
        found.device_memory[service] = weights.peak * copies // num_ranks
        found.device_rest[service] = weights.rest * copies // num_ranks
        return
    held = weights.peak * copies + num_ranks * PROCESS_BYTES
    if isinstance(sampler, VllmSpec):
        policy = sizes["actor"].all if "actor" in sizes else 0
        replica_ranks = section.rank_layout().generate.tp * section.rank_layout().generate.pp
        held += (num_ranks // replica_ranks) * WEIGHT_BYTES * policy
        held += num_ranks * (sampler.kv_cache_gib << 30) + num_ranks * PROCESS_BYTES
    found.memory[service] = held
