"""When a run saves its trained roles for good: in the background, from cuts, wherever that can be.

Without cuts, and when a user or the end of the run asks for it, the run waits for the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.saving.checkpoints import Checkpoints
from rolemesh.coordinator.run.saving.cut_pace import CutPace
from rolemesh.coordinator.run.saving.cuts import Cuts
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.rpc.errors import CapacityError, NotFoundError, RolemeshError


class DurableCheckpoints:
    """Saves cuts and checkpoints of a run's steps. Owner: the coordinator's loop.

    Invariant: no role saves a cut in the place of one whose checkpoint is not whole yet. So a
    checkpoint that a failure interrupts can be written by the next attempt, and at most one waits
    for the one before it: none is left out because a disk is slow.

    Example: while the checkpoint of step 20 is written, steps 21 and 22 are made; the cut of step
    22 is saved once the checkpoint is whole.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        cuts: Cuts,
        pace: CutPace,
        progress: RunProgress,
        observer: RunObserver,
        events: EventLog,
        *,
        every: int,
        best: Callable[[], int | None],
        phase: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        """Prepares.

        Args:
            checkpoints: On disk.
            cuts: What they are written from.
            pace: Says which steps have one. A step whose checkpoint is due has one, too.
            progress: What the run has reached.
            observer: Is told of a checkpoint that is left out.
            events: Get those that are whole.
            every: Steps from one checkpoint to the next; 0: none is due before the end.
            best: Says which step is the best so far, which is always due; None: no step is.
            phase: Counts time that the run waits, by its name and what the run does.
        """
        self._checkpoints = checkpoints
        self._cuts = cuts
        self._pace = pace
        self._progress = progress
        self._observer = observer
        self._events = events
        self._every = every
        self._best = best
        self._phase = phase
        self._writing: dict[int, asyncio.Task[None]] = {}
        """By step, oldest first. What has ended stays until it was waited for, for its error."""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(not task.done() for task in self._writing.values())

    async def save_cut(self, step: int) -> float | None:
        """Saves the cuts of a step that is to have them, once no checkpoint needs those replaced.

        Returns:
            Seconds for which they have held the run up: the call, without the wait for checkpoints,
            and what roles have waited for the copies of the cut before. None: it has no cut.

        Raises:
            RolemeshError: A role failed.
        """
        if not self._cuts.is_on or not (self._pace.is_due(step) or self._is_due(step)):
            return None
        await self._settle([known for known in self._writing if known != self._cuts.newest])
        started = now()
        waited_s = await self._cuts.save(step)
        self._pace.saved(step)
        return now() - started + waited_s

    async def save_due(self) -> None:
        """Saves the newest step if its turn has come: begins to, where it has a cut.

        Raises:
            RolemeshError: A role failed.
        """
        step = self._progress.step
        if not self._is_due(step):
            return
        if self._cuts.newest == step:
            self._begin(step)
        else:
            await self.save_now()

    async def save_owed(self) -> None:
        """Begins what the attempt before was to save, and has not.

        That is what is due of the cuts that are left. Where the cut of a due checkpoint is gone,
        the newest step takes its place.

        Raises:
            RolemeshError: A role failed.
        """
        newest, there = self._progress.step, set(self._checkpoints.committed())
        if not self._cuts.is_on or not newest:
            return await self.save_due()
        left = await self._cuts.known() - there
        owed = [step for step in sorted(left) if step <= newest and self._is_due(step)]
        last_due = newest - newest % self._every if self._every else 0
        if not owed and last_due > max(there, default=0):
            owed = [newest]
        for step in owed:
            self._begin(step)

    async def save_now(self, *, is_wished: bool = False) -> None:
        """Saves the newest step, after all that is written in the background.

        Args:
            is_wished: Whether a user asked for it, who is told of it in any case.

        Raises:
            CapacityError: The disk has no room, and the run relies on the checkpoint.
            RolemeshError: A role failed.
        """
        await self._settle(list(self._writing))
        step = self._progress.step
        is_new = step not in self._checkpoints.committed()
        try:
            with self._phase("checkpoint", f"checkpoint of step {step}"):
                folder = await self._checkpoints.save(step, self._progress.to_dict(step))
        except CapacityError as error:
            # Cuts do for a failure, but not for the end of the run, which drops them.
            if not (is_wished and self._cuts.is_on):
                raise
            self._left_out(step, error)
            return
        if is_new or is_wished:
            await self._saved(folder)

    async def give_up(self) -> None:
        """Stops the checkpoints that are being written: the attempt ends, or the run goes back.

        What is not whole yet does not count. Roles write on until the next attempt attaches to
        them, which waits for their end.
        """
        tasks = list(self._writing.values())
        self._writing.clear()
        for task in tasks:
            task.cancel()
        # What failed of them failed with the attempt.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def remove_after(self, step: int) -> None:
        """Removes checkpoints of later steps: they belong to a lineage that has ended."""
        await self.give_up()
        await self._checkpoints.remove_after(step)

    def _is_due(self, step: int) -> bool:
        is_turn = self._every > 0 and step > 0 and step % self._every == 0
        return is_turn or step == self._best()

    def _begin(self, step: int) -> None:
        before = set(self._writing.values())
        # The run adds to its progress meanwhile.
        state = self._progress.to_dict(step)

        async def write() -> None:
            if before:
                await asyncio.wait(before)
            try:
                folder = await self._checkpoints.save(step, state, from_cut=True)
            except (CapacityError, NotFoundError) as error:
                self._left_out(step, error)
            else:
                await self._saved(folder)

        self._writing[step] = asyncio.create_task(write())

    async def _settle(self, steps: Iterable[int]) -> None:
        """Returns once checkpoints are written, or left out; raises any other error of theirs."""
        for step in steps:
            with self._phase("checkpoint", f"checkpoint of step {step}"):
                await asyncio.shield(self._writing[step])
            del self._writing[step]

    async def _saved(self, folder: Path) -> None:
        self._events.checkpoint_saved(str(folder))
        await self._events.flush()

    def _left_out(self, step: int, error: RolemeshError) -> None:
        self._observer.on_event(f"the checkpoint of step {step} is left out: {error.message}")
