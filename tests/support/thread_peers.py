"""Threads that play ranks which write and read folders together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rolemesh.engine.parallel.agreement import Peers

WAIT_S = 60.0
"""After this a test is stuck: a rank waits for one that has left."""


def run_peers(size: int, work: Callable[[Peers], Any]) -> list[Any]:
    """Runs `work` on each of `size` ranks; what each returned or raised, by rank."""
    barrier = threading.Barrier(size, timeout=WAIT_S)
    board: list[str] = [""] * size

    def play(rank: int) -> Any:
        def gather(facts: Any) -> list[Any]:
            board[rank] = json.dumps(facts)
            barrier.wait()
            found = [json.loads(text) for text in board]
            barrier.wait()
            return found

        try:
            return work(Peers(rank, size, gather))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(play, range(size)))
