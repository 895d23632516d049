"""Tests of wishes over CoordinatorService while a run goes on, against fake roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fake_recipes import PPO_ROLES
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until
from support.fake_runs import make_run, read_lines

from rolemesh.coordinator.api.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.schema import Recipe
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


async def test_a_client_drives_an_external_run_and_its_end_is_the_coordinators(
    tmp_path: Path,
) -> None:
    lasting = {role: {"address": "127.0.0.1:1"} for role in PPO_ROLES}
    recipe = fake_recipe(algorithm={"type": "external"}, services=lasting)
    async with fake_mesh() as mesh, going(mesh, tmp_path, recipe) as one:
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
