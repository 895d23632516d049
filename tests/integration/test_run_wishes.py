"""Tests of wishes over CoordinatorService while a run goes on, against fake roles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fake_recipes import PPO_ROLES
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until
from support.fake_runs import make_run, read_lines

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec
from rolemesh.coordinator.run.reporting.records import enter_again
from rolemesh.coordinator.run.results.samples_file import read_samples
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2

Stub = coordinator_pb2_grpc.CoordinatorServiceStub


class Going:
    """A run that goes on, and its coordinator's door."""

    def __init__(self, run: TrainingRun, store: MemoryStateStore, stub: Stub) -> None:
        self.run, self.store, self.stub = run, store, stub
        self.run_id = run.run_id
        self.task = asyncio.create_task(run.execute())

    async def state(self) -> str:
        run = (await self.stub.GetRun(coordinator_pb2.GetRunRequest(run_id=self.run_id))).run
        return coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")

    async def is_in(self, state: str) -> bool:
        return await self.state() == state

    async def events(self, after: str = "") -> list[coordinator_pb2.RunEvent]:
        request = coordinator_pb2.WatchRunRequest(run_id=self.run_id, after_event_id=after)
        return [message.event async for message in self.stub.WatchRun(request)]

    async def ended(self, *, wish: bool = True) -> None:
        if wish:
            await self.stub.StopRun(coordinator_pb2.StopRunRequest(run_id=self.run_id))
        await self.task


@asynccontextmanager
async def going(mesh: FakeMesh, directory: Path, recipe: Recipe) -> AsyncIterator[Going]:
    store = MemoryStateStore()
    server, port = await serve_coordinator(StoreOperations(store))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        one = Going(make_run(mesh, directory, recipe, store), store, stub)
        await until(lambda: bool(store._runs))
        try:
            yield one
        finally:
            one.run.abort()
            await asyncio.wait({one.task})
            await server.stop(None)


def kinds(events: list[coordinator_pb2.RunEvent]) -> list[str]:
    """Events in short: states by name, steps by number."""
    short = []
    for event in events:
        match event.WhichOneof("event"):
            case "state":
                name = coordinator_pb2.RunState.Name(event.state.state)
                short.append(name.removeprefix("RUN_STATE_").lower())
            case "step_made":
                short.append(f"step {event.step}")
            case "evaluated":
                short.append("evaluated")
            case "checkpoint_saved":
                short.append(f"saved {event.step}")
    return short


async def test_every_event_of_a_run_is_told_once_and_in_order(tmp_path: Path) -> None:
    recipe = fake_recipe(steps=2)
    async with fake_mesh() as mesh, going(mesh, tmp_path, recipe) as one:
        events = await one.events()
        await one.ended(wish=False)
    assert kinds(events) == [
        "starting", "running", "evaluated", "step 1", "evaluated", "step 2", "saved 2", "succeeded"
    ]  # fmt: skip
    notes = [event.note.text for event in events if event.HasField("note")]
    assert "actor is ready, 1 parameters" in notes
    (made, last) = (event.step_made.metrics for event in events if event.HasField("step_made"))
    assert (made["step"], last["step"]) == (1, 2)
    assert last == (await one.store.get_run(one.run_id)).metrics


async def test_a_paused_run_makes_no_step_and_goes_on_when_resumed(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        async with going(mesh, tmp_path, fake_recipe(steps=100)) as one:
            await until(lambda: "actor.Update" in mesh.running)
            wish = coordinator_pb2.PauseRunRequest(run_id=one.run_id)
            shown = (await one.stub.PauseRun(wish)).run.state
            assert shown == coordinator_pb2.RUN_STATE_PAUSING
            gate.set()
            await until(lambda: one.is_in("PAUSED"))
            assert one.run.progress.step == 1
            # Services are looked after: nobody else may take them meanwhile.
            assert mesh.roles["actor"].run_id == one.run_id
            # A checkpoint can be had while the run is paused, once for each request.
            for request_id in ("a", "a", "b"):
                await one.stub.CheckpointRun(
                    coordinator_pb2.CheckpointRunRequest(run_id=one.run_id, request_id=request_id)
                )
            await until(lambda: (tmp_path / "checkpoints/step-00000001/COMMITTED").is_file())
            await until(
                lambda: (
                    one.run._attempt is not None
                    and one.run._attempt.activity == "paused after step 1"
                )
            )
            assert mesh.methods(2) == []
            await one.stub.ResumeRun(coordinator_pb2.ResumeRunRequest(run_id=one.run_id))
            await until(lambda: bool(mesh.methods(2)))
            await one.ended()
            told = kinds(await one.events())
    # The wish is noticed while the step is made, or after it.
    assert sorted(told[3:5]) == ["pausing", "step 1"]
    assert told[5:7] == ["paused", "saved 1"]
    assert "running" in told[7:9]
    assert told.count("saved 1") <= 2
    # So is the one to stop.
    assert "stopping" in told[-4:-1]
    assert told[-2:] == [f"saved {len(read_lines(tmp_path / 'metrics.jsonl'))}", "stopped"]


async def test_a_stop_ends_a_paused_run_with_everything_saved(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        async with going(mesh, tmp_path, fake_recipe(steps=100)) as one:
            await until(lambda: "actor.Update" in mesh.running)
            await one.stub.PauseRun(coordinator_pb2.PauseRunRequest(run_id=one.run_id))
            gate.set()
            await until(lambda: one.is_in("PAUSED"))
            await one.ended()
            assert await one.is_in("STOPPED")
    assert (tmp_path / "model/weight.json").is_file()


async def test_the_step_in_progress_and_the_use_of_devices_are_told(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        actor = mesh.roles["actor"]
        actor.devices = [
            worker_pb2.DeviceUse(device="cpu", busy=0.5, memory_bytes=3, memory_total_bytes=4)
        ]
        gate = actor.gates["Update"] = asyncio.Event()
        async with going(mesh, tmp_path, fake_recipe(steps=1)) as one:
            await until(lambda: "actor.Update" in mesh.running)

            async def flow() -> coordinator_pb2.GetDataflowResponse:
                return await one.stub.GetDataflow(
                    coordinator_pb2.GetDataflowRequest(run_id=one.run_id)
                )

            async def is_shown() -> bool:
                entries = await one.store.read_entries(one.run_id, RunStream.FLOW)
                return (
                    bool(entries)
                    and {n.name: n.state for n in (await flow()).nodes}["actor.update"] == "running"
                )

            await until(is_shown)
            shown = await flow()
            assert (shown.step, shown.is_made) == (1, False)
            (entry,) = await one.store.read_entries(one.run_id, RunStream.FLOW)
            # Several beats in which nothing changes write nothing.
            looks = len(await one.store.read_entries(one.run_id, RunStream.DEVICES))

            async def has_looked() -> bool:
                entries = await one.store.read_entries(one.run_id, RunStream.DEVICES)
                return len(entries) >= looks + 3

            await until(has_looked)
            assert await one.store.read_entries(one.run_id, RunStream.FLOW) == [entry]
            assert (await one.store.get_run(one.run_id)).activity == "step 1"
            gate.set()
            await one.ended(wish=False)
            made = await flow()
            assert (made.step, made.is_made) == (1, True)
            use = await one.stub.GetDeviceUse(
                coordinator_pb2.GetDeviceUseRequest(run_id=one.run_id)
            )
    (series,) = use.devices
    assert (series.service, series.device, series.memory_total_bytes) == ("actor", "cpu", 4)
    assert set(series.busy) == {0.5}


def external_recipe() -> Recipe:
    lasting = {role: {"address": "127.0.0.1:1"} for role in PPO_ROLES}
    return fake_recipe(algorithm={"type": "external"}, services=lasting)


async def test_what_a_client_logs_is_written_like_the_steps_of_any_run(tmp_path: Path) -> None:
    (tmp_path / "keeping.py").write_text(
        "class Keeping:\n"
        "    def __init__(self, path): self.file = open(path, 'a')\n"
        "    def start(self, run, config): pass\n"
        "    def log(self, step, scalars): print(step, sorted(scalars.items()), file=self.file)\n"
        "    def finish(self, state): self.file.close()\n"
    )
    kept = CustomTrackerSpec(
        tracker=f"{tmp_path / 'keeping.py'}:Keeping", options={"path": str(tmp_path / "kept")}
    )
    recipe = external_recipe().model_copy(update={"trackers": (kept,)})
    folder = tmp_path / "run"
    async with fake_mesh() as mesh, going(mesh, folder, recipe) as one:
        await until(lambda: one.is_in("RUNNING"))

        async def attached() -> int:
            request = coordinator_pb2.AttachRunRequest(run_id=one.run_id)
            return (await one.stub.AttachRun(request)).fencing_epoch

        async def log(epoch: int, step: int, **metrics: float) -> None:
            sample = coordinator_pb2.Sample(row=3, prompt="1+1", completion=f"in {step}", reward=1)
            request = coordinator_pb2.LogStepRequest(
                run_id=one.run_id, fencing_epoch=epoch, step=step, metrics=metrics, samples=[sample]
            )
            await one.stub.LogStep(request)

        first = await attached()
        for step in (1, 2, 2, 3):
            await log(first, step, loss=1 / step)
        await until(lambda: len(one.run.progress.records) == 3)
        second = await attached()
        # The client has gone back behind step 1, and stops the run right after its last step.
        await log(second, 2, loss=5.0)
        await log(second, 9, loss=6.0)
        await one.ended()
        told = kinds(await one.events())
        record = await one.store.get_run(one.run_id)
        curves = await StoreOperations(one.store).get_metrics(one.run_id)
        shown = await StoreOperations(one.store).list_samples(one.run_id)

    expected = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 5.0}, {"step": 9, "loss": 6.0}]
    assert read_lines(folder / "metrics.jsonl") == expected
    assert (list(curves.steps), list(curves.series[0].values)) == ([1, 2, 9], [1.0, 5.0, 6.0])
    assert (record.step, record.metrics, record.state) == (9, expected[-1], RunState.STOPPED)
    made = ["step 1", "step 2", "step 3", "step 2", "step 9"]
    assert [kind for kind in told if kind.startswith("step ")] == made
    rows = read_samples(folder)
    assert [(row.step, row.row, row.completion, row.reward) for row in rows] == [
        (step, 3, f"in {step}", 1.0) for step in (1, 2, 9)
    ]
    assert list(shown.steps) == [1, 2, 9]
    lines = (tmp_path / "kept").read_text().splitlines()
    assert lines == [
        f"{step} [('loss', {loss})]"
        for step, loss in ((1, 1.0), (2, 0.5), (3, 1 / 3), (2, 5.0), (9, 6.0))
    ]
    (board,) = (folder / "tensorboard").iterdir()
    assert board.read_bytes().count(b"loss") == len(made)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("stopped", 9)


async def test_what_a_client_logged_outlives_the_process_of_the_run(tmp_path: Path) -> None:
    store = MemoryStateStore()
    operations = StoreOperations(store)
    recipe = external_recipe()
    async with fake_mesh() as mesh:
        run = make_run(mesh, tmp_path, recipe, store)

        async def make_steps(run: TrainingRun, *steps: int) -> None:
            task = asyncio.create_task(run.execute())

            async def is_running() -> bool:
                return bool(store._runs) and (
                    (await operations.get_run(run.run_id)).state
                    == coordinator_pb2.RUN_STATE_RUNNING
                )

            await until(is_running)
            epoch = (await operations.attach_run(run.run_id)).fencing_epoch
            for step in steps:
                await operations.log_step(run.run_id, epoch, step, {"loss": float(step)})
            await operations.stop_run(run.run_id)
            await task

        await make_steps(run, 1, 3)
        (tmp_path / "summary.json").unlink()
        await enter_again(store, recipe, run.run_id, tmp_path)
        progress, where = await reached(store, run.run_id, tmp_path, is_external=True)
        assert where == "its journal: 3 steps"
        again = make_run(mesh, tmp_path, recipe, store, run_id=run.run_id, resumed=progress)
        await make_steps(again, 4)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 3, 4]
    assert list((await operations.get_metrics(run.run_id)).steps) == [1, 3, 4]


async def test_a_client_drives_an_external_run_and_its_end_is_the_coordinators(
    tmp_path: Path,
) -> None:
    async with fake_mesh() as mesh, going(mesh, tmp_path, external_recipe()) as one:
        attach = coordinator_pb2.AttachRunRequest(run_id=one.run_id)
        with pytest.raises(PreconditionError) as early:
            await one.stub.AttachRun(attach)
        assert early.value.reason == "RUN_NOT_READY"
        await until(lambda: one.is_in("RUNNING"))
        first, second = await one.stub.AttachRun(attach), await one.stub.AttachRun(attach)
        assert second.fencing_epoch > first.fencing_epoch > 1
        found = {service.name: service.address for service in second.services}
        assert found == dict(mesh.addresses)
        assert mesh.methods(1) == []
        with pytest.raises(PreconditionError) as refused:
            await one.stub.PauseRun(coordinator_pb2.PauseRunRequest(run_id=one.run_id))
        assert refused.value.reason == "RUN_EXTERNAL"
        await one.ended()
        assert kinds(await one.events()) == ["starting", "running", "stopping", "stopped"]
        # Its services were given back under an epoch newer than any driver's.
        epochs = {fake.drained_epoch for fake in mesh.roles.values()}
        assert min(epochs) > second.fencing_epoch
    assert (await one.store.get_run(one.run_id)).state is RunState.STOPPED
