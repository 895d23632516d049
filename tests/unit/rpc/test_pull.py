"""A pull: shared memory first, a stream where that fails, and errors that name the producer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rolemesh.rpc.errors import InternalError
from rolemesh.rpc.experience import pull as pull_module
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError, encode_chunk
from rolemesh.rpc.experience.pull import FETCH_WEIGHTS, Answer, pull
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


# --- several connections ---------------------------------------------------------------------

CONTENT = bytes(range(100))


class PartChannel:
    """One of several connections to a producer that knows parts, unless it is an old one."""

    def __init__(self, *, knows_parts: bool = True, lies: Callable[[Any], None] | None = None):
        self.asked: list[tuple[int, int]] = []
        self.others: list[PartChannel] = []
        self._knows_parts = knows_parts
        self._lies = lies

    def connections(self, number: int) -> list[PartChannel]:
        while len(self.others) < number - 1:
            self.others.append(PartChannel())
        return [self, *self.others[: number - 1]]

    def unary_stream(self, method: str, **how: Any) -> Callable[..., Any]:
        return lambda request, timeout: PartCall(self.answer(request))

    async def answer(self, request: Any) -> AsyncIterator[bytes]:
        self.asked.append((request.byte_start, request.byte_stop))
        header = weights_pb2.FetchWeightsHeader(total_bytes=len(CONTENT))
        start, stop = 0, len(CONTENT)
        if self._knows_parts:
            start, stop = request.byte_start, min(request.byte_stop, len(CONTENT))
            header.byte_stop = stop
        if self._lies is not None and start:
            self._lies(header)
        yield weights_pb2.FetchWeightsResponse(header=header).SerializeToString()
        for at in range(start, stop, 7):
            yield encode_chunk([CONTENT[at : min(at + 7, stop)]])


class PartCall:
    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._messages

    def cancel(self) -> None:
        """Nothing is held."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "FIRST_PART_BYTES", 10)
    monkeypatch.setattr(pull_module, "LEAST_PART_BYTES", 25)


async def take_parts(answer: Answer[weights_pb2.FetchWeightsHeader]) -> bytes:
    buffer = bytearray(answer.header.total_bytes)
    way = await answer.read_into(buffer)
    return bytes(buffer) + way.encode()


@pytest.mark.usefixtures("small_parts")
async def test_what_follows_a_first_part_comes_over_several_connections() -> None:
    channel = PartChannel()
    assert await pulled(channel, take_parts, host_id="") == CONTENT + b"grpc_4"
    assert channel.asked == [(0, 10), (10, 33)]
    assert [other.asked for other in channel.others] == [[(33, 56)], [(56, 79)], [(79, 100)]]


async def test_what_fits_into_a_first_part_comes_over_one_connection() -> None:
    channel = PartChannel()
    assert await pulled(channel, take_parts, host_id="") == CONTENT + b"grpc"
    assert len(channel.asked) == 1
    assert not channel.others


@pytest.mark.usefixtures("small_parts")
async def test_a_producer_that_knows_no_parts_sends_all_over_one_connection() -> None:
    channel = PartChannel(knows_parts=False)
    assert await pulled(channel, take_parts, host_id="") == CONTENT + b"grpc"
    assert len(channel.asked) == 1
    assert not channel.others


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("total_bytes", 101, "bytes 10 to 33 of 100 were asked for, but those up to 33 of 101"),
        ("byte_stop", 32, "bytes 10 to 33 of 100 were asked for, but those up to 32 of 100"),
    ],
)
async def test_a_part_of_another_payload_is_refused(field: str, value: int, says: str) -> None:
    channel = PartChannel(lies=lambda header: setattr(header, field, value))
    with pytest.raises(PayloadMalformedError, match=rf"^rank 3 at x: {says}"):
        await pulled(channel, take_parts, host_id="")
