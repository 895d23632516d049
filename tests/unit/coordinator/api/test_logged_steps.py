"""Tests of steps that a client logs: what is entered, once, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fill_store

from rolemesh.coordinator.api.reads.logged_steps import MAX_METRICS, MAX_SAMPLES, MAX_STEP
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.journal import LOG_OPERATION
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, StateStore
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.v1 import coordinator_pb2

RUN = "driven"
METRICS = {"reward/mean": 0.25}


@pytest.fixture
async def store(tmp_path: Path) -> StateStore:
    store = MemoryStateStore()
    await fill_store(store, RUN, tmp_path, num_steps=0, is_live=True)
    await store.update_run(RUN, algorithm="external", state=RunState.RUNNING)
    return store


async def attached(operations: StoreOperations) -> int:
    return (await operations.attach_run(RUN)).fencing_epoch


async def entered(store: StateStore) -> list[tuple[int, Mapping[str, Any]]]:
    """Epochs and records of what was logged, in order."""
    journal = await store.read_journal(RUN)
    return [(e.epoch, e.result["record"]) for e in journal if e.operation == LOG_OPERATION]


async def refused(
    operations: StoreOperations, reason: str, epoch: int, step: int, metrics: Mapping[str, float]
) -> str:
    with pytest.raises(PreconditionError) as error:
        await operations.log_step(RUN, epoch, step, metrics)
    assert error.value.reason == reason
    return error.value.message


async def test_a_repeat_is_entered_once_and_steps_ascend(
    store: StateStore, operations: StoreOperations
) -> None:
    epoch = await attached(operations)
    for step in (1, 1, 4):
        await operations.log_step(RUN, epoch, step, METRICS)
    # Another coordinator of the same store knows as much.
    await StoreOperations(store).log_step(RUN, epoch, 4, METRICS)
    assert await entered(store) == [(epoch, {"step": step, **METRICS}) for step in (1, 4)]
    for step, metrics in ((4, {"reward/mean": 0.5}), (3, METRICS), (1, METRICS)):
        told = await refused(operations, "STEP_LOGGED", epoch, step, metrics)
        assert f"step is {step}, but step 4" in told
    assert len(await entered(store)) == 2


async def test_calls_at_the_same_time_enter_a_step_once(
    store: StateStore, operations: StoreOperations
) -> None:
    epoch = await attached(operations)
    await asyncio.gather(*(operations.log_step(RUN, epoch, 1, METRICS) for _ in range(3)))
    assert len(await entered(store)) == 1


async def test_a_client_that_attaches_anew_goes_on_or_back_and_fences_the_one_before(
    store: StateStore, operations: StoreOperations
) -> None:
    first = await attached(operations)
    sample = coordinator_pb2.Sample(row=0, prompt="1+1", completion="2")
    for step in (1, 2, 3):
        await operations.log_step(RUN, first, step, METRICS, [sample])
    second = await attached(operations)
    told = await refused(operations, "STALE_EPOCH", first, 4, METRICS)
    assert f"fencing_epoch is {first}, but that of run {RUN!r} is {second}" in told
    await refused(operations, "STALE_EPOCH", second + 7, 4, METRICS)
    await operations.log_step(RUN, second, 4, METRICS)
    # It must not take back either what another client has logged.
    await refused(operations, "STALE_EPOCH", first, 2, METRICS)
    third = await attached(operations)
    await operations.log_step(RUN, third, 2, {"reward/mean": 0.75}, [sample])
    progress = RunProgress.of_journal(await store.read_journal(RUN))
    assert progress is not None
    assert progress.step == 2
    assert progress.records == [{"step": 1, **METRICS}, {"step": 2, "reward/mean": 0.75}]
    assert list((await operations.list_samples(RUN)).steps) == [1, 2]
    # The same client goes on from there.
    await operations.log_step(RUN, third, 3, METRICS)
    assert len(await entered(store)) == 6


async def test_a_run_whose_journal_is_lost_keeps_what_its_file_says(tmp_path: Path) -> None:
    lines = [{"step": 2, "loss": 0.5}, {"step": 7, "loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress, where = await reached(MemoryStateStore(), RUN, tmp_path, is_external=True)
    assert (progress.step, progress.records, where) == (7, lines, "its file of metrics: 7 steps")
    # A run whose steps the coordinator makes has made none that it could go on from.
    progress, _ = await reached(MemoryStateStore(), RUN, tmp_path)
    assert (progress.step, progress.records) == (0, [])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fencing_epoch": 0}, "fencing_epoch is 0: give"),
        ({"step": 0}, "step is 0: give 1 to"),
        ({"step": MAX_STEP + 1}, f"step is {MAX_STEP + 1}: give"),
        ({"metrics": {}}, "metrics has 0 values: give 1 to 256"),
        (
            {"metrics": {f"m{n}": 0.0 for n in range(MAX_METRICS + 1)}},
            "metrics has 257 values: give",
        ),
        ({"metrics": {"": 1.0}}, "metrics has the name '': give 1 to 128"),
        ({"metrics": {"x" * 129: 1.0}}, "metrics has the name 'xxx"),
        ({"metrics": {"a\n": 1.0}}, r"metrics has the name 'a\\n'"),
        ({"metrics": {"<b>": 1.0}}, "metrics has the name '<b>'"),
        ({"metrics": {"step": 1.0}}, "the field step says it"),
        ({"metrics": {"loss": math.nan}}, r"metrics\['loss'\] is nan: give a finite"),
        ({"metrics": {"loss": -math.inf}}, r"metrics\['loss'\] is -inf: give a finite"),
        ({"metrics": {"loss": 1e39}}, r"metrics\['loss'\] is 1e\+39: give a finite float32"),
        (
            {"samples": [coordinator_pb2.Sample()] * (MAX_SAMPLES + 1)},
            "samples has 65 rows: give at most 64",
        ),
        ({"samples": [coordinator_pb2.Sample(prompt="x" * 2**20)]}, "samples have .* bytes: give"),
        (
            {"samples": [coordinator_pb2.Sample(row=3, reward_parts={"a": math.nan})]},
            "reward_parts\\['a'\\] of the sample of row 3 is nan: give a finite",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_is_out_of_range_is_named_and_not_entered(
    store: StateStore, operations: StoreOperations, changes: dict[str, Any], told: str
) -> None:
    given = {"fencing_epoch": await attached(operations), "step": 1, "metrics": METRICS}
    with pytest.raises(InvalidRequestError, match=told) as error:
        await operations.log_step(RUN, **{**given, **changes})
    assert error.value.reason == "REQUEST_INVALID"
    assert await entered(store) == []


async def test_only_a_running_run_of_a_client_takes_steps(
    store: StateStore, operations: StoreOperations
) -> None:
    epoch = await attached(operations)
    for changes, reason in (
        ({"algorithm": "ppo"}, "RUN_NOT_EXTERNAL"),
        ({"algorithm": "external", "state": RunState.STARTING}, "RUN_NOT_READY"),
        ({"state": RunState.RUNNING, "stop_requested": True}, "RUN_NOT_READY"),
        ({"state": RunState.STOPPED}, "RUN_ENDED"),
    ):
        await store.update_run(RUN, **changes)  # type: ignore[arg-type]
        await refused(operations, reason, epoch, 1, METRICS)
    assert await entered(store) == []
