"""Answers of a step that can be made again: by which calls, and which of them are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from rolemesh.coordinator.dataflow.futures import Node, NodeState, Outcome
from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError

LOSS_S = 6.0
"""When a call cannot read from a service, its loss is known after at most this long."""

Answer = asyncio.Future[Outcome]
Run = Callable[[], Awaitable[Outcome]]
Start = Callable[[Node, Run], Answer]
"""Makes a node's call, as a task of the step."""


class Lineage:
    """What lost answers of one step are made again from. Owner: one asyncio loop.

    Example: the reward has answered, and is then lost. The next call that reads its
    answer has it made again by the new process, once; where no call reads it, none is made.
    """

    def __init__(self, replaceable: Collection[str]) -> None:
        """Prepares.

        Args:
            replaceable: Services that may be replaced while the step goes on.
        """
        self._replaceable = replaceable
        self._calls: dict[Answer, tuple[Node, Run]] = {}
        self._lost: set[Answer] = set()
        """Answers whose experience is gone."""
        self._remade: dict[Answer, Answer] = {}
        """What has taken the place of a lost answer."""
        self._loss = asyncio.Event()
        """Set, and replaced by a new one, when a service is lost."""

    def add(self, answer: Answer, node: Node, run: Run) -> None:
        """Notes the call of an answer."""
        self._calls[answer] = node, run

    def lost(self, service: str) -> None:
        """Told that a service is lost, with all experience that it held."""
        self._lost.update(
            answer
            for answer, (node, _) in self._calls.items()
            if node.service == service and node.state is NodeState.DONE
        )
        self._loss.set()
        self._loss = asyncio.Event()

    def newest(self, answer: Answer, start: Start) -> Answer:
        """The answer that takes the place of one that is lost; else the same."""
        (current,) = self.current((answer,))
        if current not in self._lost:
            return current
        node, run = self._calls[current]
        again = start(node, run)
        self.add(again, node, run)
        self._remade[current] = again
        return again

    def current(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers that count by now, lost or not."""
        found = []
        for answer in answers:
            while answer in self._remade:
                answer = self._remade[answer]
            found.append(answer)
        return found

    async def explains(self, error: RolemeshError, read: Sequence[Answer]) -> bool:
        """Whether a call failed since an answer that it reads is lost.

        A reader may notice that before it is known, so this waits for LOSS_S seconds.
        """
        is_silence = isinstance(error, UnavailableError | DeadlineError)
        if not is_silence and error.reason != "EXPERIENCE_NOT_FOUND":
            return False
        makers = {self._calls[answer][0].service for answer in read if answer in self._calls}
        if makers.isdisjoint(self._replaceable):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOSS_S):
                while self._lost.isdisjoint(read):
                    await self._loss.wait()
                return True
        return False
