"""Calls of environments that go on beside the sampler, many at once."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolemesh.engine.environments.base import EnvironmentFailedError

MAX_AT_ONCE = 64
"""Calls of a rank that go on at a time; more wait for their turn."""

QUICK_S = 0.5
"""Answers that come within this time are waited for before the next decoding step. So which rows
are decoded together depends on no clock where environments are quick, and neither do the bits."""

IDLE_S = 0.1
"""How long an answer is waited for where there is nothing to sample, before weights may come."""

MAX_WAITS = 2
"""How often a generation waits so long in vain; its environments are slow then, and each answer is
taken as it comes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call."""

    row: int
    said: Any = None
    error: BaseException | None = None
    """What it raised, user's code included; None where it answered."""


class EnvironmentCalls:
    """Calls that begin on the sampler's thread and are answered there. Owned by that thread.

    A call runs on a daemon thread, so that one that never ends keeps no process alive. Built-in
    environments answer at once, where they are asked.

    Example::

        calls = EnvironmentCalls(are_at_once=False)
        calls.begin(3, lambda: environment.step("2+2"))
        calls.answers(is_idle=True)  # [Answer(row=3, said=Observation(...))]
    """

    def __init__(self, *, are_at_once: bool, timeout_s: float | None = None) -> None:
        """Prepares.

        Args:
            are_at_once: Whether calls are made where they begin.
            timeout_s: How long a call may take; one that takes longer is answered by an error here
                and goes on unheard. None: No bound.
        """
        self._are_at_once = are_at_once
        self._timeout_s = timeout_s
        self._came: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._begun: dict[int, float] = {}
        """When each call began that goes on, by row."""
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._new: set[int] = set()
        """Rows whose calls began since answers were asked for last."""
        self._num_vain = 0

    def begin(self, row: int, ask: Callable[[], Any]) -> None:
        """Makes a call.

        Args:
            row: Whose it is; a row has one at a time.
            ask: Returns what the environment says, or raises.
        """
        self._waiting.append((row, ask))
        self._start()

    def answers(self, *, is_idle: bool) -> list[Answer]:
        """What has come, by row.

        Args:
            is_idle: Whether there is nothing to sample, and so time to wait for an answer.
        """
        new, self._new = self._new, set()
        found: list[Answer] = []
        if new and self._num_vain < MAX_WAITS:
            until = time.monotonic() + QUICK_S
            while new & self._begun.keys() and self._hear(found, until - time.monotonic()):
                pass
            if new & self._begun.keys():
                self._num_vain += 1
        if is_idle and self._begun and not found:
            self._hear(found, IDLE_S)
        while self._hear(found, 0.0):
            pass
        return sorted([*found, *self._overdue()], key=lambda one: one.row)

    def _hear(self, found: list[Answer], within_s: float) -> bool:
        """Adds the next answer; False where none comes in time."""
        try:
            answer = self._came.get(timeout=within_s) if within_s > 0 else self._came.get_nowait()
        except queue.Empty:
            return False
        # One that was given up may still come.
        if self._begun.pop(answer.row, None) is not None:
            found.append(answer)
            self._start()
        return True

    def _start(self) -> None:
        while self._waiting and len(self._begun) < MAX_AT_ONCE:
            row, ask = self._waiting.popleft()
            self._begun[row] = time.monotonic()
            self._new.add(row)
            if self._are_at_once:
                self._answer(row, ask)
            else:
                threading.Thread(
                    target=self._answer, args=(row, ask), name=f"environment-{row}", daemon=True
                ).start()

    def _answer(self, row: int, ask: Callable[[], Any]) -> None:
        try:
            self._came.put(Answer(row, said=ask()))
        except BaseException as error:  # a user's code raises what it likes, SystemExit too
            self._came.put(Answer(row, error=error))

    def _overdue(self) -> list[Answer]:
        if self._timeout_s is None:
            return []
        now = time.monotonic()
        late = [row for row, began in self._begun.items() if now - began > self._timeout_s]
        for row in late:
            del self._begun[row]
        text = (
            f"gave no answer within {self._timeout_s:g} s: make it faster, or raise "
            "environment.timeout_s"
        )
        return [Answer(row, error=EnvironmentFailedError(text)) for row in late]
