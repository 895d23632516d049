"""Slices of data as requests name them: checked before anything is made of them."""

from __future__ import annotations

from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.limits import MAX_ROWS
from rolemesh.v1 import rollout_pb2


def check_slice(asked: rollout_pb2.PromptSlice, field: str, rows_each: int) -> None:
    """Refuses a slice that names no position, or more rows than a call may have.

    Positions run without end, so nothing else bounds a slice, and a row costs memory before the
    first one is finished.

    Args:
        asked: The slice.
        field: Of the request, e.g. "prompts".
        rows_each: Trajectories that each position becomes, at least 1.

    Raises:
        InvalidRequestError: SLICE_INVALID; names the field.
    """
    if asked.start < 0 or asked.count < 1:
        raise InvalidRequestError(
            f"{field} has start {asked.start} and count {asked.count}: start must be >= 0 and "
            "count >= 1",
            reason="SLICE_INVALID",
        )
    if asked.HasField("batch_start"):
        before = asked.start - asked.batch_start
        if asked.batch_start < 0 or not 0 <= before * rows_each <= MAX_ROWS:
            raise InvalidRequestError(
                f"{field}.batch_start is {asked.batch_start}: give a position up to {field}.start, "
                f"which is {asked.start}, and at most {MAX_ROWS} trajectories before it",
                reason="SLICE_INVALID",
            )
    if asked.count * rows_each > MAX_ROWS:
        raise InvalidRequestError(
            f"{field}.count is {asked.count}, which makes {asked.count * rows_each} trajectories: "
            f"ask for {MAX_ROWS} at most in one call",
            reason="SLICE_INVALID",
        )
