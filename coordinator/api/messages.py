"""Records of the store as they travel: messages of coordinator.proto."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.dataflow.trace import critical_path
from rolemesh.coordinator.state.store import RunRecord, RunState, ServiceLease
from rolemesh.v1 import coordinator_pb2

_STATES = {state: coordinator_pb2.RunState.Value(f"RUN_STATE_{state.name}") for state in RunState}

FINAL_STATES = frozenset(number for state, number in _STATES.items() if state.is_final)
"""States that no other state follows."""


def to_timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    """A Unix time in seconds as a message."""
    nanos = round(seconds * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


def to_seconds(timestamp: timestamp_pb2.Timestamp) -> float:
    """The Unix time in seconds."""
    return timestamp.seconds + timestamp.nanos * 1e-9


def to_state(state: RunState) -> coordinator_pb2.RunState.ValueType:
    """A state as the protos number it."""
    return _STATES[state]


def _shown_state(record: RunRecord) -> coordinator_pb2.RunState.ValueType:
    """The state with a wish that is not fulfilled yet; one to stop goes before one to pause."""
    if record.stop_requested and not record.state.is_final:
        return coordinator_pb2.RUN_STATE_STOPPING
    goes_on = record.state in (RunState.STARTING, RunState.RUNNING, RunState.RECOVERING)
    if record.pause_requested and goes_on:
        return coordinator_pb2.RUN_STATE_PAUSING
    return _STATES[record.state]


def to_run(record: RunRecord) -> coordinator_pb2.Run:
    """A run's record as a message."""
    return coordinator_pb2.Run(
        run_id=record.run_id,
        name=record.name,
        state=_shown_state(record),
        step=record.step,
        num_steps=record.num_steps,
        created_at=to_timestamp(record.created_at),
        updated_at=to_timestamp(record.updated_at),
        directory=record.directory,
        failure=record.failure,
        metrics=record.metrics,
        algorithm=record.algorithm,
        activity=record.activity,
        recoveries=record.recoveries,
        endpoints=_endpoints(record),
    )


def _endpoints(record: RunRecord) -> dict[str, str]:
    """Where programs ask its policy, by service."""
    # Before its services are there again, the record has those of the attempt before.
    if record.state.is_final or record.state in (RunState.STARTING, RunState.RECOVERING):
        return {}
    services = record.services.items()
    return {name: facts["endpoint"] for name, facts in services if facts.get("endpoint")}


def to_registered_service(lease: ServiceLease) -> coordinator_pb2.RegisteredService:
    """A lease as a message."""
    facts = {**dataclasses.asdict(lease), "lease_until": to_timestamp(lease.lease_until)}
    return coordinator_pb2.RegisteredService(**facts)


_NODE_STATES = {
    NodeState.RUNNING: "running",
    NodeState.DONE: "done",
    NodeState.FAILED: "failed",
    NodeState.CANCELLED: "failed",
}


def to_dataflow(
    step: int, nodes: Sequence[Node], *, is_made: bool
) -> coordinator_pb2.GetDataflowResponse:
    """A graph as a message: times count from the moment when its first call was requested."""
    began = min((node.queued_at for node in nodes), default=0.0)
    critical = {part.node.node_id for part in critical_path(nodes)}
    names = {node.node_id: _shown_name(node) for node in nodes}
    return coordinator_pb2.GetDataflowResponse(
        step=step,
        is_made=is_made,
        nodes=[
            coordinator_pb2.DataflowNode(
                name=names[node.node_id],
                service=node.service,
                kind=node.kind.value.lower(),
                pool=node.pool,
                state=_NODE_STATES.get(
                    node.state, "waiting" if node.ready_at is None else "queued"
                ),
                ready_s=_since(began, node.ready_at),
                started_s=_since(began, node.started_at),
                ended_s=_since(began, node.ended_at),
                is_critical=node.node_id in critical,
                num_tokens=node.num_tokens,
                num_bytes=node.num_bytes,
                phases=node.phases,
                after=[names[known] for known in node.inputs],
                policy_version=node.policy_version,
                pulled_bytes=node.pulled_bytes,
            )
            for node in nodes
        ],
    )


def _shown_name(node: Node) -> str:
    """A name that is unique in the graph: with the block's number, or with a count of the calls."""
    if node.block is not None:
        return f"{node.name}[{node.block}]"
    return node.name if node.sequence == 0 else f"{node.name}#{node.sequence + 1}"


def _since(began: float, at: float | None) -> float | None:
    return None if at is None else at - began
