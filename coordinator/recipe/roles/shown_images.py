"""Images of the data, held against parts of a recipe that would see the text alone."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.role_names import field_of
from rolemesh.engine.specs import AgentSpec, images_of_data


def check_images(recipe: Any) -> None:
    """Refuses images where a part of the run would see prompts without them.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: Names the field of that part.
    """
    sampler = recipe.rollout or recipe.actor
    if sampler is None or not images_of_data(sampler.data):
        return
    environment = getattr(sampler, "environment", None)
    if environment is not None and not isinstance(environment, AgentSpec):
        raise ValueError(
            "the data has images, but the policy talks to an environment, whose turns show none: "
            "leave environment or data.images out"
        )
    for role, teacher in recipe.teachers.items():
        for name in ("prompt", "server"):
            if getattr(teacher, name) is not None:
                raise ValueError(
                    f"the data has images, but {field_of(role)}.{name} is given, which sees the "
                    "text of prompts alone: leave it or data.images out"
                )
