"""A run's record in the store, before and after its services: entered, and ended early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from pathlib import Path

from rolemesh.coordinator.api.messages import to_state
from rolemesh.coordinator.api.reads.plans import kept_plan
from rolemesh.coordinator.dataflow.errors import RunAbortedError
from rolemesh.coordinator.dataflow.loop.clock import unix_time
from rolemesh.coordinator.recipe.algorithm.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.state.errors import RunExistsError
from rolemesh.coordinator.state.store import RunRecord, RunState, StateStore
from rolemesh.coordinator.trackers.files import METRICS_FILE
from rolemesh.v1 import coordinator_pb2

SUMMARY_FILE = "summary.json"
"""In a run's folder: how it ended."""

_CHECKPOINTS = "checkpoints"
_OCCUPIED_NAMES = (METRICS_FILE, SUMMARY_FILE, _CHECKPOINTS)


def make_run_id(name: str) -> str:
    """A fresh id that sorts by time within a name."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def check_directory_is_free(directory: Path) -> None:
    """Raises ValueError when the folder holds a run already.

    A run that ended before its first step leaves nothing to go on with: its folder is free.
    """
    if _ended_without_a_step(directory):
        return
    for name in _OCCUPIED_NAMES:
        if (directory / name).exists():
            raise ValueError(
                f"run.directory: {directory} holds a run already (there is {name}): "
                "choose another folder, go on with that run (--resume), or move it aside "
                "(--from-start)"
            )


def clear_failed_start(directory: Path) -> None:
    """Removes what says of a folder that it holds a run, where that run ended without a step."""
    if _ended_without_a_step(directory):
        for name in (SUMMARY_FILE, METRICS_FILE):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (directory / _CHECKPOINTS).rmdir()


def _ended_without_a_step(directory: Path) -> bool:
    """Whether the folder's summary says of a run with steps of its own that it made none."""
    if next((directory / _CHECKPOINTS).glob("*"), None) is not None:
        return False
    try:
        told = json.loads((directory / SUMMARY_FILE).read_text())
        return bool(told["num_steps"] > 0 and told["steps"] == 0)
    except (OSError, ValueError, KeyError, TypeError):
        # No summary, or one of something else.
        return False


def planned_steps(recipe: Recipe) -> int:
    """Steps that the run will have; 0 where a client makes them."""
    return 0 if isinstance(recipe.algorithm, ExternalSpec) else recipe.run.steps


async def enter_run(store: StateStore, recipe: Recipe, run_id: str, directory: Path) -> None:
    """Enters a run that starts, unless it was entered for this folder before.

    Args:
        store: Store that gets the record.
        recipe: Recipe of the run.
        run_id: Its id.
        directory: Folder of its files, absolute.

    Raises:
        RunExistsError: A run of that id has other files, or is past its start.
    """
    record = _record(recipe, run_id, directory)
    try:
        await store.create_run(record)
    except RunExistsError:
        known = await store.get_run(run_id)
        if known.state is not RunState.STARTING or known.directory != record.directory:
            raise
        return
    await _tell_start(store, run_id)


async def enter_again(store: StateStore, recipe: Recipe, run_id: str, directory: Path) -> None:
    """Enters a run that goes on, whatever the store says of how it ended.

    Args:
        store: Store that gets the record, and has one unless it has lost its data.
        recipe: Recipe that the run goes on with.
        run_id: Its id.
        directory: Folder of its files, absolute.
    """
    record = _record(recipe, run_id, directory)
    try:
        await store.create_run(record)
    except RunExistsError:
        await store.update_run(
            run_id,
            state=RunState.STARTING,
            failure="",
            activity=record.activity,
            num_steps=record.num_steps,
            directory=record.directory,
            plan=record.plan,
            stop_requested=False,
        )
    await _tell_start(store, run_id)


def _record(recipe: Recipe, run_id: str, directory: Path) -> RunRecord:
    now = unix_time()
    return RunRecord(
        run_id=run_id,
        name=recipe.run.name,
        num_steps=planned_steps(recipe),
        directory=str(directory),
        created_at=now,
        updated_at=now,
        algorithm=recipe.algorithm.type,
        activity="services start",
        plan=kept_plan(recipe),
    )


async def _tell_start(store: StateStore, run_id: str) -> None:
    events = EventLog(store, run_id)
    events.state(coordinator_pb2.RUN_STATE_STARTING)
    await events.flush()


async def end_run(
    store: StateStore,
    run_id: str,
    state: RunState,
    failure: str,
    events: EventLog,
    epoch: int | None,
    *,
    early_stop: str = "",
) -> None:
    """Writes how a run ended: first the record, then the last event.

    A reader that gets the event of the end therefore finds the end in the record, too.

    Args:
        store: Of the run.
        run_id: Its id.
        state: How it ended.
        failure: Why it failed; empty otherwise.
        events: Get the end.
        epoch: Of the run, under which it is written; None where a client holds the newest.
        early_stop: Why it made fewer steps than planned, though it did not fail.
    """
    # Earlier notes must come before the event of the end.
    await events.flush()
    await store.update_run(run_id, epoch=epoch, state=state, failure=failure, activity=early_stop)
    events.state(to_state(state), failure)
    await events.flush()


async def end_abandoned(
    store: StateStore, run_id: str, error: BaseException, *, epoch: int | None = None
) -> None:
    """Ends a run whose process is gone, unless the record says already how it ended.

    Args:
        store: Of the run.
        run_id: Its id.
        error: What ended it.
        epoch: Of the coordinator that ends, which may have been replaced; None: the run is taken
            over.

    Raises:
        StaleEpochError: Another coordinator has taken the run.
    """
    record = await store.get_run(run_id)
    if record.state.is_final:
        return
    is_cancelled = isinstance(error, asyncio.CancelledError)
    reason = "ended before it had begun" if is_cancelled else str(error) or type(error).__name__
    if epoch is None:
        epoch = await store.next_epoch(run_id)
    await end_run(
        store,
        run_id,
        RunState.STOPPED if is_cancelled or isinstance(error, RunAbortedError) else RunState.FAILED,
        reason,
        EventLog(store, run_id, epoch),
        epoch,
    )
