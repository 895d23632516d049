"""Flags of a service that follow from a recipe: layout, sizes, and what it lets a run name."""

from __future__ import annotations

from pathlib import Path

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import named_in

_GRANTED_BY = {
    "code": "--code-name",
    "command": "--code-name",
    "path": "--folder",
    "variable": "--variable",
}
"""Flags of a service, by what they let a run name."""
_NETWORK_FLAG = "--function-network"


def service_flags(recipe: Recipe, role: str) -> list[str]:
    """Flags of `rolemesh serve ROLE` for a run of the recipe, but for the run's own folder.

    All sizes of the layout are given, also for one rank: neither defaults nor a variable that is
    set for another service may change them.

    Example: ["--layout", "pp=1,tp=2,...", "--experience-capacity-bytes", "1073741824",
    "--folder=.models/tiny"].
    """
    spec = recipe.service(role)
    flags = ["--layout", recipe.layout(role).flag()]
    flags += ["--experience-capacity-bytes", str(spec.experience_capacity_mib * 2**20)]
    if spec.threads is not None:
        flags += ["--threads", str(spec.threads)]
    grants: dict[str, None] = {}
    for named in named_in(recipe.sent_section(role)):
        if named.kind == "command" and not Path(named.value).is_file():
            continue
        if named.kind in _GRANTED_BY:
            # In one word: what a recipe names may look like a flag.
            grants[f"{_GRANTED_BY[named.kind]}={named.value}"] = None
        elif named.kind == "network":
            grants[_NETWORK_FLAG] = None
    return [*flags, *grants]


def named_variables(recipe: Recipe, role: str) -> tuple[str, ...]:
    """Environment variables that the recipe names for a role: its own, and those of its rewards."""
    named = (one.value for one in named_in(recipe.sent_section(role)) if one.kind == "variable")
    return (*recipe.service(role).variables, *named)
