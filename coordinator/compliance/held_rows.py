"""Rows that a server of experience holds: references to them, and what a fetch of them is sent."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from rolemesh.rpc.errors import InvalidRequestError, NotFoundError, OutOfRangeError
from rolemesh.rpc.experience.columns import Columns, encode
from rolemesh.v1 import experience_pb2


class HeldRows(dict[str, Columns]):
    """Columns by the id of the shard that they are."""

    def refer(
        self,
        columns: Columns,
        run_id: str,
        step: int,
        *,
        role: str,
        address: str,
        shards: Sequence[Sequence[int]] = (),
    ) -> experience_pb2.ExperienceRef:
        """Holds rows from now on, and returns their reference.

        Args:
            columns: Of the rows.
            run_id: Run to which they belong.
            step: Step to which they belong.
            role: Role of the server.
            address: Where it serves them.
            shards: Rows of each shard, ascending; without shards, one shard has all.
        """
        group = experience_pb2.ColumnGroup(
            columns=[column.schema for column in encode(columns)[0].columns]
        )
        for rows in shards or (range(columns.num_rows),):
            part = columns.select(list(rows))
            shard = group.shards.add(
                experience_id=f"{role}-{uuid.uuid4().hex}",
                row_start=rows[0],
                num_rows=len(rows),
                rows=rows if shards else (),
                address=address,
                role=role,
                num_bytes=encode(part)[0].num_bytes,
            )
            if "tokens" in part:
                shard.row_tokens.extend(part["tokens"].lengths().tolist())
            self[shard.experience_id] = part
        return experience_pb2.ExperienceRef(
            run_id=run_id, step=step, num_rows=columns.num_rows, groups=[group]
        )

    def fetched(
        self, request: experience_pb2.FetchRequest
    ) -> tuple[experience_pb2.PayloadHeader, Iterator[bytes]]:
        """The header and the chunks that answer a fetch.

        Raises:
            NotFoundError: EXPERIENCE_NOT_FOUND or COLUMN_NOT_FOUND.
            InvalidRequestError: ROWS_AMBIGUOUS: rows and a range of rows are given.
            OutOfRangeError: ROWS_OUT_OF_RANGE.
        """
        held = self.get(request.experience_id)
        if held is None:
            raise NotFoundError(
                f"no experience {request.experience_id} is held here", reason="EXPERIENCE_NOT_FOUND"
            )
        missing = [name for name in request.columns if name not in held]
        if missing:
            raise NotFoundError(f"no columns {missing} are held here", reason="COLUMN_NOT_FOUND")
        if request.rows and (request.row_start or request.row_stop):
            raise InvalidRequestError("give rows, or a range of them", reason="ROWS_AMBIGUOUS")
        rows = list(request.rows) or list(range(request.row_start, request.row_stop))
        if any(not 0 <= row < held.num_rows for row in rows):
            raise OutOfRangeError(
                f"rows of 0 to {held.num_rows - 1} are held here", reason="ROWS_OUT_OF_RANGE"
            )
        names = list(request.columns) or list(held)
        return encode(Columns({name: held[name] for name in names}).select(rows))
