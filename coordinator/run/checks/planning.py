"""Plan of a step: the graph that a recipe's algorithm makes, built without any service.

What the algorithm and the recipe do not have for each other shows here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.coordinator.algorithms.registry import algorithm_of, roles_in, start_step
from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.calls.role_calls import PromptCursor, StepContext
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.dataflow.samplers import make_sampler
from rolemesh.coordinator.recipe.algorithm.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.channel import ChannelTraffic

_NOWHERE = "127.0.0.1:1"
"""Address of every service of a plan. No call is made, so nothing connects to it."""


class _PlannedError(Exception):
    """Ends the graph of a plan before its first node starts."""


async def plan_step(recipe: Recipe) -> Sequence[Node]:
    """Builds the graph of a step as a run would, and makes none of its calls.

    Nodes that depend on what comes out of others (dynamic sampling) are not among them.

    Returns:
        The nodes in the order in which they were made; none where a client makes the steps.

    Raises:
        ValueError: The algorithm asks for something that the recipe does not have.
    """
    section = recipe.algorithm
    if isinstance(section, ExternalSpec):
        return []
    algorithm = algorithm_of(recipe)
    services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
    replicas = {role: recipe.services_of(role) for role in recipe.roles}
    traffic = ChannelTraffic()
    connections = {name: RoleConnection(name, _NOWHERE, traffic) for name in services}
    dataflow = StepGraph(1, Pools(recipe.pools, replicas=replicas))
    context = StepContext(
        step=1,
        algorithm=section,
        dataflow=dataflow,
        sampler=make_sampler(recipe),
        journal=Journal(MemoryStateStore(), "plan", 1),
        connections=connections,
        on_phase=lambda service, stage, done, total: None,
        may_drop=recipe.may_drop,
        reward_columns=recipe.reward_columns,
        served_by_actor=recipe.served_by_actor,
        teacher=recipe.teacher,
    )
    try:
        async with dataflow:
            start_step(algorithm, PromptCursor().take(recipe.run.prompts_per_step), context)
            # Nothing has had a turn of the loop yet, so that no node has started.
            raise _PlannedError
    except _PlannedError:
        return dataflow.nodes
    except RunError as error:
        raise ValueError(str(error)) from error
    finally:
        for connection in connections.values():
            await connection.close()
