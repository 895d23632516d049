"""Roles that have a section and no service, since the actor answers for them.

A reference without a model is the actor's base, which scores with the adapter off; a teacher may be
the policy itself. An address in `services` is not used then, like that of any role without a
section: a mesh of containers has a service for each.
"""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.role_names import field_of


def served_by_actor(recipe: Any) -> frozenset[str]:
    """These roles of a recipe."""
    is_base = recipe.reference is not None and recipe.reference.model is None
    own = (role for role, teacher in recipe.teachers.items() if teacher.of is not None)
    return frozenset([*(["reference"] if is_base else []), *own])


def check_served_by_actor(recipe: Any) -> None:
    """Raises ValueError where the actor cannot answer for them; names field and remedy."""
    served, actor = served_by_actor(recipe), recipe.actor
    if "reference" in served and (actor is None or actor.model.adapter is None):
        raise ValueError(
            "reference.model is missing: give {path: FOLDER}, or give actor.model.adapter, whose "
            "base is the reference then"
        )
    own = sorted(served - {"reference"})
    if own and actor is None:
        field = field_of(own[0])
        raise ValueError(
            f"{field}.of is 'actor', but the recipe has no section actor: add one, or give "
            f"{field}.model"
        )
    if actor is not None and actor.teacher is not None:
        raise ValueError(
            "actor.teacher is given, which a run says by itself: write it as the section teacher, "
            "with of: actor"
        )
