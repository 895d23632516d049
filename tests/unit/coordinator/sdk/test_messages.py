"""Values of the SDK, and the messages that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rolemesh.coordinator.sdk.messages import from_message
from rolemesh.coordinator.sdk.runs import (
    Alert,
    Dataflow,
    DataflowNode,
    PlannedPool,
    PlannedTask,
    RegisteredService,
    Run,
    RunPlan,
    Sample,
)
from rolemesh.v1 import coordinator_pb2


@pytest.mark.parametrize(
    "kind",
    [Alert, DataflowNode, PlannedPool, PlannedTask, RegisteredService, Run, RunPlan, Sample],
)
def test_a_value_has_every_field_of_its_message(kind: Any) -> None:
    message = coordinator_pb2.DESCRIPTOR.message_types_by_name[kind.__name__]
    assert {field.name for field in dataclasses.fields(kind)} == set(message.fields_by_name)


def test_a_step_is_read_with_its_calls() -> None:
    node = coordinator_pb2.DataflowNode(
        name="critic.update",
        phases={"pass": 1.5},
        after=["values"],
        num_bytes=7,
        pulled_bytes={"shm": 3, "grpc": 4},
        policy_version=0,
    )
    told = coordinator_pb2.GetDataflowResponse(step=3, is_made=True, nodes=[node])
    read = from_message(Dataflow, told)
    assert (read.step, read.is_made) == (3, True)
    (call,) = read.nodes
    assert (call.phases, call.after) == ({"pass": 1.5}, ("values",))
    assert sum(call.pulled_bytes.values()) == call.num_bytes == 7
    assert (call.policy_version, call.started_s) == (0, None)
