"""Reader of runs that have ended: it fills a store from their folders, for the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rolemesh.coordinator.api.messages import to_state
from rolemesh.coordinator.api.reads.plans import kept_plan
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.folders.evaluations import with_evaluations
from rolemesh.coordinator.run.folders.folder import (
    UNREADABLE,
    changed_at,
    is_run,
    read_config,
    read_json,
    read_status,
    told_damage,
)
from rolemesh.coordinator.run.folders.ownership import living_coordinator
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.results.expert_loads import read_expert_loads
from rolemesh.coordinator.run.results.metrics import GRAPHS_FILE
from rolemesh.coordinator.run.results.samples_file import KeptSample, read_samples
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE, RUN_FILE
from rolemesh.coordinator.state.errors import RunExistsError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream
from rolemesh.coordinator.trackers.files import METRICS_FILE, whole_lines
from rolemesh.rpc.samples.sessions import session_message
from rolemesh.v1 import coordinator_pb2

MAX_RUNS = 200
"""Runs that are read, the newest ones."""

MAX_STEPS_READ = 10_000
"""Steps of a run whose metrics are read; of more, every n-th."""


@dataclass(kw_only=True)
class ReadRuns:
    """What was found in a folder of runs."""

    store: MemoryStateStore = field(default_factory=MemoryStateStore)
    """Holds the runs, as the coordinators' stores did while they went on."""
    run_ids: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Folders that are not shown, each with the reason."""


async def read_runs(folder: Path) -> ReadRuns:
    """Reads a run, or the runs in a folder; of those that go on, nothing.

    Args:
        folder: Of one run, or of several; absolute.

    Raises:
        ValueError: There is no run that has ended.
    """
    folders = [folder] if is_run(folder) else _runs_in(folder)
    found = ReadRuns()
    for directory in folders[:MAX_RUNS]:
        try:
            found.run_ids.append(await _read_run(directory, found.store))
        except _LeftOutError as error:
            found.left_out.append(f"{directory}: {error}")
        except UNREADABLE as error:
            found.left_out.append(
                f"{directory}: a file is not as a run writes it ({told_damage(error)})"
            )
    found.left_out += [f"{one}: {MAX_RUNS} newer ones are shown" for one in folders[MAX_RUNS:]]
    if not found.run_ids:
        reasons = "".join(f"\n  {reason}" for reason in found.left_out)
        raise ValueError(
            f"{folder} holds no run that has ended: name the folder of a run, or of "
            f"several{reasons}"
        )
    return found


class _LeftOutError(Exception):
    """A run is not shown."""


def _runs_in(folder: Path) -> list[Path]:
    """Folders of runs in a folder, newest first."""
    found = [one for one in folder.iterdir() if is_run(one)] if folder.is_dir() else []
    return sorted(found, key=changed_at, reverse=True)


async def _read_run(directory: Path, store: MemoryStateStore) -> str:
    living = living_coordinator(directory)
    if living is not None:
        where = living.get("url") or living.get("address")
        raise _LeftOutError(f"it goes on, and is shown at {where}")
    config = read_config(directory)
    status, summary = read_status(directory), read_json(directory / SUMMARY_FILE)
    known = summary or read_json(directory / RUN_FILE)
    if status.state == "damaged" or not (config and known):
        raise _LeftOutError(status.failure or f"there is no {CONFIG_FILE} or no {RUN_FILE}")
    run_id, config_file = str(known["run_id"]), directory / CONFIG_FILE
    # A run that was killed has not written how it ended.
    state = RunState(status.state) if summary else RunState.FAILED
    record = RunRecord(
        run_id=run_id,
        name=str(config["run"]["name"]),
        num_steps=int(config["run"]["steps"]),
        directory=str(directory),
        created_at=config_file.stat().st_mtime,
        updated_at=status.changed_at,
        state=state,
        step=status.step,
        algorithm=str(config["algorithm"]["type"]),
        activity=status.activity,
        failure=status.failure,
        metrics=status.metrics,
        recoveries=status.recoveries,
        plan=_plan(directory, config),
    )
    # All files are read before the run is entered, so that it is there as a whole or not at all.
    samples = [one for one in read_samples(directory) if not one.held_out]
    # A run that was killed may have written those of a step that it has not committed.
    loads = [
        one
        for one in read_expert_loads(directory, RunStream.EXPERTS.keep)
        if one.step <= status.step
    ]
    records, graphs = (
        with_evaluations(read_records(directory, summary, MAX_STEPS_READ), directory),
        list(_graphs(directory)),
    )
    try:
        await store.create_run(record)
    except RunExistsError:
        raise _LeftOutError(f"run {run_id!r} is shown from another folder") from None
    for values in records:
        await store.append_metrics(run_id, values)
    for step, graph in graphs:
        await store.append_entry(run_id, RunStream.GRAPHS, graph, step=step)
    for step, kept in groupby(samples, lambda one: one.step):
        payload = _as_store_has(step, list(kept)).SerializeToString()
        await store.append_entry(run_id, RunStream.SAMPLES, payload, step=step)
    for one in loads:
        payload = one.SerializeToString()
        await store.append_entry(run_id, RunStream.EXPERTS, payload, step=one.step)
    events = EventLog(store, run_id)
    events.step = status.step
    events.note(f"read from {directory}")
    if status.activity:
        events.note(status.activity)
    events.state(to_state(state), status.failure)
    await events.flush()
    return run_id


def _plan(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The plan that a run began with. A recipe of another version of rolemesh may be refused."""
    if not config.get("plan"):
        return {}
    try:
        return kept_plan(load_recipe([directory / CONFIG_FILE]))
    except RecipeError:
        return {}


def read_records(
    directory: Path, summary: Mapping[str, Any], max_steps: int | None = None
) -> Iterator[dict[str, float]]:
    """Records of a run's steps, and before them that of the evaluation before the first one.

    Args:
        directory: The run's folder.
        summary: Its summary.json; empty where it has none.
        max_steps: With more steps, every n-th one comes, and the newest; None: all.

    Raises:
        ValueError, KeyError, TypeError: A file is not as a run writes it.
    """
    before = summary.get("held_out", {}).get("before")
    if before is not None:
        yield {"step": 0.0, **Evaluation.of_dict(before).scalars()}
    lines = [text for _, text in whole_lines(directory / METRICS_FILE)]
    every = 1 if max_steps is None else -(-len(lines) // max_steps)
    # Counted back from the newest, which must not be left out.
    for text in lines[::-1][:: every or 1][::-1]:
        yield json.loads(text)


def _graphs(directory: Path) -> Iterator[tuple[int, bytes]]:
    lines = [text for _, text in whole_lines(directory / GRAPHS_FILE)]
    for text in lines[-RunStream.GRAPHS.keep :]:
        yield int(json.loads(text)["step"]), text.encode()


def _as_store_has(step: int, kept: Sequence[KeptSample]) -> coordinator_pb2.ListSamplesResponse:
    """Samples of a step; tokens and their numbers are not kept in files."""
    return coordinator_pb2.ListSamplesResponse(
        step=step,
        samples=[
            coordinator_pb2.Sample(
                row=one.row,
                prompt=one.prompt,
                completion=one.completion,
                answer=one.answer,
                reward=float("nan") if one.reward is None else one.reward,
                policy_version=one.policy_version,
                reward_parts=one.reward_parts,
                session=None if one.session is None else session_message(one.session),
                images=one.images_message(),
            )
            for one in kept
        ],
    )
