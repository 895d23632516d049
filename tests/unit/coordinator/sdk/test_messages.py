"""Values of the SDK, and the messages that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rolemesh.coordinator.sdk.values.messages import from_message
from rolemesh.coordinator.sdk.values.runs import (
    Alert,
    Dataflow,
    DataflowNode,
    PlannedPool,
    PlannedTask,
    RegisteredService,
    Run,
    RunPlan,
)
from rolemesh.coordinator.sdk.values.samples import (
    Sample,
    SampledCall,
    SampledImage,
    SampledSession,
    Samples,
)
from rolemesh.v1 import coordinator_pb2


@pytest.mark.parametrize(
    "kind",
    [
        Alert,
        DataflowNode,
        PlannedPool,
        PlannedTask,
        RegisteredService,
        Run,
        RunPlan,
        Sample,
        SampledCall,
        SampledImage,
        SampledSession,
    ],
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


def test_a_sample_is_read_with_its_session_which_is_not_logged_again() -> None:
    call = coordinator_pb2.SampledCall(number=1, use=coordinator_pb2.CALL_USE_SHARED)
    session = coordinator_pb2.SampledSession(num_branches=2, calls=[call], log="so long")
    told = [coordinator_pb2.Sample(row=0, session=session), coordinator_pb2.Sample(row=1)]
    first, second = Samples.of(coordinator_pb2.ListSamplesResponse(step=1, samples=told)).rows
    assert first.session is not None
    assert (first.session.num_branches, first.session.log) == (2, "so long")
    assert [(one.number, one.use) for one in first.session.calls] == [(1, "shared")]
    assert second.session is None
    assert not first.to_message().HasField("session")


def test_a_sample_is_read_with_its_images_which_are_not_logged_again() -> None:
    image = coordinator_pb2.SampledImage(sha256="ab", num_bytes=3, url="data:image/png;base64,AA==")
    told = coordinator_pb2.Sample(row=0, images=[image], has_large_images=True)
    (read,) = Samples.of(coordinator_pb2.ListSamplesResponse(step=1, samples=[told])).rows
    assert read.images == (SampledImage("ab", 3, "data:image/png;base64,AA=="),)
    assert read.has_large_images
    assert read.to_message() == coordinator_pb2.Sample(row=0)
