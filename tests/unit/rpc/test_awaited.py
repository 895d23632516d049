"""Tests of requests that a server reads by itself; their messages come by a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import grpc
import pytest

from rolemesh.rpc.errors import DeadlineError
from rolemesh.rpc.http.awaited import AwaitedRequest
from rolemesh.v1 import worker_pb2

WITHIN_S = 0.05


class Context:
    """As much of a ServicerContext as a read needs: the loop is told of a message by a socket."""

    def __init__(self) -> None:
        self.theirs, self._ours = socket.socketpair()
        self.is_waiting = asyncio.Event()

    async def read(self) -> bytes:
        loop = asyncio.get_running_loop()
        come: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(self._ours, lambda: come.set_result(self._ours.recv(1024)))
        self.is_waiting.set()
        try:
            return await come
        finally:
            loop.remove_reader(self._ours)


def request() -> AwaitedRequest:
    handler = grpc.unary_unary_rpc_method_handler(
        lambda *_: None, request_deserializer=worker_pb2.GetStatusRequest.FromString
    )
    return AwaitedRequest(handler, worker_pb2.GetStatusRequest.DESCRIPTOR, WITHIN_S)


async def read(context: Any) -> Any:
    return await request().read(context)


async def test_what_comes_while_the_loop_is_held_is_not_refused_as_late() -> None:
    context = Context()
    reading = asyncio.create_task(read(context))
    await context.is_waiting.wait()
    sent = worker_pb2.GetStatusRequest(run_id="run").SerializeToString()
    # As a kernel does while a library holds Python.
    threading.Timer(WITHIN_S / 2, context.theirs.send, (sent,)).start()
    time.sleep(4 * WITHIN_S)  # noqa: ASYNC251
    assert (await reading).run_id == "run"


async def test_a_request_that_does_not_come_is_refused_as_late() -> None:
    with pytest.raises(DeadlineError, match=r"has not come within 0\.05 s"):
        await read(Context())


async def test_a_call_whose_client_leaves_ends_as_cancelled() -> None:
    context = Context()
    reading = asyncio.create_task(read(context))
    await context.is_waiting.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
