"""Python's garbage collector in a coordinator: how seldom it looks."""

from __future__ import annotations

import gc

OBJECTS = 200_000
"""New containers between two looks at the youngest; Python's own number is 700. A thousand calls
that get ready in one instant make about 100,000, and none of them is garbage by then. When their
step has ended, reference counts free them all, so that a run hardly ever comes to a look."""


def collect_seldom() -> None:
    """Has the process look for cycles seldom, for as long as it lives.

    Nearly all that a coordinator makes is freed by reference counts. Looks in between took half of
    the time in which a thousand calls were sent (tests/benchmarks/dispatch.py). The price is memory
    for at most that many containers of cycles.
    """
    gc.set_threshold(OBJECTS)
