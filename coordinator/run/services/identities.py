"""Identities of a run's members: of its coordinator, of the services it starts, of its client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.members.identity import Identity, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentities:
    """Who is who in a run. Without a coordinator's identity the run's services speak in clear."""

    coordinator: Identity | None = None
    services: dict[str, Identity] = field(default_factory=dict)
    """By name, of the services that the coordinator starts."""
    client: Identity | None = None
    """Of a client that drives the run."""


def identities_of(recipe: Recipe, own: Iterable[str], outside: Iterable[str]) -> RunIdentities:
    """The identities of a run.

    A run whose services are all started by its coordinator gets an authority of its own, whose key
    never leaves this process: no other program of this host can then call them. Services that run
    by themselves have certificates of an authority that their owner keeps, which the recipe names.

    Args:
        recipe: The run's.
        own: Services that the coordinator starts.
        outside: Services that run by themselves.

    Raises:
        ValueError: A certificate that is needed is not in the recipe's folder.
    """
    own = tuple(own)
    if recipe.certificates is not None:
        folder = recipe.certificates
        client = folder / f"client-{Scope.DRIVE.value}.pem"
        return RunIdentities(
            coordinator=Identity.read(folder / "coordinator.pem"),
            services={name: Identity.read(folder / f"{kind_of(name)}.pem") for name in own},
            client=Identity.read(client) if client.exists() else None,
        )
    if not own or tuple(outside):
        return RunIdentities()
    # Takes 60 ms to import, which commands that start no services need not wait for.
    from rolemesh.rpc.members.authority import Authority

    authority = Authority.make()
    return RunIdentities(
        coordinator=authority.issue("coordinator"),
        services={name: authority.issue(kind_of(name)) for name in own},
        client=authority.issue(f"client/{Scope.DRIVE.value}"),
    )
