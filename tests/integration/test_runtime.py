"""The service runtime on a real loopback server, in the test's own process."""

from __future__ import annotations

import asyncio
import gc
import socket
import urllib.request
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.service_calls import initialize, last, values
from support.services import ToyRole, make_experience, operation_key, serving

from rolemesh.coordinator.dataflow.errors import NodeFailedError
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.rpc.channel import REQUEST_ID_KEY, open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    from_rpc_error,
)
from rolemesh.services.runtime.service_server import ServiceStartError
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)


async def test_a_call_without_a_deadline_is_refused() -> None:
    async with serving() as server, grpc.aio.insecure_channel(server.runtime.address) as bare:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(bare).GetStatus(worker_pb2.GetStatusRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "10 s" in str(caught.value.details())
    assert from_rpc_error(caught.value).reason == "DEADLINE_MISSING"


async def test_our_channel_gives_the_deadline_of_the_policy() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(
            worker_pb2.GetStatusRequest()
        )
    assert status.state == worker_pb2.WORKER_STATE_IDLE
    assert status.resident_bytes > 0


async def test_error_details_arrive_intact() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.SleepRequest(key=operation_key("sleep"))
        with pytest.raises(PreconditionError) as caught:
            await worker.Sleep(request, metadata=((REQUEST_ID_KEY, "abc123"),))
    error = caught.value
    assert error.reason == "NOT_INITIALIZED"
    assert error.message == "the toy holds no run yet: call Initialize first"
    assert (error.role, error.rank, error.request_id) == ("toy", 0, "abc123")
    assert error.metadata["method"] == "/rolemesh.v1.WorkerService/Sleep"
    assert error.metadata["address"] == server.runtime.address
    assert error.retryable is False


async def test_an_unknown_exception_shows_its_root_cause_and_is_logged_with_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="raise")
        with pytest.raises(InternalError) as caught:
            await last(values(channel))
    error = caught.value
    assert "toy rank 0 failed: RuntimeError: the model is broken" in error.message
    # The frames of the service, down to where it broke; a NodeFailedError shows them as a note.
    assert any(" in " in frame and ".py:" in frame for frame in error.remote_traceback)
    noted = NodeFailedError("toy.work", 3, "toy", error)
    assert noted.remote_traceback[-1] in noted.__notes__[0]
    assert "caused by ZeroDivisionError: division by zero" in error.message
    assert (error.role, error.rank) == ("toy", 0)
    assert error.metadata["exception"] == "builtins.RuntimeError"
    assert "Traceback" in caplog.text
    assert "1 / 0" in caplog.text


async def test_a_repeat_of_a_keyed_call_returns_the_first_answer_and_runs_once() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        first = await last(values(channel))
        again = await last(values(channel))
        other = await last(values(channel, sequence=1))
    assert first == again
    assert first.experience != other.experience
    assert role.num_runs == 2


async def test_concurrent_repeats_join_the_work_that_runs() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=0.3)
        answers = await asyncio.gather(*(last(values(channel)) for _ in range(5)))
    assert role.num_runs == 1
    assert all(answer == answers[0] for answer in answers)


async def test_work_outlives_the_call_that_started_it() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=0.4)
        reader = asyncio.create_task(last(values(channel)))
        await asyncio.sleep(0.2)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        answer = await last(values(channel))
    assert answer.experience.num_rows == 4
    assert role.num_runs == 1


async def test_a_failure_is_no_answer_so_a_repeat_runs_again() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="raise")
        for _ in range(2):
            with pytest.raises(InternalError):
                await last(values(channel))
    assert role.num_runs == 2


async def test_a_key_used_for_another_request_is_refused() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        answer = await last(values(channel))
        request = value_pb2.ComputeValuesRequest(key=operation_key(), experience=answer.experience)
        with pytest.raises(InvalidRequestError, match="another request") as caught:
            await last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request))
    assert caught.value.reason == "KEY_REUSED"


async def test_a_stale_epoch_is_refused() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, epoch=2)
        with pytest.raises(PreconditionError, match="epoch 2 has spoken") as caught:
            await last(values(channel, epoch=1))
        await last(values(channel, epoch=2))
    assert caught.value.reason == "STALE_EPOCH"


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ({"run_id": ""}, "run_id"),
        ({"run_id": "x" * 129}, "run_id"),
        ({"epoch": 0}, "fencing_epoch"),
        ({"step": -1}, "step"),
        ({"operation": ""}, "operation"),
        ({"sequence": -1}, "sequence"),
    ],
)
async def test_a_malformed_key_is_refused(key: dict[str, Any], field: str) -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(InvalidRequestError, match=f"key.{field}") as caught:
            await last(values(channel, **key))
    assert caught.value.reason == "KEY_INVALID"


async def test_the_spec_is_validated_and_the_wrong_field_is_named() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(InvalidRequestError, match="num_rowz is 4") as caught:
            await initialize(channel, num_rowz=4)
        assert caught.value.reason == "SPEC_INVALID"
        # Struct numbers are doubles: a whole one is good enough for an int field.
        result = await initialize(channel, num_rows=9)
        answer = await last(values(channel))
    assert (result.policy_version, result.num_parameters) == (7, 3)
    assert result.facts == {"seed": "3"}
    assert answer.experience.num_rows == 9


async def test_status_answers_while_the_service_computes() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel, behaviour="slow", seconds=1.5)
        messages = []

        async def read() -> None:
            async for message in values(channel, step=4):
                messages.append(message)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.5)
        status = await worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=1.0)
        await reader
    assert status.state == worker_pb2.WORKER_STATE_BUSY
    assert status.operation == "step 4 toy.work"
    assert status.progress.stage == "slow"
    assert 0 < status.progress.done < status.progress.total
    # The work takes 1.5 s and a sign of life comes each second.
    assert [message.WhichOneof("event") for message in messages] == ["progress", "result"]
    assert messages[0].progress.stage == "slow"


async def test_a_report_says_where_time_and_bytes_went() -> None:
    async with (
        serving() as producer,
        serving() as consumer,
        open_channel(producer.runtime.address) as first,
        open_channel(consumer.runtime.address) as second,
    ):
        await initialize(first, num_rows=3)
        await initialize(second)
        produced = (await last(values(first))).experience
        request = value_pb2.ComputeValuesRequest(key=operation_key(), experience=produced)
        result = await last(value_pb2_grpc.ValueServiceStub(second).ComputeValues(request))
    phases = {phase.phase for phase in result.report.phases}
    assert {"fetch", "compute", "queue"} == phases
    tokens = make_experience(3, seed=5)["tokens"]
    assert dict(result.report.fetched_bytes) == {"grpc": tokens.num_bytes}
    assert result.report.metrics["toy"] == 1.5


async def test_a_metric_that_is_not_finite_is_refused_by_name() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="nan")
        with pytest.raises(PreconditionError, match="metric 'toy'") as caught:
            await last(values(channel))
    assert caught.value.reason == "METRIC_NOT_FINITE"


async def test_a_full_store_refuses_with_a_remedy_and_release_makes_room() -> None:
    num_bytes = make_experience(4, seed=5).num_bytes
    async with (
        serving(experience_capacity_bytes=num_bytes) as server,
        open_channel(server.runtime.address) as channel,
    ):
        await initialize(channel)
        await last(values(channel, step=1))
        with pytest.raises(CapacityError, match="raise experience_capacity_bytes") as caught:
            await last(values(channel, step=2))
        assert caught.value.reason == "EXPERIENCE_CAPACITY"
        assert caught.value.metadata["held_bytes"] == str(num_bytes)
        experience = experience_pb2_grpc.ExperienceServiceStub(channel)
        released = await experience.Release(
            experience_pb2.ReleaseRequest(run_id="run", through_step=1, fencing_epoch=1)
        )
        assert released.released_bytes == num_bytes
        await last(values(channel, step=2))


async def test_released_experience_is_not_found() -> None:
    async with (
        serving() as producer,
        serving() as consumer,
        open_channel(producer.runtime.address) as first,
        open_channel(consumer.runtime.address) as second,
    ):
        await initialize(first)
        await initialize(second)
        produced = (await last(values(first))).experience
        shard = produced.groups[0].shards[0]
        await experience_pb2_grpc.ExperienceServiceStub(first).Release(
            experience_pb2.ReleaseRequest(
                run_id="run", experience_ids=[shard.experience_id], fencing_epoch=1
            )
        )
        request = value_pb2.ComputeValuesRequest(key=operation_key(), experience=produced)
        with pytest.raises(NotFoundError, match=f"toy rank 0 at {shard.address}") as caught:
            await last(value_pb2_grpc.ValueServiceStub(second).ComputeValues(request))
    assert caught.value.reason == "EXPERIENCE_NOT_FOUND"


async def test_a_producer_that_is_gone_is_named() -> None:
    async with serving() as consumer, open_channel(consumer.runtime.address) as second:
        async with serving() as producer, open_channel(producer.runtime.address) as first:
            await initialize(first)
            produced = (await last(values(first))).experience
        await initialize(second)
        request = value_pb2.ComputeValuesRequest(key=operation_key(), experience=produced)
        with pytest.raises(UnavailableError) as caught:
            await last(value_pb2_grpc.ValueServiceStub(second).ComputeValues(request))
    assert caught.value.reason == "PEER_UNREACHABLE"
    assert caught.value.metadata["peer"] == producer.runtime.address
    assert caught.value.metadata["peer_role"] == "toy"
    assert producer.runtime.address in caught.value.message


async def test_a_missing_column_is_named_before_anything_is_fetched() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        produced = (await last(values(channel))).experience
        for index in range(len(produced.groups[0].columns)):
            produced.groups[0].columns[index].name = f"other_{index}"
        request = value_pb2.ComputeValuesRequest(key=operation_key(sequence=1), experience=produced)
        with pytest.raises(InvalidRequestError, match="'tokens' is missing") as caught:
            await last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request))
    assert caught.value.reason == "COLUMN_MISSING"
    assert caught.value.metadata["exception"].endswith(ColumnMissingError.__name__)


async def test_sleep_and_wake_set_the_state() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        freed = await worker.Sleep(worker_pb2.SleepRequest(key=operation_key("sleep")))
        asleep = await worker.GetStatus(worker_pb2.GetStatusRequest())
        taken = await worker.Wake(worker_pb2.WakeRequest(key=operation_key("wake")))
        awake = await worker.GetStatus(worker_pb2.GetStatusRequest())
    assert (freed.freed_bytes, taken.restored_bytes) == (11, 12)
    assert asleep.state == worker_pb2.WORKER_STATE_ASLEEP
    assert awake.state == worker_pb2.WORKER_STATE_READY


async def test_capabilities_carry_the_schema_of_the_spec() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).GetCapabilities(
            worker_pb2.GetCapabilitiesRequest()
        )
    assert answer.role == "toy"
    assert '"behaviour"' in answer.spec_schema_json
    assert "rolemesh.v1.ValueService" in answer.services
    assert "rolemesh.v1.ExperienceService" in answer.services
    assert answer.host_id
    assert answer.accepts_references
    assert answer.versions["torch"]


async def test_health_and_reflection_are_the_standard_services() -> None:
    async with serving() as server, grpc.aio.insecure_channel(server.runtime.address) as bare:
        health = health_pb2_grpc.HealthStub(bare)
        for name in ("", "readiness", "liveness", "rolemesh.v1.ValueService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(bare)
        listed = await anext(aiter(stub.ServerReflectionInfo(requests)))
        names = {service.name for service in listed.list_services_response.service}
        assert {"rolemesh.v1.WorkerService", "grpc.health.v1.Health"} <= names


async def test_metrics_count_calls_by_method_and_code() -> None:
    async with serving(metrics_port=0) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        with pytest.raises(NotFoundError):
            async for _ in experience_pb2_grpc.ExperienceServiceStub(channel).Fetch(
                experience_pb2.FetchRequest(experience_id="nothing")
            ):
                pass
        assert server.metrics_page is not None
        url = f"http://127.0.0.1:{server.metrics_page.port}/metrics"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        page = await asyncio.to_thread(lambda: opener.open(url, timeout=10).read().decode())
    labels = 'rank="0",role="toy"'
    assert (
        'rolemesh_calls_total{code="OK",method="/rolemesh.v1.WorkerService/Initialize",'
        f"{labels}}} 1.0" in page
    )
    assert 'code="NOT_FOUND",method="/rolemesh.v1.ExperienceService/Fetch"' in page
    assert f"rolemesh_policy_version{{{labels}}} 7.0" in page


async def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ServiceStartError, match=f"port {port} on 127.0.0.1 is in use") as error:
            async with serving(port=port):
                pass
    assert "choose another --port; 0 takes a free one" in str(error.value)


async def test_a_second_server_on_the_port_of_a_first_is_refused() -> None:
    async with serving() as first:
        port = int(first.runtime.address.rpartition(":")[2])
        with pytest.raises(ServiceStartError, match="in use"):
            async with serving(port=port):
                pass


async def test_a_draining_service_refuses_new_work_and_finishes_what_runs() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=0.6)
        running = asyncio.create_task(last(values(channel)))
        await asyncio.sleep(0.2)
        stopping = asyncio.create_task(server.stop(work_timeout_s=5.0))
        await asyncio.sleep(0.1)
        with pytest.raises(UnavailableError) as caught:
            await last(values(channel, sequence=1))
        assert caught.value.reason == "SERVICE_DRAINING"
        assert (await running).experience.num_rows == 4
        assert await stopping
    assert role.num_runs == 1


async def test_work_that_outlasts_the_drain_is_given_up_at_its_next_progress() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=30)
        running = asyncio.create_task(last(values(channel)))
        await asyncio.sleep(0.2)
        assert not await server.stop(work_timeout_s=0.1)
        with pytest.raises(UnavailableError):
            await running


async def test_a_client_that_leaves_in_the_middle_of_a_stream_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving(shared_memory=False) as server,
        open_channel(server.runtime.address) as channel,
    ):
        reference = server.runtime.publish(operation_key(), make_experience(40_000))
        request = experience_pb2.FetchRequest(
            experience_id=reference.groups[0].shards[0].experience_id, row_stop=40_000
        )
        for _ in range(20):
            call = experience_pb2_grpc.ExperienceServiceStub(channel).Fetch(request)
            assert (await anext(aiter(call))).header.num_rows == 40_000
            call.cancel()
        gc.collect()
        status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(
            worker_pb2.GetStatusRequest()
        )
    assert status.experience_bytes == make_experience(40_000).num_bytes
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
