"""The answers of outside rewards that one rank keeps in shared memory, beside the run's cuts."""

from __future__ import annotations

import dataclasses
import functools
import logging

from rolemesh.engine.transport.slots.slot_files import NUM_LOGS, PAGE_BYTES, SlotOwner
from rolemesh.engine.transport.slots.slots import (
    LogHeldError,
    LogUnavailableError,
    open_log,
    read_log,
)
from rolemesh.services.reward.outside.answers import AnswerLog, Answers
from rolemesh.v1 import operation_pb2

logger = logging.getLogger(__name__)


MAX_SERVICES = 16
"""Most services of a role on one host that keep answers."""


class AnswerBook:
    """A log for the step in progress and for each step whose cut may be there.

    Each of several services of the role writes logs of its own and reads those of the others: the
    call that one has made may be made again by another one.

    Owner: the compute thread. Invariant: the answers of a step go when the step
    NUM_LOGS steps later begins.
    """

    def __init__(self, owner: SlotOwner) -> None:
        """Prepares; opens nothing yet."""
        self.owner = owner
        self._logs: dict[int, AnswerLog] = {}
        self._has_told = False
        self._is_off = False

    def of_call(self, key: operation_pb2.OperationKey) -> Answers | None:
        """The answers of a call; None where shared memory cannot hold them.

        Args:
            key: Of the call. Its epoch does not count: a later attempt makes the same call.
        """
        index = key.step % NUM_LOGS
        if index not in self._logs and not self._is_off:
            try:
                self._logs[index] = self._opened(index)
            except LogUnavailableError as error:
                self._is_off = True
                self._tell(str(error))
        if self._is_off:
            return None
        log = self._logs[index]
        log.turn_to(key.step)
        for number in range(MAX_SERVICES):
            if number != log.number:
                other = dataclasses.replace(self.owner, number=number)
                log.take_in(number, functools.partial(read_log, other, index))
        return Answers(log, key.step, (key.operation, key.sequence, key.lineage))

    def _opened(self, index: int) -> AnswerLog:
        """The first log of an index that no other process holds."""
        for number in range(MAX_SERVICES):
            owner = dataclasses.replace(self.owner, number=number)
            try:
                return AnswerLog(open_log(owner, index), PAGE_BYTES, self._tell, number)
            except LogHeldError as error:
                held = error
        raise held

    def close(self) -> None:
        """Lets the files go; they stay."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "answers of outside rewards are not kept from here on, so that a step which is "
                "made again after a failure asks anew: %s",
                why,
            )
