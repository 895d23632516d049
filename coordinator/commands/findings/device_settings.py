"""Settings that the devices of a recipe decide, as `rolemesh doctor RECIPE` shows them.

The same functions choose when a service makes its model or sampler, and its log says it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from rolemesh.coordinator.algorithms.registry import roles_in
from rolemesh.coordinator.commands.findings.findings import Finding, ok
from rolemesh.coordinator.recipe.model_sizes import models_of, trained_models
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import (
    ActorSpec,
    ModelSpec,
    Numerics,
    RolloutRoleSpec,
    VllmServerSpec,
    VllmSpec,
)
from rolemesh.engine.specs.by_device import (
    Device,
    ModelSizes,
    described,
    model_choices,
    sampler_choices,
)
from rolemesh.engine.specs.urls import masked_url


def device_settings(recipe: Recipe, cpu: Device) -> Iterator[Finding]:
    """A finding for each role whose settings depend on its device.

    Args:
        recipe: The recipe.
        cpu: What roles compute on that have no GPU.

    Raises:
        ValueError: A setting cannot be on the role's device.
    """
    trained = trained_models(recipe)
    for role in roles_in(recipe):
        section = recipe.section(role)
        devices = next(pool.devices for pool in recipe.pools.values() if role in pool.roles)
        on_gpu = any(name.startswith("cuda") for name in devices)
        device = Device("cuda") if on_gpu else cpu
        # A reward computes exactly: scores are compared by small differences.
        numerics: Numerics = section.numerics or recipe.run.numerics
        if role in ("reward", "cost"):
            numerics = "exact"
        lines: list[str] = []
        for model in models_of(recipe)[role]:
            sizes = _sizes(recipe, role, model)
            if sizes is not None:
                choices = model_choices(
                    model, device, sizes, numerics=numerics, trains=role in trained
                )
                lines += [f"model.{line}" for line in described(choices)]
        sampler = section.rollout if isinstance(section, ActorSpec | RolloutRoleSpec) else None
        adapter = None if recipe.actor is None else recipe.actor.model.adapter
        if isinstance(sampler, VllmSpec):
            choices = sampler_choices(
                sampler,
                device,
                numerics=numerics,
                updates_between_steps=isinstance(section, RolloutRoleSpec),
                num_slices=section.rank_layout().generate.tp,
                has_adapter=adapter is not None,
                adapts_experts=adapter is not None and adapter.adapts_experts,
            )
            lines += [f"rollout.{line}" for line in described(choices)]
        elif isinstance(sampler, VllmServerSpec):
            urls = ", ".join(map(masked_url, sampler.urls))
            lines.append(f"rollout: samples at {urls}, and takes no memory here for it")
        if lines:
            yield ok(role, "; ".join(lines))


def _sizes(recipe: Recipe, role: str, model: ModelSpec) -> ModelSizes | None:
    """Sizes of a model from its folder; None where that does not say them."""
    try:
        config = json.loads((model.path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    layout = recipe.layout(role)
    return ModelSizes.of_config(
        config.get("text_config", config),
        num_layers=model.num_layers or 0,
        num_stages=layout.pp,
        num_slices=layout.tp,
        num_cuts=layout.cp,
    )
