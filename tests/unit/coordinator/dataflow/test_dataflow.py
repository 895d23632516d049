from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterable

import pytest

from rolemesh.coordinator.dataflow.errors import NodeFailedError, ServiceLostError
from rolemesh.coordinator.dataflow.futures import (
    ExperienceFuture,
    Node,
    NodeKind,
    NodeState,
    Outcome,
)
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.dataflow.trace import chrome_trace
from rolemesh.coordinator.recipe.roles.placement import PoolSpec
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import experience_pb2


async def settle() -> None:
    """Turns the loop often enough for everything that can start to start; waits for no clock."""
    for _ in range(50):
        await asyncio.sleep(0)


def reference(
    columns: Iterable[str], num_rows: int = 2, holder: str = "x"
) -> experience_pb2.ExperienceRef:
    return experience_pb2.ExperienceRef(
        run_id="run",
        step=1,
        num_rows=num_rows,
        groups=[
            experience_pb2.ColumnGroup(
                columns=[experience_pb2.ColumnSchema(name=name) for name in columns],
                shards=[experience_pb2.Shard(experience_id=holder, num_rows=num_rows)],
            )
        ],
    )


def columns_of(joined: experience_pb2.ExperienceRef) -> list[tuple[str, str]]:
    return [
        (column.name, group.shards[0].experience_id)
        for group in joined.groups
        for column in group.columns
    ]


class Script:
    """Makes nodes that wait for a gate of their own and note when they start."""

    def __init__(self, *, is_split: bool = True) -> None:
        roles = ("actor", "critic", "reference", "reward")
        specs = {role: PoolSpec(roles=(role,)) for role in roles}
        self.dataflow = StepGraph(1, Pools(specs if is_split else {"all": PoolSpec(roles=roles)}))
        self.started: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.read: dict[str, list[tuple[str, str]]] = {}

    def node(
        self, role: str, method: str, columns: Iterable[str], reads: ExperienceFuture | None = None
    ) -> ExperienceFuture:
        columns = tuple(columns)

        async def work(node: Node, given: experience_pb2.ExperienceRef | None) -> Outcome:
            self.started.append(node.name)
            self.read[node.name] = [] if given is None else columns_of(given)
            await self.gates.setdefault(node.name, asyncio.Event()).wait()
            if node.name in self.errors:
                raise self.errors[node.name]
            report = experience_pb2.CallReport(num_tokens=5, fetched_bytes={"grpc": 3, "shm": 4})
            return Outcome(report=report, experience=reference(columns, holder=node.name))

        part = self.dataflow.call(
            kind=NodeKind.INFER, service=role, method=method, sequence=0, work=work, reads=reads,
            produces=columns,
        )  # fmt: skip
        return ExperienceFuture(self.dataflow, (part,))

    async def open(self, *names: str) -> None:
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()
        await settle()


async def test_a_call_waits_only_for_the_columns_that_it_reads() -> None:
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    rollouts |= script.node("critic", "compute_values", ["values"], rollouts.select(["tokens"]))
    rollouts |= script.node("reference", "logprobs", ["ref"], rollouts.select(["tokens"]))
    last = rollouts.select(["values", "ref"], uses=["tokens", "absent"])
    rollouts |= script.node("actor", "advantages", ["advantages"], last)
    await settle()
    assert script.started == ["actor.generate"]
    await script.open("actor.generate")
    assert script.started == ["actor.generate", "critic.compute_values", "reference.logprobs"]
    await script.open("reference.logprobs")
    assert "actor.advantages" not in script.started
    await script.open("critic.compute_values", "actor.advantages")
    await script.dataflow.finish()
    assert script.read["actor.advantages"] == [
        ("tokens", "actor.generate"),
        ("values", "critic.compute_values"),
        ("ref", "reference.logprobs"),
    ]
    assert [node.inputs for node in script.dataflow.nodes] == [(), (0,), (0,), (0, 1, 2)]
    assert rollouts.columns == {"tokens", "values", "ref", "advantages"}


async def test_roles_of_one_pool_take_turns_in_call_order() -> None:
    script = Script(is_split=False)
    rollouts = script.node("actor", "generate", ["tokens"])
    for role in ("critic", "reference", "reward"):
        script.node(role, "judge", [role], rollouts)
    await script.open("actor.generate")
    assert script.started == ["actor.generate", "critic.judge"]
    await script.open("reference.judge", "reward.judge")
    assert script.started[2:] == []
    await script.open("critic.judge")
    assert script.started[2:] == ["reference.judge", "reward.judge"]
    await script.dataflow.finish()


async def test_a_column_that_no_node_produces_is_named() -> None:
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    with pytest.raises(ValueError, match=r"no node produces the column 'rewards'.* tokens"):
        rollouts.select(["rewards"])
    await script.open("actor.generate")
    await script.dataflow.finish()


async def test_futures_of_two_steps_cannot_be_joined() -> None:
    one, two = Script(), Script()
    two.dataflow.step = 2
    first = one.node("actor", "generate", ["tokens"])
    second = two.node("actor", "generate", ["tokens"])
    with pytest.raises(ValueError, match="two different steps"):
        first | second
    for script in (one, two):
        await script.open("actor.generate")
        await script.dataflow.finish()


async def test_a_failure_cancels_dependents_and_neighbours_and_is_told_once() -> None:
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    values = script.node("critic", "compute_values", ["values"], rollouts)
    script.node("reference", "logprobs", ["ref"], rollouts)
    script.node("actor", "advantages", ["advantages"], rollouts | values)
    await script.open("actor.generate")
    script.errors["critic.compute_values"] = PreconditionError(
        "no model yet", reason="NOT_INITIALIZED", metadata={"role": "critic", "rank": "3"}
    )
    await script.open("critic.compute_values")
    with pytest.raises(NodeFailedError) as failed:
        await script.dataflow.finish()
    assert str(failed.value) == (
        "step 1: critic.compute_values failed on critic rank 3 [NOT_INITIALIZED]: no model yet"
    )
    assert (failed.value.role, failed.value.rank) == ("critic", 3)
    assert [node.state for node in script.dataflow.nodes] == [
        NodeState.DONE,
        NodeState.FAILED,
        NodeState.CANCELLED,
        NodeState.CANCELLED,
    ]
    assert "actor.advantages" not in script.started


async def test_a_failing_consumer_names_the_producer_that_ended() -> None:
    script = Script()
    script.node("critic", "compute_values", ["values"])
    script.errors["critic.compute_values"] = PreconditionError(
        "the actor does not answer", reason="PEER_UNREACHABLE", metadata={"role": "actor"}
    )
    await script.open("critic.compute_values")
    with pytest.raises(NodeFailedError, match=r"critic\.compute_values failed on actor"):
        await script.dataflow.finish()


async def test_abort_cancels_everything_with_the_given_error() -> None:
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    script.node("critic", "compute_values", ["values"], rollouts)
    await settle()
    assert [node.name for node in script.dataflow.running("actor")] == ["actor.generate"]
    assert script.dataflow.running("critic") == []
    script.dataflow.abort(ServiceLostError("actor", "was killed by signal 9"))
    with pytest.raises(ServiceLostError, match="signal 9"):
        await script.dataflow.finish()
    assert {node.state for node in script.dataflow.nodes} == {NodeState.CANCELLED}
    with pytest.raises(ServiceLostError):
        script.node("reward", "judge", ["rewards"])


async def test_what_is_raised_while_nodes_are_made_cancels_them() -> None:
    script = Script()

    async def step() -> None:
        async with script.dataflow:
            script.node("actor", "generate", ["tokens"])
            raise ValueError("no such estimator")

    with pytest.raises(ValueError, match="no such estimator"):
        await step()
    assert script.started == []


async def test_cancelling_the_step_cancels_its_nodes() -> None:
    script = Script()
    script.node("actor", "generate", ["tokens"])
    finishing = asyncio.create_task(script.dataflow.finish())
    await settle()
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert script.dataflow.nodes[0].state is NodeState.CANCELLED


async def test_a_step_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    # A look of the collector at what a thousand calls have made holds up all that is ready.
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    rollouts |= script.node("critic", "compute_values", ["values"], rollouts)
    await script.open("actor.generate", "critic.compute_values")
    await script.dataflow.finish()
    graph = weakref.ref(script.dataflow)
    gc.disable()
    try:
        del script, rollouts
        assert graph() is None
    finally:
        gc.enable()


async def test_the_graph_is_recorded_and_exported_as_a_trace() -> None:
    script = Script()
    rollouts = script.node("actor", "generate", ["tokens"])
    script.node("critic", "compute_values", ["values"], rollouts)
    await script.open("actor.generate", "critic.compute_values")
    await script.dataflow.finish()
    first, second = script.dataflow.nodes
    assert first.queued_at <= first.started_at <= first.ended_at <= second.started_at  # type: ignore[operator]
    assert (first.num_tokens, first.num_bytes) == (5, 7)
    assert first.pulled_bytes == {"grpc": 3, "shm": 4}
    plain = second.to_dict()
    assert (plain["kind"], plain["state"], plain["inputs"]) == ("INFER", "done", (0,))
    events = chrome_trace(script.dataflow.nodes)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["actor.generate", "critic.compute_values"]
    assert spans[0]["pid"] != spans[1]["pid"]
    assert spans[1]["ts"] >= spans[0]["ts"] + spans[0]["dur"] - 1  # rounded to microseconds
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"actor", "critic"}
