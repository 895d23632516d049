"""A pull: shared memory first, a stream where that fails, and errors that name the producer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rolemesh.rpc.errors import InternalError
from rolemesh.rpc.payload_stream import PayloadMalformedError, encode_chunk
from rolemesh.rpc.pull import FETCH_WEIGHTS, Answer, pull
from rolemesh.v1 import weights_pb2

HEADER = weights_pb2.FetchWeightsHeader(total_bytes=4)


class FakeChannel:
    """Answers as a producer that shares memory with whoever names a host, and fails when told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.cancelled = 0
        self._error = error

    def unary_stream(self, method: str, **how: Any) -> Callable[..., Any]:
        assert method == FETCH_WEIGHTS.name
        return lambda request, timeout: FakeCall(self, request.host_id)

    async def answer(self, host_id: str) -> AsyncIterator[bytes]:
        self.asked.append(host_id)
        if self._error is not None:
            raise self._error
        header = weights_pb2.FetchWeightsHeader()
        header.CopyFrom(HEADER)
        header.shared_memory_path = "/dev/shm/there" if host_id else ""
        yield weights_pb2.FetchWeightsResponse(header=header).SerializeToString()
        if not host_id:
            yield encode_chunk([b"ab"])
            yield encode_chunk([b"cd"])


class FakeCall:
    def __init__(self, channel: FakeChannel, host_id: str) -> None:
        self._channel, self._messages = channel, channel.answer(host_id)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._messages

    def cancel(self) -> None:
        self._channel.cancelled += 1


async def pulled(channel: Any, take: Any, host_id: str = "here") -> bytes:
    request = weights_pb2.FetchWeightsRequest(host_id=host_id)
    result: bytes = await pull(
        channel, FETCH_WEIGHTS, request, take, peer="rank 3 at x", metadata={"peer": "x"}
    )
    return result


async def take(answer: Answer[weights_pb2.FetchWeightsHeader]) -> bytes:
    if answer.segment is not None:
        return answer.segment.encode()
    buffer = bytearray(answer.header.total_bytes)
    await answer.read_into(buffer)
    return bytes(buffer)


async def refuse_memory(answer: Answer[weights_pb2.FetchWeightsHeader]) -> bytes:
    if answer.segment is not None:
        raise FileNotFoundError(answer.segment)
    return await take(answer)


async def test_memory_is_mapped_where_both_ends_have_it_and_chunks_are_read_elsewhere() -> None:
    channel = FakeChannel()
    assert await pulled(channel, take) == b"/dev/shm/there"
    assert await pulled(channel, take, host_id="") == b"abcd"
    assert channel.cancelled == 2


async def test_memory_that_cannot_be_opened_is_replaced_by_one_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = FakeChannel()
    assert await pulled(channel, refuse_memory) == b"abcd"
    assert channel.asked == ["here", ""]
    assert "rank 3 at x: shared memory failed (/dev/shm/there): asking for a stream" in caplog.text


async def test_an_error_of_the_system_without_an_offer_is_raised() -> None:
    async def fail(answer: object) -> bytes:
        raise OSError("no room")

    channel = FakeChannel()
    with pytest.raises(OSError, match="no room"):
        await pulled(channel, fail, host_id="")
    assert channel.asked == [""]


async def test_what_the_producer_answers_names_it_and_keeps_all_that_it_said() -> None:
    said = InternalError("boom", reason="WHY", metadata={"rank": "3"}, remote_traceback=("a:1",))
    with pytest.raises(InternalError, match=r"^rank 3 at x: boom$") as caught:
        await pulled(FakeChannel(said), take)
    assert caught.value.reason == "WHY"
    assert caught.value.metadata == {"rank": "3", "peer": "x"}
    assert caught.value.remote_traceback == ("a:1",)


async def test_bytes_that_do_not_fit_name_the_producer() -> None:
    async def too_short(answer: Answer[weights_pb2.FetchWeightsHeader]) -> bytes:
        await answer.read_into(bytearray(3))
        return b""

    with pytest.raises(PayloadMalformedError, match=r"^rank 3 at x: .*3 bytes, but 4 arrived"):
        await pulled(FakeChannel(), too_short, host_id="")
