"""Tests of what a coordinator answers, from a store alone."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import NUM_STEPS, append_step

from rolemesh.coordinator.api.doors.coordinator_service import METHODS, operation_of
from rolemesh.coordinator.api.messages import to_seconds, to_timestamp
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.store import _KEPT as KEPT
from rolemesh.coordinator.state.store import RunState, RunStream, StateStore, StreamEntry
from rolemesh.rpc.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RolemeshError,
)
from rolemesh.v1 import coordinator_pb2, experience_pb2


def test_every_method_has_an_operation_that_takes_the_fields_of_its_request() -> None:
    for method in METHODS:
        operation = getattr(StoreOperations, operation_of(method))
        taken = list(inspect.signature(operation).parameters)[1:]
        assert taken == [field.name for field in method.input_type.fields], method.name


async def test_metrics_come_in_columns_as_they_were_written(
    operations: StoreOperations, tmp_path: Path
) -> None:
    lines = [
        json.loads(line) for line in (tmp_path / "made/metrics.jsonl").read_text().splitlines()
    ]
    told = await operations.get_metrics("made")
    assert list(told.steps) == list(range(1, NUM_STEPS + 1))
    assert told.next_step == 0
    names = {name for line in lines for name in line} - {"step"}
    assert {series.name for series in told.series} == names
    for series in told.series:
        for line, value in zip(lines, series.values, strict=True):
            assert value == line[series.name] if series.name in line else math.isnan(value)


async def test_metrics_are_chosen_by_name_and_by_how_a_name_begins(
    operations: StoreOperations,
) -> None:
    told = await operations.get_metrics("made", ["entropy", "reward/*", "ghost"])
    assert [series.name for series in told.series] == [
        "entropy",
        "reward/max",
        "reward/mean",
        "reward/min",
        "reward/standard_error",
        "reward/std",
    ]


async def test_metrics_are_paged_and_thinned(operations: StoreOperations) -> None:
    first = await operations.get_metrics("made", ["entropy"], 3, 4)
    assert (list(first.steps), first.next_step) == ([3, 4, 5, 6], 7)
    last = await operations.get_metrics("made", ["entropy"], 10, 4)
    assert (list(last.steps), last.next_step) == ([10, 11, 12], 0)
    thin = await operations.get_metrics("made", ["entropy"], 0, 5, thin=True)
    assert (list(thin.steps), thin.next_step) == ([3, 6, 9, 12], 0)
    assert len(thin.series[0].values) == 4


async def test_metrics_go_on_while_the_run_does_and_a_step_made_twice_counts_once(
    store: StateStore, operations: StoreOperations
) -> None:
    await operations.get_metrics("live")
    record = await store.get_run("live")
    await append_step(store, record, NUM_STEPS + 1)
    await append_step(store, record, NUM_STEPS + 1, seed=5)
    answers = await asyncio.gather(*(operations.get_metrics("live", ["kl/mean"]) for _ in range(3)))
    for told in answers:
        assert list(told.steps) == list(range(1, NUM_STEPS + 2))
    newest = (await store.read_metrics("live"))[-1].values["kl/mean"]
    assert answers[0].series[0].values[-1] == newest


async def test_steps_that_a_run_took_back_are_gone_and_come_once(
    store: StateStore, operations: StoreOperations
) -> None:
    record = await store.get_run("live")
    await operations.get_metrics("live")
    assert (await operations.get_dataflow("live", NUM_STEPS)).step == NUM_STEPS
    epoch = await store.next_epoch("live")
    await store.rewind("live", NUM_STEPS - 3, epoch=epoch)
    told = await operations.get_metrics("live")
    assert list(told.steps) == list(range(1, NUM_STEPS - 2))
    with pytest.raises(NotFoundError, match=f"steps 1 to {NUM_STEPS - 3} are kept"):
        await operations.get_dataflow("live", NUM_STEPS)
    # It has the graph of the last step, though a step was in progress when the run went back.
    assert (await operations.get_dataflow("live")).is_made

    await append_step(store, record, NUM_STEPS - 2, seed=5)
    told = await operations.get_metrics("live", ["kl/mean"])
    assert list(told.steps) == list(range(1, NUM_STEPS - 1))
    newest = (await store.read_metrics("live"))[-1].values["kl/mean"]
    assert told.series[0].values[-1] == newest
    # Two rewinds, and the same steps again, between two looks.
    await store.rewind("live", NUM_STEPS - 4, epoch=await store.next_epoch("live"))
    for step in (NUM_STEPS - 3, NUM_STEPS - 2):
        await append_step(store, record, step, seed=6)
    again = await operations.get_metrics("live", ["kl/mean"])
    assert list(again.steps) == list(told.steps)
    written = [entry.values["kl/mean"] for entry in await store.read_metrics("live")]
    assert list(again.series[0].values) == written


async def test_a_step_in_progress_is_shown_until_it_is_made(
    store: StateStore, operations: StoreOperations
) -> None:
    flow = await operations.get_dataflow("live")
    assert (flow.step, flow.is_made) == (NUM_STEPS + 1, False)
    states = {node.name: node.state for node in flow.nodes}
    assert states["rollout-0.generate"] == "done"
    assert states["reference.compute_logprobs"] == "running"
    assert states["actor.update"] == "waiting"
    assert not next(node for node in flow.nodes if node.name == "actor.update").HasField("ended_s")
    await append_step(store, await store.get_run("live"), NUM_STEPS + 1)
    assert (await operations.get_dataflow("live")).is_made


async def test_who_was_away_for_longer_than_graphs_are_kept_gets_those_that_are(
    store: StateStore, operations: StoreOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KEPT, RunStream.GRAPHS, 3)
    store._streams.pop(("live", RunStream.GRAPHS))  # type: ignore[attr-defined]
    record = await store.get_run("live")
    for step in range(NUM_STEPS + 1, NUM_STEPS + 9):
        await append_step(store, record, step)
        if step in (NUM_STEPS + 1, NUM_STEPS + 8):
            assert (await operations.get_dataflow("live", step)).is_made
    with pytest.raises(NotFoundError, match=f"steps {NUM_STEPS + 6} to {NUM_STEPS + 8} are kept"):
        await operations.get_dataflow("live", NUM_STEPS + 2)


async def test_a_graph_has_times_from_its_beginning_and_its_critical_path(
    operations: StoreOperations,
) -> None:
    flow = await operations.get_dataflow("made", 3)
    assert (flow.step, flow.is_made) == (3, True)
    nodes = {node.name: node for node in flow.nodes}
    assert nodes["rollout-0.update_weights"].started_s == pytest.approx(0.01, abs=1e-6)
    assert list(nodes["actor.publish_weights"].after) == ["actor.update"]
    assert nodes["critic.compute_values[1]"].kind == "infer"
    critical = [node.name for node in flow.nodes if node.is_critical]
    assert critical[0] == "rollout-0.update_weights"
    assert critical[-2:] == ["actor.update", "actor.publish_weights"]
    assert "reward.compute_reward" not in critical
    assert nodes["actor.update"].policy_version == 3
    with pytest.raises(NotFoundError, match="steps 1 to 12 are kept") as missing:
        await operations.get_dataflow("made", NUM_STEPS + 1)
    assert missing.value.reason == "STEP_NOT_FOUND"


async def test_samples_are_of_the_step_asked_for(operations: StoreOperations) -> None:
    newest = await operations.list_samples("made")
    assert (newest.step, len(newest.samples)) == (NUM_STEPS, 4)
    assert list(newest.steps) == list(range(1, NUM_STEPS + 1))
    assert (await operations.list_samples("made", 2)).step == 2
    with pytest.raises(NotFoundError, match="no samples of step 99"):
        await operations.list_samples("made", 99)


async def test_loads_of_experts_are_of_the_step_asked_for(
    store: StateStore, operations: StoreOperations
) -> None:
    assert await operations.get_expert_loads("made") == coordinator_pb2.GetExpertLoadsResponse()
    with pytest.raises(NotFoundError, match="no loads of experts of step 2: none is kept yet"):
        await operations.get_expert_loads("made", 2)
    for step in (1, 2, 4):
        await store.append_entry("made", RunStream.EXPERTS, _loads(step), step=step)
    newest = await operations.get_expert_loads("made")
    assert (newest.step, list(newest.steps)) == (4, [1, 2, 4])
    assert list(newest.roles[0].layers[0].choices) == [4, 8]
    assert (await operations.get_expert_loads("made", 2)).step == 2
    with pytest.raises(NotFoundError, match="step 3: steps 1 to 4 are kept") as missing:
        await operations.get_expert_loads("made", 3)
    assert missing.value.reason == "STEP_NOT_FOUND"
    with pytest.raises(NotFoundError):
        await operations.get_expert_loads("no-such-run")
    # A step that came twice counts as it was the second time; what a rewind takes back is gone.
    await store.append_entry("made", RunStream.EXPERTS, _loads(2, times=10), step=2)
    again = await operations.get_expert_loads("made", 2)
    assert list(again.roles[0].layers[0].choices) == [20, 40]
    await store.rewind("made", 1, epoch=await store.next_epoch("made"))
    assert list((await operations.get_expert_loads("made")).steps) == [1]


def _loads(step: int, times: int = 1) -> bytes:
    layer = experience_pb2.LayerLoads(layer=1, choices=[step * times, 2 * step * times])
    role = coordinator_pb2.RoleLoads(role="actor", layers=[layer])
    return coordinator_pb2.GetExpertLoadsResponse(step=step, roles=[role]).SerializeToString()


async def test_device_use_is_one_series_a_device(
    store: StateStore, operations: StoreOperations
) -> None:
    looks = await store.read_entries("made", RunStream.DEVICES)
    told = await operations.get_device_use("made")
    assert [(one.service, one.rank) for one in told.devices] == [
        ("actor", 0),
        ("actor", 1),
        ("critic", 0),
        ("reference", 0),
        ("reward", 0),
        ("rollout-0", 0),
        ("rollout-1", 0),
    ]
    assert len(looks) == 6 * len(told.devices[0].times)
    middle = told.devices[0].times[7]
    later = await operations.get_device_use("made", middle.seconds)
    assert list(later.devices[1].busy) == list(told.devices[1].busy)[7:]


def look_at(*seconds: float) -> bytes:
    devices = [
        coordinator_pb2.DeviceUseSeries(
            service=f"service-{rank}", times=[to_timestamp(time)], busy=[0.5], memory_bytes=[rank]
        )
        for rank, time in enumerate(seconds)
    ]
    return coordinator_pb2.GetDeviceUseResponse(devices=devices).SerializeToString()


async def test_device_use_is_read_once_and_forgotten_with_the_store(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = 3
    monkeypatch.setitem(KEPT, RunStream.DEVICES, keep)
    operations = StoreOperations(store)
    read_entries, read = store.read_entries, list[int]()

    async def counted(*arguments: Any, **named: Any) -> list[StreamEntry]:
        entries = await read_entries(*arguments, **named)
        read.append(len(entries))
        return entries

    monkeypatch.setattr(store, "read_entries", counted)

    async def append(*times: float) -> None:
        await store.append_entry("live", RunStream.DEVICES, look_at(*times))

    async def told(since: float = 0.0) -> dict[str, list[float]]:
        use = await operations.get_device_use("live", since)
        return {one.service: [to_seconds(time) for time in one.times] for one in use.devices}

    store._streams.pop(("live", RunStream.DEVICES))  # type: ignore[attr-defined]
    await append(10.25, 10.5)
    await append(11.25)
    assert await told() == {"service-0": [10.25, 11.25], "service-1": [10.5]}
    await append(12.25)
    assert await told(11.25) == {"service-0": [11.25, 12.25]}
    assert await told(13.0) == {}
    assert read == [2, 1, 0]
    # What the store drops goes here, too, a device that is gone included.
    await append(13.25)
    assert await told() == {"service-0": [11.25, 12.25, 13.25]}
    # Nobody asked for longer than looks are kept.
    for time in (14.25, 15.25, 16.25, 17.25):
        await append(time)
    assert await told() == {"service-0": [15.25, 16.25, 17.25]}


async def test_wishes_show_at_once_and_a_stop_goes_before_a_pause(
    store: StateStore, operations: StoreOperations
) -> None:
    assert (await operations.pause_run("live")).state == coordinator_pb2.RUN_STATE_PAUSING
    await store.update_run("live", state=RunState.PAUSED)
    assert (await operations.get_run("live")).state == coordinator_pb2.RUN_STATE_PAUSED
    assert (await operations.stop_run("live")).state == coordinator_pb2.RUN_STATE_STOPPING
    await operations.resume_run("live")
    assert (await store.get_run("live")).pause_requested is False


async def test_an_ended_run_takes_no_wishes_but_a_stop(operations: StoreOperations) -> None:
    wishes: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: operations.pause_run("made"),
        lambda: operations.resume_run("made"),
        lambda: operations.checkpoint_run("made", "1"),
        lambda: operations.attach_run("made"),
    )
    for wish in wishes:
        with pytest.raises(PreconditionError, match="has ended: it is succeeded") as refused:
            await wish()
        assert refused.value.reason == "RUN_ENDED"
    assert (await operations.stop_run("made")).state == coordinator_pb2.RUN_STATE_SUCCEEDED


async def test_a_run_that_has_ended_is_started_again_by_who_starts_runs(
    store: StateStore, operations: StoreOperations
) -> None:
    await store.update_run("live", state=RunState.FAILED, pause_requested=True)
    # A coordinator of one run alone says who does it.
    with pytest.raises(PreconditionError, match=r"rolemesh train --resume .*/live") as refused:
        await operations.resume_run("live")
    assert refused.value.reason == "RESUME_UNAVAILABLE"
    asked: list[tuple[str, tuple[str, ...]]] = []

    class Creator:
        async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
            raise AssertionError("no run is created")

        async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
            asked.append((run_id, tuple(overrides)))
            await store.update_run(run_id, state=RunState.STARTING)

    hub = StoreOperations(store, Creator())
    run = await hub.resume_run("live", ["run.steps=40"])
    assert run.state == coordinator_pb2.RUN_STATE_STARTING
    assert not (await store.get_run("live")).pause_requested
    # Without overrides, that of a run that goes on is the wish not to pause.
    await hub.resume_run("live")
    assert asked == [("live", ("run.steps=40",))]
    with pytest.raises(PreconditionError) as over:
        await hub.resume_run("made")
    assert over.value.reason == "RUN_ENDED"
    # Early stopping has ended it, and other settings make the steps that are left.
    made = await store.get_run("made")
    await store.update_run("made", num_steps=made.step + 1)
    with pytest.raises(PreconditionError):
        await hub.resume_run("made")
    await hub.resume_run("made", ["run.early_stopping.patience=9"])
    assert asked[-1] == ("made", ("run.early_stopping.patience=9",))
    with pytest.raises(InvalidRequestError) as large:
        await hub.resume_run("live", ["x" * 2**21])
    assert large.value.reason == "RECIPE_INVALID"


async def test_recoveries_are_read_once_for_the_alert_of_many(
    store: StateStore, operations: StoreOperations
) -> None:
    async def recover(step: int) -> None:
        recovered = coordinator_pb2.Recovered(step=step, cause="killed", seconds=1.0)
        event = coordinator_pb2.RunEvent(step=step, recovered=recovered)
        await store.append_entry("live", RunStream.EVENTS, event.SerializeToString())

    async def rules() -> list[str]:
        return [alert.rule for alert in (await operations.list_alerts("live")).alerts]

    for step in (1, 2):
        await recover(step)
    assert "RECOVERS_OFTEN" not in await rules()
    await recover(3)
    await store.update_run("live", recoveries=3)
    assert [(await rules()).count("RECOVERS_OFTEN") for _ in range(2)] == [1, 1]


async def test_only_a_run_of_a_client_can_be_attached_and_not_paused(
    store: StateStore, operations: StoreOperations
) -> None:
    with pytest.raises(PreconditionError) as ours:
        await operations.attach_run("live")
    assert ours.value.reason == "RUN_NOT_EXTERNAL"
    await store.update_run("live", algorithm="external", state=RunState.STARTING)
    with pytest.raises(PreconditionError) as early:
        await operations.attach_run("live")
    assert early.value.reason == "RUN_NOT_READY"
    await store.update_run("live", state=RunState.RUNNING)
    first, second = await operations.attach_run("live"), await operations.attach_run("live")
    assert second.fencing_epoch == first.fencing_epoch + 1
    assert [service.name for service in first.services][-2:] == ["rollout-0", "rollout-1"]
    assert first.services[0].address == "127.0.0.1:41000"
    for wish in (operations.pause_run("live"), operations.checkpoint_run("live", "1")):
        with pytest.raises(PreconditionError) as refused:
            await wish
        assert refused.value.reason == "RUN_EXTERNAL"


async def test_alerts_stand_on_what_the_run_told_so_far(
    store: StateStore, operations: StoreOperations
) -> None:
    before = {alert.rule for alert in (await operations.list_alerts("live")).alerts}
    record = await store.get_run("live")
    await append_step(store, record, NUM_STEPS + 1, metrics={"actor/grad_norm": math.nan})
    after = {alert.rule for alert in (await operations.list_alerts("live")).alerts}
    assert after - before == {"NOT_FINITE"}


async def test_a_log_is_read_piece_by_piece_to_the_last_byte(
    operations: StoreOperations, tmp_path: Path
) -> None:
    text = "".join(f"line {number} äöü 🙂\n" for number in range(50))
    (tmp_path / "live/logs/actor.log").write_text(text, encoding="utf-8")
    # No piece size is a multiple of the characters' sizes.
    for max_bytes in (1, 3, 7, 1000):
        offset, pieces = 0, ""
        while True:
            piece = await operations.read_log("live", "actor", offset, max_bytes)
            if not piece.text:
                break
            assert piece.offset == offset
            offset, pieces = piece.next_offset, pieces + piece.text
        assert offset == len(text.encode())
        if max_bytes > 3:
            assert pieces == text
    tail = await operations.read_log("live", "actor", -5)
    assert (tail.text, tail.next_offset) == ("🙂\n", len(text.encode()))


async def test_a_log_is_a_name_and_no_path(operations: StoreOperations, tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("secret")
    for name in ("../../secret", str(tmp_path / "secret"), "", "ghost"):
        with pytest.raises(NotFoundError, match="there are actor, coordinator") as missing:
            await operations.read_log("live", name)
        assert missing.value.reason == "LOG_NOT_FOUND"


async def test_numbers_out_of_range_are_refused(operations: StoreOperations) -> None:
    calls: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: operations.list_runs(-1),
        lambda: operations.get_metrics("made", (), -1),
        lambda: operations.get_metrics("made", (), 0, 1001),
        lambda: operations.get_dataflow("made", -1),
        lambda: operations.list_samples("made", -1),
        lambda: operations.get_expert_loads("made", -1),
        lambda: operations.get_device_use("made", math.nan),
        lambda: operations.read_log("made", "actor", 0, 2**20 + 1),
        lambda: operations.checkpoint_run("live", ""),
        lambda: operations.checkpoint_run("live", "x" * 129),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError, match="give") as refused:
            await call()
        assert refused.value.reason == "REQUEST_INVALID"


async def test_every_operation_names_an_unknown_run(operations: StoreOperations) -> None:
    more: dict[str, tuple[Any, ...]] = {
        "checkpoint_run": ("1",),
        "log_step": (1, 1, {"loss": 0.5}),
        "read_log": ("actor",),
    }
    of_run = [method for method in METHODS if "run_id" in method.input_type.fields_by_name]
    for name in {operation_of(method) for method in of_run} - {"create_run", "watch_run"}:
        with pytest.raises(RolemeshError, match="'ghost'") as missing:
            await getattr(operations, name)("ghost", *more.get(name, ()))
        assert missing.value.reason == "RUN_NOT_FOUND", name
    with pytest.raises(RolemeshError, match="'ghost'") as missing:
        await anext(aiter(operations.watch_run("ghost")))
    assert missing.value.reason == "RUN_NOT_FOUND"


async def test_a_coordinator_of_one_run_creates_none(operations: StoreOperations) -> None:
    with pytest.raises(PreconditionError, match="rolemesh coordinator") as refused:
        await operations.create_run("new", "run: {}")
    assert refused.value.reason == "CREATION_UNAVAILABLE"
