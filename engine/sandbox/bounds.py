"""Bounds that worker processes of all kinds share: the time of their load, and what they print."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 300.0
"""Longest import of the user's code, which may load a model."""

MAX_LOGGED_BYTES = 16 << 10
"""Most bytes of one call's output that go to the service's log."""

_TAIL_BYTES = 2048


class Output:
    """What a worker process prints: the first bytes of each call go to the log, all are counted.

    One thread calls `begin_call` and another one may call `take` and `end`.

    Example: a call prints 20 KiB. 16 KiB are logged with the name of the code before each line,
    and one more line says that there is more.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        """Takes the name of the code for the log, and the most bytes that one call may print."""
        self.is_too_much = False
        """Whether a call has printed more than it may."""
        self._name, self._max_bytes = name, max_bytes
        # Each is written by one thread only: what a call has printed is the difference.
        self._total = self._before = 0
        self._tail = b""
        self._line = b""
        """The beginning of a line whose end has not come: a program may write word by word."""

    def begin_call(self) -> None:
        """Counts from here on for a new call."""
        self._before = self._total

    def take(self, part: bytes) -> None:
        """Logs the lines that the process printed, and counts its bytes."""
        printed = self._total - self._before
        room = MAX_LOGGED_BYTES - printed
        if room > 0:
            *lines, self._line = (self._line + part[:room]).split(b"\n")
            for line in lines:
                self._log(line)
            if len(part) > room:
                self.end()
                logger.info("%s prints more in this call, which is not logged", self._name)
        self._tail = (self._tail + part)[-_TAIL_BYTES:]
        self._total += len(part)
        self.is_too_much |= printed + len(part) > self._max_bytes

    def end(self) -> None:
        """Logs a last line that has no end."""
        if self._line:
            self._log(self._line)
        self._line = b""

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        shown = "".join(letter if letter.isprintable() else " " for letter in text)
        logger.info("%s prints: %s", self._name, shown)

    @property
    def last_words(self) -> str:
        """What this call printed last, 2048 bytes at most."""
        printed = min(self._total - self._before, len(self._tail))
        return self._tail[len(self._tail) - printed :].decode(errors="replace").strip()
