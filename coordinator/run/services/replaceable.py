"""Which services of a run can be replaced while the others go on."""

from __future__ import annotations

from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.recipe.schedule import SyncSamplerSpec
from rolemesh.coordinator.recipe.schema import Recipe, role_of

READ_ROLES = ("reference", "reward", "cost")
"""Roles that keep nothing from call to call, unless they are trained. So do rollout services that
sample the step which is made: what they have beside their models, the actor gives again."""


def replaceable_services(recipe: Recipe, mesh: RunMesh) -> frozenset[str]:
    """Services of a mesh that holds the run, which are only read from."""
    trained = {known.service for known in mesh.trained}
    # What is sampled ahead belongs to several steps, each with a graph of its own.
    is_sync = isinstance(recipe.schedule.sampler, SyncSamplerSpec)
    roles = (*READ_ROLES, "rollout") if is_sync else READ_ROLES
    return frozenset(
        service
        for service in mesh.connections
        if role_of(service) in roles and service not in trained
    )
