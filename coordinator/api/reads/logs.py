"""Pieces of a run's logs, by name and place."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path

from rolemesh.coordinator.state.store import RunRecord
from rolemesh.rpc.errors import NotFoundError
from rolemesh.v1 import coordinator_pb2

_LONGEST_CHARACTER_BYTES = 4


def log_piece(
    record: RunRecord, log: str, offset: int, max_bytes: int
) -> coordinator_pb2.ReadLogResponse:
    """Reads a piece of a log of a run.

    Args:
        record: The run.
        log: Name of the log: the file's, without its ending.
        offset: First byte; a negative one counts from the end.
        max_bytes: Most bytes read.

    Raises:
        NotFoundError: LOG_NOT_FOUND.
    """
    folder = Path(record.directory) / "logs"
    logs = sorted(path.stem for path in folder.glob("*.log"))
    # Only names that the folder lists: a name must not be used as a path.
    if log not in logs:
        raise NotFoundError(
            f"run {record.run_id!r} has no log {log[:200]!r} in {folder}: there are "
            f"{', '.join(logs) or 'none'}",
            reason="LOG_NOT_FOUND",
            metadata={"run_id": record.run_id, "logs": json.dumps(logs)},
        )
    with (folder / f"{log}.log").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        file.seek(start)
        data = file.read(max_bytes)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    # If the end cuts a character, the next piece, if there is one, has it whole.
    is_whole = start + len(data) >= size or len(data) < _LONGEST_CHARACTER_BYTES
    text = decoder.decode(data, final=is_whole)
    num_pending = len(decoder.getstate()[0])
    return coordinator_pb2.ReadLogResponse(
        text=text, offset=start, next_offset=start + len(data) - num_pending, logs=logs
    )
