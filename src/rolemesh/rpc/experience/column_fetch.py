"""Pulls columns of referenced experience over gRPC, from every rank that holds rows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import CapacityError, DataLossError, InvalidRequestError
from rolemesh.rpc.experience.columns import ColumnData, Columns, decode
from rolemesh.rpc.experience.payload import layout_of
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.pull import Answer, fetch_request, pull_rows
from rolemesh.rpc.experience.references import by_group, names_of, order_of, place
from rolemesh.rpc.together import together
from rolemesh.v1 import experience_pb2

MAX_FETCH_BYTES = 1 << 30
"""Unless told otherwise, the most bytes that one fetch allocates, over all ranks."""

_SHARDS_AT_ONCE = 8


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
    names = list(columns) or names_of(reference)
    try:
        schemas_by_group = by_group(reference, names)
    except ColumnMissingError as error:
        raise InvalidRequestError(
            str(error), reason="COLUMN_MISSING", metadata={"column": error.column}
        ) from error
    distinct = sorted(set(wanted))
    free_bytes = max_bytes
    at_once = asyncio.Semaphore(_SHARDS_AT_ONCE)

    async def pull_shard(
        shard: experience_pb2.Shard,
        schemas: Sequence[experience_pb2.ColumnSchema],
        positions: Sequence[int],
    ) -> Columns:
        async def take(answer: Answer[experience_pb2.PayloadHeader]) -> Columns | None:
            nonlocal free_bytes
            header = answer.header
            layout_of(header)
            came = [column.schema for column in header.columns]
            if came != list(schemas) or header.num_rows != len(positions):
                raise PayloadMalformedError(
                    f"{len(positions)} rows were asked for, but {header.num_rows} of "
                    f"{[schema.name for schema in came]} came, or of other types"
                )
            free_bytes -= header.num_bytes
            if free_bytes < 0:
                return None
            payload = bytearray(header.num_bytes)
            await answer.read_into(payload)
            return decode(header, payload)

        request = fetch_request(shard, [schema.name for schema in schemas], positions)
        async with at_once:
            channel = channel_to(shard.address)
            pulled = await pull_rows(channel, shard, request, take, timeout_s=timeout_s)
        if pulled is None:
            # A bound of this side: the producer has no part in it.
            raise CapacityError(
                f"the columns asked for have more than {max_bytes} bytes: fetch fewer rows or "
                "columns at a time, or raise max_bytes",
                reason="FETCH_TOO_LARGE",
            )
        return pulled

    async def pull_group(
        group: experience_pb2.ColumnGroup, schemas: Sequence[experience_pb2.ColumnSchema]
    ) -> dict[str, ColumnData]:
        try:
            found = place(group.shards, distinct)
        except ValueError as error:
            raise InvalidRequestError(str(error), reason="REFERENCE_INVALID") from error
        parts = await together(pull_shard(shard, schemas, at) for shard, at, _ in found)
        order = np.asarray(order_of(found))[np.searchsorted(distinct, wanted)]
        return {
            schema.name: ColumnData.concat([part[schema.name] for part in parts]).select(order)
            for schema in schemas
        }

    try:
        groups = await together(
            pull_group(reference.groups[index], schemas)
            for index, schemas in schemas_by_group.items()
        )
    except PayloadMalformedError as error:
        raise DataLossError(str(error), reason="PAYLOAD_MALFORMED") from error
    fetched = {name: column for group in groups for name, column in group.items()}
    return Columns({name: fetched[name] for name in names})
