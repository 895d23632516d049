"""Bounds that worker processes of all kinds share: the time of their load, and what they print."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 300.0
"""Longest import of the user's code, which may load a model."""

MAX_LOGGED_BYTES = 16 << 10
"""Most bytes of one call's output that go to the service's log."""

_TAIL_BYTES = 2048


class Output:
    """What a worker process prints: the first bytes of each call go to the log, all are counted.

    Several calls may be in flight at once, and nothing tells whose bytes are whose. So each call
    that begins adds its share to one bound for all, which never exceeds the shares of as many calls
    as are in flight. Calls that keep to theirs never exceed it together, and a process can print
    no more than that many shares before it shows.

    Several threads may call `begin_call`, and another one `take` and `end`.

    Example: a call prints 20 KiB. 16 KiB are logged with the name of the code before each line,
    and one more line says that there is more.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        """Takes the name of the code for the log, and the most bytes that one call may print."""
        self.is_too_much = False
        """Whether a call has printed more than it may."""
        self._name, self._max_bytes = name, max_bytes
        self._lock = threading.Lock()
        """Of the four numbers that follow."""
        self._total = self._before = 0
        self._room, self._room_logged = max_bytes, MAX_LOGGED_BYTES
        """Bytes that may still come before it is too much, and that are still logged."""
        self._tail = b""
        self._line = b""
        """The beginning of a line whose end has not come: a program may write word by word."""

    def begin_call(self, num_in_flight: int = 1) -> None:
        """Counts a new call.

        Args:
            num_in_flight: Calls in flight now, this one with them.
        """
        with self._lock:
            if num_in_flight == 1:
                self._before = self._total
            self._room = min(self._room + self._max_bytes, self._max_bytes * num_in_flight)
            self._room_logged = min(
                self._room_logged + MAX_LOGGED_BYTES, MAX_LOGGED_BYTES * num_in_flight
            )

    def take(self, part: bytes) -> None:
        """Logs the lines that the process printed, and counts its bytes."""
        with self._lock:
            room = self._room_logged
            self._room_logged = max(0, room - len(part))
            self._room -= len(part)
            self.is_too_much |= self._room < 0
            self._tail = (self._tail + part)[-_TAIL_BYTES:]
            self._total += len(part)
        if room > 0:
            *lines, self._line = (self._line + part[:room]).split(b"\n")
            for line in lines:
                self._log(line)
            if len(part) > room:
                self.end()
                logger.info("%s prints more in this call, which is not logged", self._name)

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
        """What was printed last since no call was in flight, 2048 bytes at most."""
        with self._lock:
            printed = min(self._total - self._before, len(self._tail))
        return self._tail[len(self._tail) - printed :].decode(errors="replace").strip()
