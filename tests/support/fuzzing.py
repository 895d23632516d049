"""Malformed requests to one server: how many at a time, what is a right answer, and the figures."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from support.malformed import Known, Malformed

from rolemesh.rpc.limits import MAX_EPOCH_JUMP, MAX_ROWS, MAX_TRAINED_ROWS
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.v1 import experience_pb2

REPORT = os.environ.get("FUZZ_REPORT", "")
SEED = 20261123
RUN = "run"
AT_ONCE = 8
"""Calls that one server has at the same time. All servers of a test are sent to at once."""

MOST_RIGHT = 300
"""Requests of a method that are answered with OK, until all further ones get wrong bytes: what is
right says little of malformed requests, and models work on it."""

PATIENCE_S = 60.0
"""A call without an answer for so long hangs."""

SENT_TOO_LATE = "Internal error from Core"
"""What a client of gRPC says by itself where its stream is refused while it still sends; such an
end says nothing of the status that the server gave."""

WATCH_S = 0.2
"""A watch goes on until its caller has had enough."""

MOST_WORK = 64
"""Rows that a call may make a tiny model work on: what is allowed and slow is no matter here."""

MOST_GROWTH_BYTES = 160 << 20
"""Resident memory at the end, against that when the servers are warm: experience that calls have
made is held (32 MiB), and so are the answers to 1,024 operations."""

RIGHT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass
class Figures:
    """What one server answered."""

    server: str
    pid: int
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Requests whose answer was none of the right ones."""
    before_bytes: int = 0
    longest_s: float = 0.0
    methods: int = 0
    began: float = field(default_factory=time.monotonic)

    def warm(self) -> None:
        """Notes the memory of the process once it has worked."""
        self.before_bytes = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def note(self, status: str, began: float) -> None:
        self.statuses[status] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def faults(self) -> list[str]:
        """Tells the figures; returns what was not right."""
        after_bytes = self.resident_bytes
        line = json.dumps(
            {
                "benchmark": "fuzz",
                "server": self.server,
                "methods": self.methods,
                "messages": self.statuses.total(),
                "statuses": dict(self.statuses.most_common()),
                "wrong": len(self.wrong),
                "longest_s": round(self.longest_s, 2),
                "seconds": round(time.monotonic() - self.began, 1),
                "resident_before_mib": self.before_bytes >> 20,
                "resident_after_mib": after_bytes >> 20,
            }
        )
        print(line)
        if REPORT:
            with Path(REPORT).open("a") as report:
                report.write(line + "\n")
        grown_bytes = after_bytes - self.before_bytes
        is_flat = grown_bytes < MOST_GROWTH_BYTES
        grown = [] if is_flat else [f"{self.server} has grown by {grown_bytes >> 20} MiB"]
        return [*self.wrong[:20], *grown]


async def sent(number: int, send: Callable[[], Any]) -> None:
    """Sends so many requests, AT_ONCE at a time."""
    left = iter(range(number))

    async def one_after_another() -> None:
        for _ in left:
            await send()

    await asyncio.gather(*(one_after_another() for _ in range(min(AT_ONCE, number))))


# --- gRPC -------------------------------------------------------------------------------------


class Fuzzed:
    """A gRPC server that is sent malformed requests."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        figures: Figures,
        malformed: Malformed,
        is_harmful: Callable[[str, Message], bool],
    ) -> None:
        self._channel = channel
        self._figures = figures
        self._malformed = malformed
        self._is_harmful = is_harmful
        self._num_right = 0

    async def method(self, path: str, number: int) -> None:
        """Sends so many to one method."""
        self._figures.methods += 1
        self._num_right = 0
        await sent(number, lambda: self._one(path))

    async def _one(self, path: str) -> None:
        described = rolemesh_methods()[path]
        kind = GetMessageClass(described.input_type)
        is_damaged = self._num_right >= MOST_RIGHT
        while True:
            data = self._malformed.request(described.input_type, is_damaged=is_damaged)
            try:
                if not self._is_harmful(path, kind.FromString(data)):
                    break
            except DecodeError:
                break
        began, answer = time.monotonic(), "?"
        is_watch = path.endswith("/WatchRun")
        timeout_s = WATCH_S if is_watch else PATIENCE_S
        try:
            if path.endswith("/Put"):
                parts = [data, *self._chunks()]
                await self._channel.stream_unary(path)(_iterated(parts), timeout=timeout_s)
            elif described.server_streaming:
                async for _ in self._channel.unary_stream(path)(data, timeout=timeout_s):
                    pass
            else:
                await self._channel.unary_unary(path)(data, timeout=timeout_s)
            code, answer = grpc.StatusCode.OK, ""
            self._num_right += 1
        except grpc.aio.AioRpcError as error:
            code, answer = error.code(), str(error.details())
        if answer == SENT_TOO_LATE and path.endswith("/Put"):
            self._figures.note("REFUSED_WHILE_SENDING", began)
            return
        self._figures.note(code.name, began)
        is_right = code in RIGHT or (is_watch and code is grpc.StatusCode.DEADLINE_EXCEEDED)
        # A peer whose address is none is a service that is away.
        is_right = is_right or (code is grpc.StatusCode.UNAVAILABLE and "127.0.0.1:1" in answer)
        if not is_right:
            self._figures.wrong.append(f"{path} {code.name}: {answer[:300]} <- {data[:400]!r}")

    def _chunks(self) -> list[bytes]:
        draw = self._malformed.random
        number = draw.choice((0, 1, 1, 1, 2, 3))
        sizes = [draw.choice((0, 1, 64, 192, 448, 4096, 2 << 20)) for _ in range(number)]
        chunks = [
            experience_pb2.PutRequest(chunk=bytes(size)).SerializeToString() for size in sizes
        ]
        return [draw.randbytes(9) if draw.random() < 0.1 else chunk for chunk in chunks]


async def _iterated(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def inner_messages(message: Message) -> Iterator[Any]:
    """The message and all of ours that it holds."""
    yield message
    for each, value in message.ListFields():
        if each.message_type is None or each.message_type.file.package != "rolemesh.v1":
            continue
        if each.message_type.GetOptions().map_entry:
            continue
        for inner in value if each.is_repeated else [value]:
            yield from inner_messages(inner)


def is_harmful(path: str, request: Any, known: Known) -> bool:
    """Whether a request is no malformed one, but right and bad for the test.

    It would end the run, fence the test off, write into some folder of the machine, call some
    address, or have a model work for minutes.
    """
    method = path.rpartition("/")[2]
    for message in inner_messages(request):
        kind = message.DESCRIPTOR.name
        most = 2**63 if method == "Attach" else 1 + MAX_EPOCH_JUMP
        is_mine = kind == "OperationKey" and message.run_id == RUN
        if is_mine and 1 < message.fencing_epoch <= most:
            return True
        if "directory" in message.DESCRIPTOR.fields_by_name:
            directory = message.directory
            if directory.startswith("/") and directory not in known.values["directory"]:
                return True
        addresses = [message.address] if kind == "Shard" else []
        addresses += message.addresses if kind == "WeightsRef" else []
        if any(":" in one and one not in known.values["address"] for one in addresses):
            return True
    if method in ("Drain", "Release", "DropCuts") and request.run_id == RUN:
        return method != "Release" or 1 <= request.fencing_epoch <= 1 + MAX_EPOCH_JUMP
    if method == "Drain":
        return bool(request.exit) or not request.run_id
    if method == "Generate":
        rows = (request.prompts.count or len(request.given.prompts)) * max(
            1, request.sampling.samples_per_prompt
        )
        return bool(rows * request.sampling.max_new_tokens > MOST_WORK and 0 < rows <= MAX_ROWS)
    if method == "ReadBatch":
        return bool(2 * request.rows.count > MOST_WORK and request.rows.count <= MAX_ROWS)
    if method == "Update":
        rows = request.epochs * request.experience.num_rows
        return bool(MOST_WORK < rows <= MAX_TRAINED_ROWS)
    return False


# --- roles ------------------------------------------------------------------------------------
