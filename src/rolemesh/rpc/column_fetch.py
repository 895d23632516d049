"""Pulls columns of referenced experience over gRPC, from every rank that holds rows of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np

from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.columns import ColumnData, Columns, check_header, decode
from rolemesh.rpc.errors import CapacityError, DataLossError, InvalidRequestError, RolemeshError
from rolemesh.rpc.payload_stream import (
    FETCH_METHOD,
    PayloadBuffer,
    PayloadMalformedError,
    decode_part,
)
from rolemesh.rpc.row_places import place
from rolemesh.rpc.together import together
from rolemesh.v1 import experience_pb2

MAX_FETCH_BYTES = 1 << 30
"""Unless told otherwise, the most bytes that one fetch allocates, over all ranks."""

_SHARDS_AT_ONCE = 8


class _Budget:
    """Bytes that a fetch may still allocate. Owner: one fetch."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        self._taken += num_bytes
        if self._taken > self._max_bytes:
            raise CapacityError(
                f"the columns asked for have more than {self._max_bytes} bytes: fetch fewer rows "
                "or columns at a time, or raise max_bytes",
                reason="FETCH_TOO_LARGE",
            )


async def fetch_columns(
    channel_to: Callable[[str], MeshChannel],
    reference: experience_pb2.ExperienceRef,
    columns: Sequence[str] = (),
    rows: Iterable[int] | None = None,
    *,
    max_bytes: int = MAX_FETCH_BYTES,
    timeout_s: float | None = None,
) -> Columns:
    """Columns of a batch, in the batch's order of rows. Always over gRPC, never by shared memory.

    Args:
        channel_to: The channel to an address "host:port".
        reference: The batch.
        columns: Names wanted, in this order; empty means all.
        rows: Rows of the batch wanted, in this order; None means all.
        max_bytes: Most bytes to allocate.
        timeout_s: Longest time of each call; None: the method's.

    Raises:
        InvalidRequestError: A column or row that the reference does not have.
        CapacityError: FETCH_TOO_LARGE.
        DataLossError: PAYLOAD_MALFORMED: what a rank sent does not fit together.
        RolemeshError: What a rank answered.
    """
    wanted = list(range(reference.num_rows) if rows is None else rows)
    outside = [row for row in wanted if not 0 <= row < reference.num_rows]
    if outside or not wanted:
        raise InvalidRequestError(
            f"rows wanted are {outside[:3] or 'none'}: give one or more of 0 to "
            f"{reference.num_rows - 1}"
        )
    distinct = sorted(set(wanted))
    budget = _Budget(max_bytes)
    at_once = asyncio.Semaphore(_SHARDS_AT_ONCE)

    async def pull(
        shard: experience_pb2.Shard,
        schemas: Sequence[experience_pb2.ColumnSchema],
        positions: Sequence[int],
    ) -> Columns:
        async with at_once:
            return await _fetch_shard(
                channel_to(shard.address), shard, schemas, positions, budget, timeout_s
            )

    names = list(columns) or [column.name for group in reference.groups for column in group.columns]
    fetched: dict[str, ColumnData] = {}
    for index, schemas in _by_group(reference, names).items():
        try:
            found = place(reference.groups[index].shards, distinct)
        except ValueError as error:
            raise InvalidRequestError(str(error), reason="REFERENCE_INVALID") from error
        parts = await together(pull(shard, schemas, at) for shard, at, _ in found)
        # Where each wanted row lies among those that came.
        came = np.concatenate([np.asarray(targets, dtype=np.int64) for _, _, targets in found])
        order = np.argsort(came)[np.searchsorted(distinct, wanted)]
        for schema in schemas:
            stacked = ColumnData.concat([part[schema.name] for part in parts])
            fetched[schema.name] = stacked.select(order)
    return Columns({name: fetched[name] for name in names})


def _by_group(
    reference: experience_pb2.ExperienceRef, names: Sequence[str]
) -> dict[int, list[experience_pb2.ColumnSchema]]:
    """Columns wanted by the index of the group that holds them; of two groups the last counts."""
    holders = {
        column.name: (index, column)
        for index, group in enumerate(reference.groups)
        for column in group.columns
    }
    by_group: dict[int, list[experience_pb2.ColumnSchema]] = {}
    for name in dict.fromkeys(names):
        if name not in holders:
            raise InvalidRequestError(
                f"column {name!r} is missing; the experience has {sorted(holders)}: call the role "
                "that produces it first",
                reason="COLUMN_MISSING",
                metadata={"column": name},
            )
        index, column = holders[name]
        by_group.setdefault(index, []).append(column)
    return by_group


async def _fetch_shard(
    channel: MeshChannel,
    shard: experience_pb2.Shard,
    schemas: Sequence[experience_pb2.ColumnSchema],
    positions: Sequence[int],
    budget: _Budget,
    timeout_s: float | None,
) -> Columns:
    names = [schema.name for schema in schemas]
    request = experience_pb2.FetchRequest(experience_id=shard.experience_id, columns=names)
    if isinstance(positions, range):
        request.row_start, request.row_stop = positions.start, positions.stop
    else:
        request.rows.extend(positions)
    call = channel.unary_stream(
        FETCH_METHOD,
        request_serializer=experience_pb2.FetchRequest.SerializeToString,
        response_deserializer=None,
    )(request, timeout=timeout_s)
    try:
        return await _receive(aiter(call), schemas, len(positions), budget)
    except PayloadMalformedError as error:
        peer = f"{shard.role} rank {shard.rank} at {shard.address}"
        raise DataLossError(
            f"{peer}, fetch of {names}: {error}", reason="PAYLOAD_MALFORMED"
        ) from error
    except RolemeshError as error:
        error.metadata.setdefault("peer", shard.address)
        raise
    finally:
        call.cancel()


async def _receive(
    messages: AsyncIterator[bytes],
    schemas: Sequence[experience_pb2.ColumnSchema],
    num_rows: int,
    budget: _Budget,
) -> Columns:
    first = await anext(messages, None)
    header = None if first is None else decode_part(first)
    if not isinstance(header, experience_pb2.PayloadHeader):
        raise PayloadMalformedError("the stream does not begin with a header")
    check_header(header)
    came = [column.schema for column in header.columns]
    if came != list(schemas) or header.num_rows != num_rows:
        raise PayloadMalformedError(
            f"{num_rows} rows of {_names(schemas)} were asked for, but {header.num_rows} of "
            f"{_names(came)} came, or of other types"
        )
    budget.take(header.num_bytes)
    payload = bytearray(header.num_bytes)
    buffer = PayloadBuffer(payload)
    async for message in messages:
        chunk = decode_part(message)
        if isinstance(chunk, experience_pb2.PayloadHeader):
            raise PayloadMalformedError("the stream holds a second header")
        buffer.add(chunk)
    buffer.finish()
    return decode(header, payload)


def _names(schemas: Iterable[experience_pb2.ColumnSchema]) -> list[str]:
    return [schema.name for schema in schemas]
