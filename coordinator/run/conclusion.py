"""Conclusion of a run: how it ended, in the store, in its files and for its trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rolemesh.coordinator.api.reads.plans import usual
from rolemesh.coordinator.dataflow.errors import RunAbortedError
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.run.attempts.attempt import Attempt
from rolemesh.coordinator.run.checks.footprint import gib
from rolemesh.coordinator.run.folders.summary import (
    RunSummary,
    coordinator_versions,
    mean_rewards,
)
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.reporting.events import Recovered
from rolemesh.coordinator.run.reporting.records import end_run, planned_steps
from rolemesh.coordinator.run.saving.best import BestOfRun
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.store import RunState
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.transport.slots.slot_files import KEPT_UNHELD_S, memory_of_slots

TRACKER_DEADLINE_S = 15.0
"""Longest wait at the end of a run for its trackers to send what they have."""

QUICK_END_S = 2.0
"""The same when the run has failed or was aborted."""


class Conclusion:
    """Writes how a run ended, as far as that still works. Owner: the coordinator's loop."""

    def __init__(self, parts: RunParts, git_commit: str | None) -> None:
        """Begins to measure the run's time.

        Args:
            parts: Of the run.
            git_commit: Of the code that makes it; None where that is not known.
        """
        self._parts = parts
        self._git_commit = git_commit
        self._started = now()

    async def write(
        self,
        failure: BaseException | None,
        attempt: Attempt,
        recovered: Sequence[Recovered],
    ) -> RunSummary:
        """Writes record, files and trackers.

        A failure in here is raised only if there was none before. Otherwise the first failure is
        reported: it may have been the same full disk or lost store.

        Args:
            failure: What ended the run; None where it came to its end.
            attempt: The last one.
            recovered: What the run has survived.
        """
        parts, mesh = self._parts, attempt.mesh
        summary = self._summary(failure, attempt, recovered)
        state, reason = summary.state, summary.failure

        async def write_record() -> None:
            await end_run(
                parts.store,
                parts.run_id,
                state,
                reason,
                parts.events,
                attempt.epoch,
                early_stop=summary.early_stop,
            )
            for connection in mesh.connections.values():
                await parts.store.remove_service(connection.role, connection.address)

        async def write_files() -> None:
            try:
                parts.writer.close()
            finally:
                summary.write()

        # Losses are reported before the run counts as ended.
        await parts.writer.finish_trackers(
            state, TRACKER_DEADLINE_S if failure is None else QUICK_END_S
        )
        unwritten: StateStoreError | OSError | None = None
        # The record first: the store may be on another disk than the folder.
        for write in (write_record, write_files):
            try:
                await write()
            except (StateStoreError, OSError) as error:
                parts.observer.on_event(f"the end of the run could not be recorded: {error}")
                unwritten = unwritten or error
        if failure is None and unwritten is not None:
            raise unwritten
        return summary

    def _summary(
        self, failure: BaseException | None, attempt: Attempt, recovered: Sequence[Recovered]
    ) -> RunSummary:
        parts = self._parts
        recipe, progress = parts.recipe, parts.progress
        best, early_stop = BestOfRun(recipe.run, progress), ""
        if failure is None:
            if progress.step < recipe.run.steps:
                early_stop = best.early_stop()
            # A client says that it is done by stopping the run.
            is_done = parts.algorithm is not None and (
                progress.step == recipe.run.steps or bool(early_stop)
            )
            state = RunState.SUCCEEDED if is_done else RunState.STOPPED
        elif isinstance(failure, RunAbortedError | asyncio.CancelledError):
            state = RunState.STOPPED
        else:
            state = RunState.FAILED
        connections = attempt.mesh.connections.items()
        roles = {role: known.capabilities.versions for role, known in connections}
        first, last = mean_rewards(progress.records)
        is_after = progress.after is not None and progress.after.step == progress.step
        return RunSummary(
            run_id=parts.run_id,
            name=recipe.run.name,
            state=state,
            failure="" if failure is None else str(failure) or type(failure).__name__,
            seed=recipe.run.seed,
            steps=progress.step,
            num_steps=planned_steps(recipe),
            held_out_before=progress.before,
            held_out_after=progress.after if is_after else None,
            best=best.saved(parts.directory / CHECKPOINTS_FOLDER),
            early_stop=early_stop,
            mean_reward_first_steps=first,
            mean_reward_last_steps=last,
            tokens=int(sum(record.get("tokens", 0) for record in progress.records)),
            seconds=now() - self._started,
            seconds_by_phase=dict(progress.seconds),
            planned_step_s=None if recipe.plan is None else recipe.plan.step_s,
            measured_step_s=usual(
                {
                    int(record["step"]): record["time/step"]
                    for record in progress.records
                    if "time/step" in record
                }
            ),
            recoveries=tuple(recovered),
            tuning=None if parts.tuning is None else parts.tuning.to_dict(),
            versions={"coordinator": coordinator_versions(), **roles},
            git_commit=self._git_commit,
            coordinator_traffic=asdict(parts.traffic.total),
            directory=parts.directory,
            model_directory=attempt.loop.model_directory,
        )


def tell_of_kept_cuts(
    observer: RunObserver, run_id: str, directory: Path, memory: Path = SHM_DIRECTORY
) -> None:
    """Says how much memory of this host an ended run still takes, and until when.

    A run that succeeds takes none: its services drop their cuts.

    Args:
        observer: Is told.
        run_id: Of the run.
        directory: Its folder.
        memory: Where the services of this host keep cuts.
    """
    try:
        kept = memory_of_slots(run_id, memory)
    except FileNotFoundError:
        return  # A host without shared memory has no cuts.
    if kept:
        observer.on_event(
            f"{gib(kept)} of cuts stay in memory, so that `rolemesh train --resume {directory}` "
            f"loses no step; services that start after {KEPT_UNHELD_S / 3600:.0f} hours remove "
            f"them, and `rolemesh cuts --prune {run_id}` does it at once"
        )
