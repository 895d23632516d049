"""What people are told of the session beside each of its rows: a text column of the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolemesh.engine.sessions.session import Branch, Session

MAX_CALLS = 1024
"""Calls that are told of a row, and calls of its session that are in no row; the first ones."""


def told_rows(
    session: Session, branches: Sequence[Branch], *, attempts: int, log: str
) -> list[str]:
    """A JSON object for each row of a session, in the order of its branches.

    Args:
        session: The session, which has ended.
        branches: Its branches that are rows.
        attempts: How often the trajectory was begun.
        log: Last of what its agent wrote. It stands in the first row alone: once is enough.

    Returns:
        `branch` and `num_branches` of the row; `attempts`; `calls` of the branch in order; in the
        first row also `left_out`, the calls that no row has, and `log`. A call has `number`,
        `num_added_tokens` of its prompt behind the call before (of the first: its whole prompt),
        `num_sampled_tokens`, and `use`: "trained" in this row, "shared" with an earlier row, which
        trains it, or "untrained", kept out by its caller.

    Example: calls 0 and 1 in the first row, calls 0 and 2 in the second: there call 0 is "shared".
    """
    seen: set[int] = set()
    rows = []
    for number, branch in enumerate(branches):
        told: dict[str, Any] = {
            "branch": number,
            "num_branches": len(branches),
            "attempts": attempts,
            "calls": [_call(session, one, seen) for one in branch.calls[:MAX_CALLS]],
        }
        seen.update(branch.calls)
        rows.append(told)
    if rows:
        left = [call.number for call in session.calls if call.number not in seen]
        rows[0] |= {"left_out": [_call(session, one, seen) for one in left[:MAX_CALLS]], "log": log}
    return [json.dumps(told) for told in rows]


def _call(session: Session, number: int, seen: set[int]) -> dict[str, Any]:
    call = session.calls[number]
    use = "trained"
    if not call.is_trained:
        use = "untrained"
    elif number in seen:
        use = "shared"
    return {
        "number": number,
        "num_added_tokens": len(call.added_tokens),
        "num_sampled_tokens": len(call.sampled_tokens),
        "use": use,
    }
