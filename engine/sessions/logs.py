"""The last of what an agent writes while it plays a trajectory, for people."""

from __future__ import annotations

import threading

from rolemesh.engine.messages import harmless

MAX_LOG_BYTES = 16 << 10
"""Most bytes, as UTF-8, that are kept of a trajectory's log."""

CUT = "[earlier output is left out]\n"
"""Stands before what is left of a longer text."""


def last_of(text: str, most_bytes: int, *, is_cut: bool = False) -> str:
    """The end of a text, with CUT before it if that is not all of it.

    Args:
        text: Without lone surrogates, as `harmless` gives it.
        most_bytes: Most bytes of the result as UTF-8, more than CUT has.
        is_cut: Whether its beginning is missing already.
    """
    encoded = text.encode()
    if len(encoded) <= most_bytes and not is_cut:
        return text
    kept = encoded[-(most_bytes - len(CUT)) :]
    return CUT + kept.decode(errors="ignore")


class AgentLog:
    """The last MAX_LOG_BYTES of what one trajectory's agent writes. Any thread may use it.

    Example: of 20 KiB that a program prints, the text has CUT and the last 16 KiB less that.
    """

    def __init__(self) -> None:
        """Begins empty."""
        self._lock = threading.Lock()
        self._tail = b""
        self._is_cut = False

    def take(self, part: bytes | str) -> None:
        """Adds what was written: bytes as they came, or text."""
        if isinstance(part, str):
            # Lone surrogates, which JSON may hold, are no UTF-8.
            part = part.encode(errors="replace")
        with self._lock:
            whole = self._tail + part[-MAX_LOG_BYTES - 1 :]
            self._is_cut |= len(whole) > MAX_LOG_BYTES
            self._tail = whole[-MAX_LOG_BYTES:]

    def text(self) -> str:
        """What is left, harmless, at most MAX_LOG_BYTES as UTF-8."""
        with self._lock:
            tail, is_cut = self._tail, self._is_cut
        return last_of(harmless(tail.decode(errors="replace")), MAX_LOG_BYTES, is_cut=is_cut)
