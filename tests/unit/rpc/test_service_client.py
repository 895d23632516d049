"""The client of a service: it makes every RPC, and follows what streams to its result."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.calls.service_client import ServiceClient, to_algorithm_part
from rolemesh.rpc.errors import DataLossError, DeadlineError, InternalError
from rolemesh.rpc.experience.payload_stream import encode_chunk
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.v1 import experience_pb2, operation_pb2, reward_pb2, rollout_pb2, weights_pb2


def following(*messages: Any, field: str = "result") -> ResultCall[Any]:
    async def stream() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return ResultCall(stream(), "host:1", field)


def made(num_rows: int) -> experience_pb2.ExperienceResult:
    reference = experience_pb2.ExperienceRef(num_rows=num_rows)
    return experience_pb2.ExperienceResult(experience=reference)


def test_every_rpc_of_a_service_has_a_method() -> None:
    names = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", path.rpartition("/")[2]).lower()
        for path in rolemesh_methods()
        if "CoordinatorService" not in path
        # Services call it, at the coordinator.
        and "RegistryService" not in path
        # Hosts, and ranks, of one service speak them among themselves.
        and "HostsService" not in path
        and "EndpointService" not in path
    }
    # Fetch is answered with a payload, which rolemesh.rpc.experience.column_fetch pulls.
    assert {name for name in names if not hasattr(ServiceClient, name)} == {"fetch"}


async def test_progress_and_blocks_are_told_before_the_result_is_given() -> None:
    stages, blocks = [], []
    call = following(
        rollout_pb2.GenerateResponse(progress=operation_pb2.Progress(stage="decode")),
        rollout_pb2.GenerateResponse(block=rollout_pb2.GeneratedBlock(index=3)),
        rollout_pb2.GenerateResponse(result=made(5)),
    )
    result = await call.result(
        lambda progress: stages.append(progress.stage), lambda block: blocks.append(block.index)
    )
    assert (stages, blocks, result.experience.num_rows) == (["decode"], [3], 5)


IDLE_S = 0.4


def working(*told: int) -> ResultCall[Any]:
    """A call that says how much is done, in each eighth of the idle time, and then answers."""

    async def stream() -> AsyncIterator[Any]:
        for done in told:
            await asyncio.sleep(IDLE_S / 8)
            progress = operation_pb2.Progress(stage="decode", done=done)
            yield rollout_pb2.GenerateResponse(progress=progress)
        yield rollout_pb2.GenerateResponse(result=made(1))

    return ResultCall(stream(), "host:1", idle_s=IDLE_S)


async def test_a_call_may_take_as_long_as_it_makes_progress() -> None:
    assert (await working(*range(16))).experience.num_rows == 1


async def test_a_call_that_only_says_that_it_lives_is_given_up() -> None:
    with pytest.raises(
        DeadlineError, match=r"host:1 has told of no progress .* since 'decode'"
    ) as e:
        await working(1, 2, *[3] * 40)
    assert e.value.reason == "CALL_IDLE"
    with pytest.raises(DeadlineError):
        async for _ in working(*[3] * 40):
            pass


async def test_a_call_that_ends_without_its_result_is_an_error() -> None:
    progress = reward_pb2.ComputeRewardResponse(progress=operation_pb2.Progress(done=1))
    other = reward_pb2.ComputeRewardResponse(result=made(1))
    unknown = reward_pb2.ComputeRewardResponse()
    with pytest.raises(InternalError, match="host:1 ended the call without a result"):
        await following(progress, other, unknown, field="rewards")


def test_a_part_names_its_type_and_holds_what_json_has() -> None:
    part = to_algorithm_part({"type": "grpo", "scale": True})
    assert (part.type, dict(part.parameters)) == ("grpo", {"scale": True})
    with pytest.raises(ValueError, match='give its name as "type"'):
        to_algorithm_part({"scale": True})
    with pytest.raises(ValueError, match="cannot travel"):
        to_algorithm_part({"type": "grpo", "scale": object()})


class Publisher:
    """A channel to a service that sends the same chunks for whatever weights are asked for."""

    address = "host:1"

    def __init__(self, announced: int, *chunks: bytes) -> None:
        self.read = 0
        self._announced, self._chunks = announced, chunks

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        return lambda request, timeout: self

    unary_unary = stream_unary = unary_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        header = weights_pb2.FetchWeightsHeader(total_bytes=self._announced)
        yield weights_pb2.FetchWeightsResponse(header=header).SerializeToString()
        for chunk in self._chunks:
            self.read += 1
            yield encode_chunk([chunk])

    def cancel(self) -> None:
        pass


async def fetched(publisher: Any, num_bytes: int) -> bytearray:
    return await ServiceClient(publisher, name="actor").fetch_weights("run", 1, [], num_bytes)


async def test_weights_come_whole() -> None:
    assert await fetched(Publisher(4, b"ab", b"cd"), 4) == b"abcd"


@pytest.mark.parametrize(
    ("announced", "message", "read"),
    [(6, "4 bytes of weights were asked for, but 6 are", 0), (4, "with 4 bytes, but 6 arrived", 3)],
)
async def test_more_bytes_of_weights_than_asked_for_are_not_gathered(
    announced: int, message: str, read: int
) -> None:
    publisher = Publisher(announced, *[b"ab"] * 100)
    with pytest.raises(DataLossError, match=f"actor at host:1: .*{message}") as caught:
        await fetched(publisher, 4)
    assert caught.value.reason == "PAYLOAD_MALFORMED"
    assert publisher.read == read
