"""Answers of a step that can be made again: by which calls, and which of them are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.futures import Node, NodeState, Outcome
from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError

LOSS_S = 6.0
"""When a call cannot read from a service, the service's loss is known after at most this long."""

Answer = asyncio.Future[Outcome]


@dataclass(eq=False)
class _Call:
    """A call of the step, and how its lost answers are asked for again."""

    node: Node
    answers: tuple[Answer, ...]
    again: Callable[[], tuple[Answer, ...]]


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
        self._calls: list[_Call] = []
        self._call_of: dict[Answer, _Call] = {}
        self._lost: set[Answer] = set()
        """Answers whose experience is gone."""
        self._remade: dict[Answer, Answer] = {}
        """What has taken the place of a lost answer."""
        self._loss = asyncio.Event()
        """Set, and replaced by a new one, when a service is lost."""

    def add(
        self, node: Node, answers: tuple[Answer, ...], again: Callable[[], tuple[Answer, ...]]
    ) -> None:
        """Notes the call of some answers.

        Args:
            node: Of the call.
            answers: One, or one for each block.
            again: Has lost answers come once more: gives as many, those that take their places.
        """
        call = _Call(node, answers, again)
        self._calls.append(call)
        self._call_of.update(dict.fromkeys(answers, call))

    def lost(self, service: str) -> None:
        """Told that a service is lost, with all experience that it held."""
        for call in self._calls:
            answered = {answer for answer in call.answers if answer.done()}
            if call.node.service != service or not answered:
                continue
            self._lost |= answered
            if call.node.state is NodeState.RUNNING:
                # The next process makes the call from its start, with the blocks that were there.
                self._remake(call)
        self._loss.set()
        self._loss = asyncio.Event()

    def newest(self, answer: Answer) -> Answer:
        """The answer that takes the place of one that is lost; else the same."""
        (current,) = self.current((answer,))
        if current in self._lost:
            self._remake(self._call_of[current])
            (current,) = self.current((current,))
        return current

    def _remake(self, call: _Call) -> None:
        before, call.answers = call.answers, call.again()
        for old, new in zip(before, call.answers, strict=True):
            if new is not old:
                self._remade[old], self._call_of[new] = new, call

    def current(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers that count by now, lost or not."""
        found = []
        for answer in answers:
            while answer in self._remade:
                answer = self._remade[answer]
            found.append(answer)
        return found

    def forget(self) -> None:
        """Forgets all calls: the step has ended, and nothing is asked for again.

        How a call is made again refers to its step, which would otherwise be freed by the garbage
        collector alone.
        """
        self._calls.clear()
        self._call_of.clear()
        self._lost.clear()
        self._remade.clear()

    async def explains(self, error: RolemeshError, read: Sequence[Answer]) -> bool:
        """Whether a call failed since an answer that it reads is lost.

        A reader may notice that before it is known, so this waits for LOSS_S seconds.
        """
        is_silence = isinstance(error, UnavailableError | DeadlineError)
        if not is_silence and error.reason != "EXPERIENCE_NOT_FOUND":
            return False
        makers = {self._call_of[answer].node.service for answer in read if answer in self._call_of}
        if makers.isdisjoint(self._replaceable):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOSS_S):
                while self._lost.isdisjoint(read):
                    await self._loss.wait()
                return True
        return False
