"""A role's section as its services get it, and as it travels."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.algorithm.rates import planned_updates, with_length
from rolemesh.coordinator.recipe.algorithm.teachers import with_policy_folder
from rolemesh.engine.specs import ActorSpec, OneTeacherSpec, RoleSpec, RolloutRoleSpec

_YOUNGER = ("numerics", "teacher", "of", "average", "prompt", "server", "named", "route")
"""Fields of a role's section that services of other makes may not know."""


def sent_section(recipe: Any, role: str) -> RoleSpec:
    """The role's section as its services get it.

    Its schedule says how long it is, and the actor is told how it is its own teacher, if it is,
    and which of the user's functions it loads: those that the section algorithm names, and no
    others later.

    Args:
        recipe: A Recipe.
        role: One that has a section.

    Raises:
        ValueError: There is no section, or the length is not known.
    """
    section: RoleSpec = recipe.section(role)
    run = recipe.run
    if section.numerics is None and run.numerics != section.chosen_numerics:
        section = section.model_copy(update={"numerics": run.numerics})
    if isinstance(section, ActorSpec):
        section = section.model_copy(
            update={"own_functions": recipe.own_functions(), "teacher": recipe.self_teacher}
        )
    if isinstance(section, RolloutRoleSpec) and recipe.actor is not None:
        model = section.model.model_copy(update={"adapter": recipe.actor.model.adapter})
        section = section.model_copy(update={"model": model})
    if isinstance(section, OneTeacherSpec):
        section = with_policy_folder(recipe, role, section)
    updates = planned_updates(recipe.algorithm, run.prompts_per_step)
    return with_length(role, section, updates, run.steps)


def to_sent(section: RoleSpec) -> dict[str, Any]:
    """The section as it travels.

    Services of other makes may refuse fields that they do not know, so one that is younger than
    they are is left out where it says nothing.
    """
    spec = section.model_dump(mode="json")
    for name in _YOUNGER:
        if name in spec and spec[name] is None:
            del spec[name]
    _leave_out_no_adapter(spec)
    return spec


def _leave_out_no_adapter(spec: dict[str, Any]) -> None:
    """Takes the field adapter from each model of a section that has none, in place."""
    for name, value in spec.items():
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, dict):
                continue
            if name == "model" and "adapter" in part and part["adapter"] is None:
                del part["adapter"]
            _leave_out_no_adapter(part)
