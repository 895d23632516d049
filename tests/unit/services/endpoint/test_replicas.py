"""Calls of an endpoint over generation replicas, of which others answer over a real gRPC server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.endpoint.replicas import RemoteCalls, Replicas
from rolemesh.services.endpoint.turns import RankTurns
from rolemesh.v1 import endpoint_pb2, endpoint_pb2_grpc

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _has_vllm() -> None:
    # Imported by the one process that runs these tests, and not by each that collects them.
    pytest.importorskip("vllm")


def output(text: str, *, finished: bool) -> Any:
    from vllm import outputs

    one = outputs.CompletionOutput(0, text, [1], None, None)
    return outputs.RequestOutput("theirs", None, [1], None, [one], finished)


class OtherRank(endpoint_pb2_grpc.EndpointServiceServicer):
    """Another replica's first rank, whose answers a test gives."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.num_begun = 0
        self.num_cancelled = 0

    async def SampleCall(
        self, request: endpoint_pb2.SampleCallRequest, context: Any
    ) -> AsyncIterator[endpoint_pb2.SampleCallResponse]:
        from vllm import SamplingParams

        from rolemesh.engine.rollout.endpoint.wire import pack_output, unpack_call

        assert request.run_id == "run"
        assert unpack_call(request.call)[1] == SamplingParams(seed=3)
        self.num_begun += 1
        try:
            while True:
                answer = await self.answers.get()
                if isinstance(answer, str):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, answer)
                yield endpoint_pb2.SampleCallResponse(output=pack_output(answer))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Client:
    """A call, and what it is told."""

    def __init__(self, call_id: str, session_id: str = "") -> None:
        from vllm import SamplingParams

        self.told: list[Any] = []
        self.heard = threading.Event()
        self.call = EndpointCall(
            call_id=call_id,
            prompt={"type": "token", "prompt_token_ids": [1]},
            params=SamplingParams(seed=3),
            told=self._hear,
            session_id=session_id,
        )

    def _hear(self, said: Any) -> None:
        self.told.append(said)
        self.heard.set()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what other threads do sets no event
            await asyncio.sleep(0.01)


@pytest.fixture
async def other() -> AsyncIterator[tuple[OtherRank, RemoteCalls]]:
    rank, server = OtherRank(), grpc.aio.server()
    endpoint_pb2_grpc.add_EndpointServiceServicer_to_server(rank, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield rank, RemoteCalls(channel, "run", asyncio.get_running_loop())
    await server.stop(0)


async def test_a_call_of_another_replica_hears_its_outputs_under_its_own_name(
    other: tuple[OtherRank, RemoteCalls],
) -> None:
    rank, calls = other
    client = Client("mine")
    calls.begin(client.call)
    assert calls.num_open == 1
    await rank.answers.put(output("a", finished=False))
    await rank.answers.put(output("ab", finished=True))
    await until(lambda: len(client.told) == 2)
    assert [one.request_id for one in client.told] == ["mine", "mine"]
    assert [one.outputs[0].text for one in client.told] == ["a", "ab"]
    assert calls.num_open == 0


async def test_what_another_replica_cannot_sample_is_the_callers_to_hear(
    other: tuple[OtherRank, RemoteCalls],
) -> None:
    rank, calls = other
    client = Client("mine")
    calls.begin(client.call)
    await rank.answers.put("the prompt is too long")
    await until(lambda: bool(client.told))
    (error,) = client.told
    # What the front answers with 400, and not with 500.
    assert type(error) is ValueError
    assert "the prompt is too long" in str(error)
    assert not isinstance(error, InvalidRequestError)


async def test_a_call_that_is_cancelled_ends_there_and_hears_nothing_more(
    other: tuple[OtherRank, RemoteCalls],
) -> None:
    rank, calls = other
    client = Client("mine")
    calls.begin(client.call)
    await until(lambda: rank.num_begun == 1)
    calls.cancel("mine")
    await until(lambda: rank.num_cancelled == 1)
    assert (client.told, calls.num_open) == ([], 0)
    calls.cancel("never was")


async def test_sessions_stay_where_they_are_and_new_ones_go_where_the_fewest_calls_are(
    other: tuple[OtherRank, RemoteCalls],
) -> None:
    rank, remote = other
    own = EndpointCalls()
    replicas = Replicas(own, [remote])
    assert replicas.is_empty
    replicas.begin(Client("0", "a").call)
    replicas.begin(Client("1", "b").call)
    assert (own.num_open, remote.num_open) == (1, 1)
    for number in range(3):
        replicas.begin(Client(f"more-{number}", "b").call)
    assert (own.num_open, remote.num_open) == (1, 4)
    for number in range(3):
        replicas.begin(Client(f"alone-{number}").call)
    assert (own.num_open, remote.num_open) == (4, 4)
    replicas.begin(Client("2", "a").call)
    assert own.num_open == 5
    await until(lambda: rank.num_begun == 4)
    replicas.cancel("1")
    assert replicas.num_open == 8


async def test_an_error_ends_the_calls_of_all_replicas(
    other: tuple[OtherRank, RemoteCalls],
) -> None:
    class Engine:
        def abort_request(self, ids: list[str], internal: bool) -> None:
            assert ids == []

    _, remote = other
    replicas = Replicas(EndpointCalls(), [remote])
    clients = [Client(str(number)) for number in range(2)]
    for client in clients:
        replicas.begin(client.call)
    error = RuntimeError("the service ends")
    replicas.close(Engine(), error)
    assert [client.told for client in clients] == [[error], [error]]
    assert replicas.is_empty


def test_turns_end_by_their_number_and_not_by_the_moment_when_that_is_heard() -> None:
    class Backend:
        """As much of a back end as counts: a turn without calls."""

        num_steps = 0

        def serve(self, goes_on: Callable[[], bool], *, anew: bool) -> None:
            while goes_on():
                self.num_steps += 1
                if self.num_steps == 3:
                    turns.end(2)

    turns, backend = RankTurns(EndpointCalls()), Backend()
    turns.end(1)
    turns.follow(backend, turns.begin())  # type: ignore[arg-type]
    # The end of turn 1 came before the turn began.
    assert (turns.number, backend.num_steps) == (1, 0)
    turns.follow(backend, turns.begin())  # type: ignore[arg-type]
    assert (turns.number, backend.num_steps) == (2, 3)
    # One that failed before it sampled counts, as it does on all ranks.
    turns.begin()
    turns.end(3)
    assert turns.begin() == 4

    told: list[int] = []
    first = RankTurns(EndpointCalls())
    first.tell_end = told.append
    with pytest.raises(OSError, match="an agent"), first.turn():
        raise OSError("an agent")
    with first.turn():
        assert told == [1]
    assert told == [1, 2]
