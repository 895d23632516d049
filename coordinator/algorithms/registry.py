"""Which function makes a step, and which roles it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from rolemesh.coordinator.algorithms.ppo import ppo
from rolemesh.coordinator.errors import RunError
from rolemesh.coordinator.roles import ROLE_HANDLES, PromptBatch, StepContext

Algorithm = Callable[..., None]

ALGORITHMS: Mapping[str, Algorithm] = {"ppo": ppo}
"""By `algorithm.type` of the recipe."""


def roles_of(algorithm: Algorithm) -> tuple[str, ...]:
    """Roles that the algorithm asks for: the names of its parameters after `prompts`.

    Raises:
        ValueError: A parameter is no role.
    """
    first, *roles = inspect.signature(algorithm).parameters
    if first != "prompts":
        raise ValueError(f"{algorithm.__name__}: the first parameter is {first!r}, not 'prompts'")
    for role in roles:
        if role not in ROLE_HANDLES:
            raise ValueError(
                f"{algorithm.__name__}: {role!r} is no role; roles are {', '.join(ROLE_HANDLES)}"
            )
    return tuple(roles)


def start_step(algorithm: Algorithm, prompts: PromptBatch, context: StepContext) -> None:
    """Calls the algorithm once: afterwards every node of the step exists.

    Raises:
        RunError: It asks for something that the mesh or the recipe does not have.
    """
    handles = {role: ROLE_HANDLES[role](context) for role in roles_of(algorithm)}
    try:
        algorithm(prompts, **handles)
    except ValueError as error:
        raise RunError(f"algorithm {algorithm.__name__!r} cannot be run: {error}") from error
