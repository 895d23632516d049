"""Real services that write checkpoints from cuts while they train on, and what ends the writing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cut_services import Speaker, batch_of_values, critic_spec, new_folder, speaking
from support.fake_roles import until
from support.rollout_services import process_of
from support.saboteur import ranks_of
from support.services import serving
from support.tiny_models import write_tiny_llama
from support.warm_processes import forked

from rolemesh.coordinator.sdk import AsyncMesh
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import Slot, remove_slots
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing
from rolemesh.rpc.errors import (
    CapacityError,
    NotFoundError,
    PreconditionError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import operation_pb2, weights_pb2

THREAD = "checkpoint"
"""Name of the thread that writes a cut."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run of this test alone, whose cuts do not outlive it."""
    run_id = f"cuts-{uuid.uuid4().hex}"
    yield run_id
    remove_slots(run_id, "critic")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


async def write_cut(
    mesh: AsyncMesh, step: int, directory: Path, sequence: int = 0
) -> weights_pb2.CheckpointResult:
    """Has the critic write a cut; the SDK writes what a role holds by now."""
    key = operation_pb2.OperationKey(
        run_id=mesh.run_id,
        fencing_epoch=mesh.epoch,
        step=step,
        operation="critic.save_checkpoint",
        sequence=sequence,
    )
    client = mesh["critic"]._client
    return await client.save_checkpoint(key, str(directory), from_cut=True).result()


@dataclass
class Held:
    """A writer that waits in front of its second file."""

    has_begun: threading.Event
    may_go_on: threading.Event


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(threading.Event(), threading.Event())
    save_file, written = checkpoint_writing.save_file, []

    def waiting(tensors: Any, path: Path) -> None:
        if threading.current_thread().name == THREAD and written:
            held.has_begun.set()
            assert held.may_go_on.wait(60)
        save_file(tensors, path)
        written.append(path)

    monkeypatch.setattr(checkpoint_writing, "save_file", waiting)
    yield held
    held.may_go_on.set()


@dataclass
class Scene:
    """A critic at step 2 whose cut of step 1 is being written; the writer waits."""

    server: ServiceServer
    speaker: Speaker
    live: Path
    """The checkpoint of step 1, from live weights."""
    cut: Path
    """Where the other one is to be."""
    saving: asyncio.Task[weights_pb2.CheckpointResult]
    version: int
    """Of the weights of step 1."""

    @property
    def role(self) -> CriticRole:
        role = self.server.runtime.role
        assert isinstance(role, CriticRole)
        return role

    def is_given_up(self) -> bool:
        return any(call.is_abandoned for call in self.server.runtime.hold.calls.values())


@asynccontextmanager
async def scene(model: Path, run_id: str, folder: Path, writer: Held) -> AsyncIterator[Scene]:
    async with (
        batch_of_values() as batch,
        serving(CriticRole()) as server,
        speaking(server.runtime.address, run_id, 1) as mesh,
    ):
        speaker, critic = Speaker(mesh, batch, folder), mesh["critic"]
        await critic.initialize(critic_spec(model), run_seed=3)
        await speaker.train(1)
        saved = await critic.save_cut()
        live = await critic.save_state(str(folder / "live"))
        assert live.policy_version == saved.policy_version
        saving = asyncio.create_task(write_cut(mesh, 1, folder / "cut"))
        await until(writer.has_begun.is_set)
        await speaker.train(2)
        yield Scene(server, speaker, folder / "live", folder / "cut", saving, saved.policy_version)


async def writing_thread_ends() -> None:
    """Waits for the thread to leave; a thread whose work is done lives for a moment more."""
    await until(lambda: not any(thread.name == THREAD for thread in threading.enumerate()))


async def assert_nothing_is_left(of: Scene, run_id: str) -> None:
    """No thread, no half checkpoint, and no lock on a slot."""
    assert names_in(of.cut.parent) == ["live"]
    slot = Slot.open(SlotOwner(run_id, "critic", 0, 1), 1)
    assert slot is not None
    slot.close()
    await writing_thread_ends()


# --- the role goes on ---------------------------------------------------------------------


async def test_a_role_trains_and_saves_its_next_cut_while_one_is_written(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        critic = at.speaker.mesh["critic"]
        # Step 2 was made meanwhile. Its cut has a slot of its own, that of step 3 has none.
        await critic.save_cut()
        await at.speaker.train(3)
        with pytest.raises(PreconditionError) as held:
            await critic.save_cut()
        assert held.value.reason == "CUT_HELD"
        assert not at.saving.done()
        at.speaker.mesh.begin_step(2)
        await critic.sleep()
        writer.may_go_on.set()
        result = await at.saving
        await critic.wake()
        assert (result.policy_version, result.from_cut) == (at.version, True)
        assert files_of(at.cut) == files_of(at.live)
        # A repeat of the call is answered, and writes nothing.
        assert await write_cut(at.speaker.mesh, 1, at.cut) == result
        at.speaker.mesh.begin_step(3)
        await critic.save_cut()
        assert [cut.step for cut in await critic.list_cuts()] == [2, 3]
        with pytest.raises(NotFoundError) as gone:
            await write_cut(at.speaker.mesh, 1, tmp_path / "gone", sequence=1)
        assert gone.value.reason == "CUT_NOT_FOUND"


async def test_cuts_are_dropped_once_their_checkpoint_is_written(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        dropping = asyncio.create_task(at.speaker.mesh["critic"].drop_cuts())
        await at.speaker.train(3)
        assert not dropping.done()
        writer.may_go_on.set()
        await dropping
        assert files_of(at.cut) == files_of(at.live)
        await at.saving
    assert remove_slots(run_id, "critic") == []


async def test_a_full_disk_is_told_and_the_role_goes_on(
    model: Path, tmp_path: Path, run_id: str, writer: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        writer.may_go_on.set()
        await at.saving
        monkeypatch.setattr(checkpoint_writing, "_free_bytes", lambda directory: 7)
        at.speaker.mesh.begin_step(2)
        critic = at.speaker.mesh["critic"]
        await critic.save_cut()
        for call in (
            write_cut(at.speaker.mesh, 2, tmp_path / "full"),
            critic.save_state(str(tmp_path / "full")),
        ):
            with pytest.raises(CapacityError) as full:
                await call
            assert full.value.reason == "CHECKPOINT_CAPACITY"
            assert "has 7 free" in full.value.message
        assert not (tmp_path / "full").exists()
        await at.speaker.train(3)


# --- what ends it -------------------------------------------------------------------------


async def test_an_attach_ends_the_writing_of_an_older_epoch(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with (
        scene(model, run_id, tmp_path, writer) as at,
        speaking(at.server.runtime.address, run_id, 2) as later,
    ):
        attaching = asyncio.create_task(later["critic"].attach(critic_spec(model), run_seed=3))
        await until(at.is_given_up)
        assert not attaching.done()
        writer.may_go_on.set()
        await attaching
        with pytest.raises(RolemeshError):
            await at.saving
        assert names_in(tmp_path) == ["live"]
        await writing_thread_ends()
        # The cut is whole, so the newer epoch writes the checkpoint.
        await write_cut(later, 1, at.cut)
        assert files_of(at.cut) == files_of(at.live)


async def test_a_second_initialize_ends_the_writing(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        slots = at.role._cut_slots
        assert slots is not None
        (reading,) = slots.readers._readings
        again = asyncio.create_task(at.speaker.mesh["critic"].initialize(critic_spec(model)))
        await until(reading._is_given_up.is_set)
        writer.may_go_on.set()
        await again
        with pytest.raises(UnavailableError, match="let go"):
            await at.saving
        await assert_nothing_is_left(at, run_id)
        assert at.server.runtime.hold.failure == ""


async def test_a_drain_lets_the_writing_come_to_its_end(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        draining = asyncio.create_task(at.speaker.mesh["critic"].drain())
        await until(lambda: at.server.runtime.hold._giving_back is not None)
        writer.may_go_on.set()
        await draining
        await at.saving
        assert files_of(at.cut) == files_of(at.live)
        at.cut.rename(tmp_path / "live" / "moved")
        await assert_nothing_is_left(at, run_id)


async def test_a_service_that_stops_gives_the_writing_up(
    model: Path, tmp_path: Path, run_id: str, writer: Held
) -> None:
    async with scene(model, run_id, tmp_path, writer) as at:
        stopping = asyncio.create_task(at.server.stop(work_timeout_s=0.01))
        await until(at.is_given_up)
        writer.may_go_on.set()
        await stopping
        with pytest.raises(RolemeshError):
            await at.saving
        await until(lambda: names_in(tmp_path) == ["live"])
        await writing_thread_ends()


# --- several ranks ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}], ids=["tp", "dp"])
async def test_ranks_write_a_cut_while_the_service_trains(
    model: Path, tmp_path: Path, run_id: str, layout: dict[str, int]
) -> None:
    flags = [flag for axis, size in layout.items() for flag in ("--layout", f"{axis}={size}")]
    async with batch_of_values() as batch:
        with process_of("critic", new_folder(tmp_path), *flags) as (address, process):
            async with speaking(address, run_id, 1) as mesh:
                speaker, critic = Speaker(mesh, batch, tmp_path), mesh["critic"]
                await critic.initialize(critic_spec(model, layout), run_seed=3)
                await speaker.train(1)
                await critic.save_cut()
                await critic.save_state(str(tmp_path / "live"))
                saving = asyncio.create_task(write_cut(mesh, 1, tmp_path / "cut"))
                await speaker.train(2)
                await critic.save_cut()
                assert (await saving).from_cut
                assert files_of(tmp_path / "cut") == files_of(tmp_path / "live")
                # A rank that dies in the middle of it leaves nothing that counts.
                (rank,) = ranks_of(forked(process.pid), "1")
                rank = forked(rank)
                os.kill(rank, signal.SIGSTOP)
                saving = asyncio.create_task(write_cut(mesh, 2, tmp_path / "killed"))
                await until(lambda: any(tmp_path.glob("killed.tmp-*/*")))
                os.kill(rank, signal.SIGKILL)
                with pytest.raises(RolemeshError):
                    await saving
                assert not [name for name in names_in(tmp_path) if name.startswith("killed")]
