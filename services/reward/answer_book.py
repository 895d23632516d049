"""The answers of outside rewards that one rank keeps in shared memory, beside the run's cuts."""

from __future__ import annotations

import logging

from rolemesh.engine.transport.slots import (
    NUM_LOGS,
    PAGE_BYTES,
    LogUnavailableError,
    SlotOwner,
    open_log,
)
from rolemesh.services.reward.outside.answers import AnswerLog, Answers
from rolemesh.v1 import operation_pb2

logger = logging.getLogger(__name__)


class AnswerBook:
    """A log for the step in progress and for each step whose cut may be there.

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
                descriptor = open_log(self.owner, index)
            except LogUnavailableError as error:
                self._is_off = True
                self._tell(str(error))
            else:
                self._logs[index] = AnswerLog(descriptor, PAGE_BYTES, self._tell)
        if self._is_off:
            return None
        self._logs[index].turn_to(key.step)
        return Answers(self._logs[index], key.step, (key.operation, key.sequence, key.lineage))

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
