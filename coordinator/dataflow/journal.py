"""The exactly-once record of a run: keys of operations, and what was acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rolemesh.coordinator.state.store import JournalEntry, StateStore
from rolemesh.v1 import operation_pb2

COMMIT_OPERATION = "step.commit"
"""Journal entry after which a step counts as made."""

LOG_OPERATION = "client.log"
"""Journal entry with the record of a step that a client made, under the epoch that the client has
from AttachRun. Steps ascend, but for a rewind before it."""


class Journal:
    """Names operations and records their acknowledgement under the epoch of this coordinator.

    Keys are made in call order, which the algorithm fixes: a replay of the step makes the same
    ones. Every append is fenced by the store.

    Owner: one asyncio loop.
    """

    def __init__(
        self,
        store: StateStore,
        run_id: str,
        epoch: int,
        lineage_of: Callable[[int], int] = lambda step: 0,
    ) -> None:
        """Begins without operations.

        Args:
            store: Keeps the entries.
            run_id: The run.
            epoch: Of this coordinator.
            lineage_of: Says of a step how often the run had gone back when it came to it.
        """
        self.run_id = run_id
        self.epoch = epoch
        self._store = store
        self._lineage_of = lineage_of
        self._sequences: Counter[tuple[int, str]] = Counter()

    def next_key(self, step: int, operation: str) -> operation_pb2.OperationKey:
        """The key of the next operation of this name in this step."""
        sequence = self._sequences[step, operation]
        self._sequences[step, operation] += 1
        return operation_pb2.OperationKey(
            run_id=self.run_id,
            fencing_epoch=self.epoch,
            step=step,
            operation=operation,
            sequence=sequence,
            lineage=self._lineage_of(step),
        )

    async def acknowledge(self, key: operation_pb2.OperationKey, result: Mapping[str, Any]) -> None:
        """Records that the operation was answered."""
        await self._append(key.step, key.operation, key.sequence, result)

    async def note(self, step: int, operation: str, result: Mapping[str, Any]) -> None:
        """Records something of a step that no service was asked for; a repeat changes nothing."""
        await self._append(step, operation, 0, result)

    async def commit(self, step: int, result: Mapping[str, Any]) -> None:
        """Records that the step was made: what follows is another step."""
        await self._append(step, COMMIT_OPERATION, 0, result)
        for made in [key for key in self._sequences if key[0] < step]:
            del self._sequences[made]

    async def _append(
        self, step: int, operation: str, sequence: int, result: Mapping[str, Any]
    ) -> None:
        await self._store.append_journal(
            self.run_id,
            JournalEntry(
                epoch=self.epoch, step=step, operation=operation, sequence=sequence, result=result
            ),
        )
