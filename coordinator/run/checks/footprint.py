"""Estimates of what a run takes: memory, shared memory, disk. From the recipe and file headers.

They count what grows with the models. Activations are not among it: they grow with
micro_batch_tokens and are freed after each pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolemesh.coordinator.recipe.model_sizes import models_of, num_parameters, trained_models
from rolemesh.coordinator.recipe.schema import Recipe, role_of
from rolemesh.engine.specs import RolloutSpec, VllmSpec

WEIGHT_BYTES = 4
"""Bytes of a weight where it is trained or scored with: float32."""

TRAINED_BYTES = 16
"""Bytes of a trained weight: itself, its gradient and two moments, in float32."""

SAVED_BYTES = 12
"""Bytes of a trained weight in a checkpoint or a cut: itself and two moments, in float32."""

EXPORTED_BYTES = 2
"""Bytes of a weight in the exported model: bfloat16."""

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
    parameters: dict[str, int] = {}
    for role, models in models_of(recipe).items():
        counts = []
        for model in models:
            count = num_parameters(model.path, model.num_layers)
            if count is None and str(model.path) not in found.unknown:
                found.unknown.append(str(model.path))
            counts.append(count or 0)
        parameters[role] = sum(counts)
    trained = trained_models(recipe)
    for service, address in own_services.items():
        if address is None:
            _add_service(found, recipe, service, parameters, is_trained=service in trained)
    saved = SAVED_BYTES * sum(parameters[role] for role in trained if role in own_services)
    found.checkpoint = saved
    num_best = 0 if recipe.run.checkpoint.keep_best is None else 1
    # One more while it is written.
    most_kept = recipe.run.checkpoint.keep + num_best + 1
    found.checkpoints_kept = min(_num_checkpoints(recipe), most_kept)
    found.cuts = _CUTS * saved if recipe.run.recovery.cuts else 0
    exported = "actor" if "actor" in own_services else "reward"
    found.export = EXPORTED_BYTES * parameters.get(exported, 0)
    return found


def _num_checkpoints(recipe: Recipe) -> int:
    """Checkpoints that a run writes at most, the one after the last step among them."""
    every, steps = recipe.run.checkpoint.every_steps, recipe.run.steps
    due = {steps, *(range(every, steps, every) if every else ())}
    if recipe.run.checkpoint.keep_best is not None:
        # Each evaluation may be the best one.
        due.update(range(0, steps, recipe.run.evaluation.every_steps))
    return len(due - {0})


def _add_service(
    found: Footprint,
    recipe: Recipe,
    service: str,
    parameters: Mapping[str, int],
    *,
    is_trained: bool,
) -> None:
    role = role_of(service)
    section, layout = recipe.section(role), recipe.layout(role)
    sampler: RolloutSpec | None = getattr(section, "rollout", None)
    weights = parameters[role] * (TRAINED_BYTES if is_trained else WEIGHT_BYTES)
    # Ranks that do not cut parameters among them hold whole copies.
    copies = layout.dp // layout.fsdp
    devices = next(pool.devices for pool in recipe.pools.values() if role in pool.roles)
    num_ranks = layout.world_size
    if set(devices) != {"cpu"}:
        found.device_memory[service] = weights * copies // num_ranks
        return
    held = weights * copies + num_ranks * PROCESS_BYTES
    if isinstance(sampler, VllmSpec):
        policy = parameters.get("actor", 0)
        replica_ranks = section.rank_layout().generate.tp * section.rank_layout().generate.pp
        held += (num_ranks // replica_ranks) * WEIGHT_BYTES * policy
        held += num_ranks * (sampler.kv_cache_gib << 30) + num_ranks * PROCESS_BYTES
    found.memory[service] = held
