"""Roles that have a section and no service, since the actor answers for them.

A reference without a model is the actor's base, which scores with the adapter off; a teacher may be
the policy itself. An address in `services` is not used then, like that of any role without a
section: a mesh of containers has a service for each.
"""

from __future__ import annotations

from typing import Any


def served_by_actor(recipe: Any) -> frozenset[str]:
    """These roles of a recipe."""
    is_base = recipe.reference is not None and recipe.reference.model is None
    is_own = recipe.teacher is not None and recipe.teacher.of is not None
    known = {"reference": is_base, "teacher": is_own}
    return frozenset(role for role, is_served in known.items() if is_served)


def check_served_by_actor(recipe: Any) -> None:
    """Raises ValueError where the actor cannot answer for them; names field and remedy."""
    served, actor = served_by_actor(recipe), recipe.actor
    if "reference" in served and (actor is None or actor.model.adapter is None):
        raise ValueError(
            "reference.model is missing: give {path: FOLDER}, or give actor.model.adapter, whose "
            "base is the reference then"
        )
    if "teacher" in served and actor is None:
        raise ValueError(
            "teacher.of is 'actor', but the recipe has no section actor: add one, or give "
            "teacher.model"
        )
    if actor is not None and actor.teacher is not None:
        raise ValueError(
            "actor.teacher is given, which a run says by itself: write it as the section teacher, "
            "with of: actor"
        )
