"""Experience from rank to rank: the server and the client of ExperienceService.Fetch.

Negotiated per pair: on one host the answer names a shared memory segment that the consumer maps;
otherwise raw chunks of 1 MiB follow, without protobuf's copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import torch

from rolemesh.engine.experience import (
    Column,
    Experience,
    payload_layout,
    read_payload,
    selected_arrays,
    selected_layout,
)
from rolemesh.engine.layout.payload import PayloadLayout
from rolemesh.engine.transport.slots.shm import open_segment
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import InvalidRequestError, NotFoundError, OutOfRangeError
from rolemesh.rpc.experience.payload import (
    header_of,
    layout_of,
    part_asked_for,
    part_chunks,
    placed_arrays,
)
from rolemesh.rpc.experience.payload_stream import (
    PayloadMalformedError,
    encode_chunk,
    encode_header,
)
from rolemesh.rpc.experience.pull import Answer, fetch_request, pull_rows
from rolemesh.services.runtime.experience.store import ExperienceStore, Held
from rolemesh.services.runtime.server.operations import OperationLedger
from rolemesh.v1 import experience_pb2

SERVICE_NAME = "rolemesh.v1.ExperienceService"
"""Full name of the service."""

GATHERED_BYTES = 8 << 20
"""Scattered rows are copied next to each other so many bytes at a time."""

MAX_PAYLOAD_BYTES = 64 << 30
"""A header that announces more is refused before anything is allocated."""


class ExperienceServicer:
    """Serves the rows that this rank holds."""

    def __init__(
        self,
        store: ExperienceStore,
        ledger: OperationLedger,
        host_id: str,
        release_others: Callable[[experience_pb2.ReleaseRequest], Awaitable[int]] | None = None,
        put: Callable[[AsyncIterator[bytes], Any], Awaitable[experience_pb2.PutResponse]]
        | None = None,
    ) -> None:
        """Prepares.

        Args:
            store: Of this rank.
            ledger: Says which coordinators are stale.
            host_id: Identity of this host; empty when nothing is shared.
            release_others: Passes a release on to the service's other ranks and returns the bytes
                freed there.
            put: Serves Put, from serialized requests; None: nothing is taken from outside.
        """
        self._store = store
        self._ledger = ledger
        self._host_id = host_id
        self._release_others = release_others
        self._put = put

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers by hand: Fetch writes its own bytes, and Put reads its own."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Fetch": grpc.unary_stream_rpc_method_handler(
                self.fetch,
                request_deserializer=experience_pb2.FetchRequest.FromString,
                response_serializer=None,
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self.release,
                request_deserializer=experience_pb2.ReleaseRequest.FromString,
                response_serializer=experience_pb2.ReleaseResponse.SerializeToString,
            ),
        }
        if self._put is not None:
            handlers["Put"] = grpc.stream_unary_rpc_method_handler(
                self._put,
                request_deserializer=None,
                response_serializer=experience_pb2.PutResponse.SerializeToString,
            )
        server.add_registered_method_handlers(SERVICE_NAME, handlers)

    async def fetch(
        self, request: experience_pb2.FetchRequest, context: object
    ) -> AsyncIterator[bytes]:
        """Sends columns of a row range: a header, then chunks unless shared memory carries them."""
        held = self._store.get(request.experience_id)
        names = _columns_asked_for(held, request)
        rows = _rows_asked_for(held, request)
        if held.segment is not None and request.host_id == self._host_id:
            layout = payload_layout(held.experience)
            by_name = {column.name: column for column in layout.columns}
            chosen = tuple(by_name[name] for name in names)
            header = header_of(replace(layout, columns=chosen))
            header.shared_memory_name = held.segment.name
            in_place = rows if isinstance(rows, range) else range(held.experience.num_rows)
            header.row_start, header.row_stop = in_place.start, in_place.stop
            yield encode_header(header)
            return
        batch = held.experience.require(names)
        layout = selected_layout(batch, rows)
        start, stop = part_asked_for(request.byte_start, request.byte_stop, layout.num_bytes)
        header = header_of(layout)
        header.byte_stop = stop
        yield encode_header(header)
        for pieces in part_chunks(_placed(batch, rows, layout, start, stop), start, stop):
            yield encode_chunk(pieces)

    async def release(
        self, request: experience_pb2.ReleaseRequest, context: object
    ) -> experience_pb2.ReleaseResponse:
        """Drops experience by id, or of all steps up to one."""
        self._ledger.check_speaker(request.run_id, request.fencing_epoch)
        if request.experience_ids:
            released = self._store.release_ids(request.run_id, list(request.experience_ids))
        else:
            released = self._store.release_through(request.run_id, request.through_step)
        if self._release_others is not None:
            released += await self._release_others(request)
        return experience_pb2.ReleaseResponse(released_bytes=released)


def _placed(
    batch: Experience, rows: Sequence[int], layout: PayloadLayout, start: int, stop: int
) -> Iterable[tuple[int, memoryview]]:
    """What lies at bytes start to stop - 1 of the payload of some rows: first bytes and contents.

    Neighbours are views. Others are gathered a few MiB at a time, as they are sent.
    """
    if isinstance(rows, range):
        return placed_arrays(layout, arrays_of(take_rows(batch, rows)))
    return (
        (at, bytes_of(values))
        for at, values in selected_arrays(batch, rows, layout, start, stop, GATHERED_BYTES)
    )


def arrays_of(batch: Experience) -> dict[str, list[memoryview]]:
    """The bytes of each column: its values, then its offsets if it has any. Views on the CPU."""
    return {
        name: [bytes_of(one) for one in (column.values, column.offsets) if one is not None]
        for name, column in batch.columns.items()
    }


def bytes_of(values: torch.Tensor) -> memoryview:
    """The elements of a tensor on the CPU, row-major; a view where it is contiguous."""
    return memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _columns_asked_for(held: Held, request: experience_pb2.FetchRequest) -> list[str]:
    names = list(dict.fromkeys(request.columns)) or list(held.experience.columns)
    for name in names:
        if name not in held.experience:
            raise NotFoundError(
                f"experience {held.experience_id} has no column {name!r}: it has "
                f"{sorted(held.experience.columns)}",
                reason="COLUMN_NOT_FOUND",
                metadata={"experience_id": held.experience_id, "column": name},
            )
    return names


def _rows_asked_for(held: Held, request: experience_pb2.FetchRequest) -> Sequence[int]:
    num_rows = held.experience.num_rows
    single = list(request.rows)
    start, stop = request.row_start, request.row_stop
    if single and (start or stop):
        raise InvalidRequestError(
            f"both single rows and the range {start} to {stop} were asked for: give one of them",
            reason="ROWS_AMBIGUOUS",
        )
    if len(set(single)) < len(single):
        raise InvalidRequestError(
            f"{len(single)} single rows were asked for, but only {len(set(single))} of them "
            "differ: ask for each row once",
            reason="ROWS_AMBIGUOUS",
        )
    if single and max(single) >= num_rows:
        start, stop = min(single), max(single) + 1
    if not 0 <= start <= stop <= num_rows:
        raise OutOfRangeError(
            f"rows {start} to {stop} were asked for, but experience {held.experience_id} holds "
            f"rows 0 to {num_rows}",
            reason="ROWS_OUT_OF_RANGE",
            metadata={"experience_id": held.experience_id},
        )
    return single or range(start, stop)


def take_rows(batch: Experience, rows: Sequence[int]) -> Experience:
    """The given rows in the given order; a range of neighbours as a view."""
    if isinstance(rows, range) and rows.step == 1:
        return batch.slice(rows.start, rows.stop)
    return batch.select(torch.tensor(list(rows), dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought."""

    experience: Experience
    transport: str
    """ "shm", "grpc", or "grpc_4" when it came over four connections."""
    num_bytes: int
    """Bytes of the rows and columns that were taken."""


async def fetch_rows(
    channel: MeshChannel,
    shard: experience_pb2.Shard,
    columns: Sequence[str],
    rows: Sequence[int],
    host_id: str,
) -> Fetched:
    """Pulls columns of rows, counted inside the shard, from the rank that holds them.

    Args:
        channel: To the shard's rank.
        shard: What to read from.
        columns: Names, at least one.
        rows: In the order wanted; a range with step 1 is asked for as one.
        host_id: Identity of this host; an empty one refuses shared memory.

    Raises:
        RolemeshError: What the peer answered, or UnavailableError when it does not; names the peer.
        ValueError: The answer's bytes do not fit its description.
    """
    request = fetch_request(shard, columns, rows, host_id)

    async def take(answer: Answer[experience_pb2.PayloadHeader]) -> Fetched:
        header, segment = answer.header, answer.segment
        layout = layout_of(header)
        _check_against_request(header, request)
        if segment is not None:
            payload = open_segment(segment, header.num_bytes)
            # A copy of many MiB must not hold up the loop.
            wanted = request.rows or range(header.row_start, header.row_stop)
            experience = await asyncio.to_thread(_copy_rows, layout, payload, wanted)
            return Fetched(experience, "shm", experience.num_bytes)
        payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
        transport = await answer.read_into(payload.numpy().data)
        experience = read_payload(layout, payload)
        return Fetched(experience, transport, experience.num_bytes)

    return await pull_rows(channel, shard, request, take)


def _check_against_request(
    header: experience_pb2.PayloadHeader, request: experience_pb2.FetchRequest
) -> None:
    names = [column.schema.name for column in header.columns]
    if names != list(request.columns):
        raise PayloadMalformedError(
            f"columns {list(request.columns)} were asked for, but {names} came"
        )
    is_shared = header.HasField("shared_memory_name")
    num_rows = len(request.rows) or request.row_stop - request.row_start
    came = header.row_stop - header.row_start
    fits = (
        came == header.num_rows > max(request.rows)
        if is_shared and request.rows
        else came == num_rows
    )
    if not (fits and 0 <= header.row_start <= header.row_stop <= header.num_rows):
        raise PayloadMalformedError(
            f"{num_rows} rows were asked for, but rows {header.row_start} to {header.row_stop} of "
            f"{header.num_rows} came"
        )
    if not is_shared and header.num_rows != num_rows:
        raise PayloadMalformedError(
            f"{num_rows} rows were asked for, but a stream of {header.num_rows} rows came"
        )
    if header.num_bytes > MAX_PAYLOAD_BYTES:
        raise PayloadMalformedError(
            f"the payload was announced with {header.num_bytes} bytes, but at most "
            f"{MAX_PAYLOAD_BYTES} are taken: fetch fewer rows at a time"
        )


def _copy_rows(layout: PayloadLayout, payload: torch.Tensor, rows: Sequence[int]) -> Experience:
    taken = take_rows(read_payload(layout, payload), rows)
    if not isinstance(rows, range):
        return taken  # already a copy
    return Experience(
        {
            name: Column(
                column.kind,
                column.values.clone(),
                None if column.offsets is None else column.offsets.clone(),
            )
            for name, column in taken.columns.items()
        }
    )
