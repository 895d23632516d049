"""Cuts of real services: they outlive kill -9, and a survivor that is attached returns to one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.cut_services import QUICK, Speaker, batch_of_values, critic_spec, new_folder, speaking
from support.rollout_services import DATA, process_of
from support.services import serving
from support.tiny_models import write_tiny_llama
from support.warm_processes import forked

from rolemesh.coordinator.sdk import (
    AsyncMesh,
    PromptSlice,
    RetryPolicy,
    Status,
    WorkerState,
)
from rolemesh.engine.transport.slots.slot_files import SlotRoomError
from rolemesh.engine.transport.slots.slots import Slot, remove_slots
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.rollout.servicers import RolloutRole

AT_ONCE = RetryPolicy(budget_s=0.1, first_s=0.01, longest_s=0.05)
ONE_AT_A_TIME = {"type": "hf", "max_model_len": 160, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run of this test alone, whose cuts do not outlive it."""
    run_id = f"cuts-{uuid.uuid4().hex}"
    yield run_id
    for role in ("actor", "critic"):
        remove_slots(run_id, role)


def actor_spec(model: Path) -> dict[str, Any]:
    spec = critic_spec(model)
    del spec["train"]
    return {**spec, "rollout": ONE_AT_A_TIME, "data": DATA}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one"),
        pytest.param({"tp": 2}, id="tp", marks=pytest.mark.slow),
        pytest.param({"dp": 2}, id="dp", marks=pytest.mark.slow),
    ],
)
async def test_a_service_that_was_killed_goes_on_from_its_cut_bit_for_bit(
    model: Path, tmp_path: Path, run_id: str, layout: dict[str, int]
) -> None:
    flags = [flag for axis, size in layout.items() for flag in ("--layout", f"{axis}={size}")]
    spec = critic_spec(model, layout)
    async with batch_of_values() as batch:
        with process_of("critic", new_folder(tmp_path), *flags) as (address, process):
            async with speaking(address, run_id, 1) as mesh:
                speaker = Speaker(mesh, batch, tmp_path)
                critic = mesh["critic"]
                await critic.initialize(spec, run_seed=3)
                await speaker.train(1)
                await critic.save_cut()
                await speaker.train(2)
                saved = await critic.save_cut()
                at_two = await speaker.fingerprint()
                metrics, at_three = await speaker.train(3), await speaker.fingerprint()
                assert at_three != at_two

                # The same process returns to the cut.
                mesh.begin_step(2)
                assert await critic.restore_cut(2) == saved
                assert await speaker.fingerprint() == at_two
                assert await speaker.train(3) == metrics
                assert await speaker.fingerprint() == at_three
                assert [cut.step for cut in await critic.list_cuts()] == [1, 2]
            os.kill(forked(process.pid), signal.SIGKILL)
            process.wait(30)
        with process_of("critic", new_folder(tmp_path), *flags) as (address, _):
            async with speaking(address, run_id, 2) as mesh:
                speaker = Speaker(mesh, batch, tmp_path)
                critic = mesh["critic"]
                # A service that holds nothing yet says what it could go on from.
                assert [cut.step for cut in await critic.list_cuts()] == [1, 2]
                assert (await critic.list_cuts())[1] == saved
                await critic.initialize(spec, run_seed=3)
                mesh.begin_step(2)
                assert await critic.restore_cut(2) == saved
                assert await speaker.fingerprint() == at_two
                assert await speaker.train(3) == metrics
                assert await speaker.fingerprint() == at_three
        # An orderly end keeps the cuts as well; only a drop removes them.
        with process_of("critic", new_folder(tmp_path), *flags) as (address, _):
            async with speaking(address, run_id, 3) as mesh:
                critic = mesh["critic"]
                assert [cut.step for cut in await critic.list_cuts()] == [1, 2]
                await critic.drop_cuts()
                assert await critic.list_cuts() == ()
    assert remove_slots(run_id, "critic") == []


@pytest.mark.slow
async def test_a_service_killed_while_it_saves_never_names_a_torn_cut(
    model: Path, tmp_path: Path, run_id: str
) -> None:
    draw = random.Random(3)
    spec = critic_spec(model)
    fingerprints: dict[int, str] = {}
    async with batch_of_values() as batch:
        step = 1
        for epoch in range(1, 6):
            with process_of("critic", new_folder(tmp_path)) as (address, process):
                async with AsyncMesh(
                    {"critic": address}, run_id=run_id, epoch=epoch, retry=AT_ONCE
                ) as mesh:
                    speaker = Speaker(mesh, batch, tmp_path)
                    critic = mesh["critic"]
                    listed = [cut.step for cut in await critic.list_cuts()]
                    await critic.initialize(spec, run_seed=3)
                    for older in reversed(listed):
                        mesh.begin_step(older)
                        await critic.restore_cut(older)
                        assert await speaker.fingerprint() == fingerprints[older]
                    if epoch > 1:
                        # The cut before the last one that was told is whole at least.
                        assert listed, "no cut survived"
                        assert listed[-1] >= step - 1
                        step = listed[0] + 1
                    kill = asyncio.create_task(
                        killed(forked(process.pid), 0.5 + 0.5 * draw.random())
                    )
                    with contextlib.suppress(RolemeshError):
                        while True:
                            await speaker.train(step)
                            fingerprints[step] = await speaker.fingerprint()
                            for _ in range(50):  # so that most of the time goes to copies
                                await critic.save_cut()
                            step += 1
                    await kill
                process.wait(30)


async def killed(pid: int, after_s: float) -> None:
    await asyncio.sleep(after_s)
    os.kill(pid, signal.SIGKILL)


async def test_what_a_cut_cannot_do_is_refused_by_reason_and_the_service_goes_on(
    model: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        batch_of_values() as batch,
        serving(CriticRole()) as server,
        speaking(server.runtime.address, run_id, 5) as mesh,
    ):
        critic = mesh["critic"]
        with pytest.raises(PreconditionError) as early:
            await critic.save_cut()
        assert early.value.reason == "NOT_INITIALIZED"
        await critic.initialize(critic_spec(model))
        with pytest.raises(NotFoundError) as absent:
            await critic.restore_cut(4)
        assert absent.value.reason == "CUT_NOT_FOUND"

        create = Slot.create

        def full(*given: Any) -> Slot:
            raise SlotRoomError("no room: enlarge /dev/shm")

        monkeypatch.setattr(Slot, "create", staticmethod(full))
        with pytest.raises(CapacityError) as room:
            await critic.save_cut()
        assert room.value.reason == "CUT_CAPACITY"
        monkeypatch.setattr(Slot, "create", staticmethod(create))
        await critic.save_cut()

        await critic.forward_backward(batch, "ppo_value")
        with pytest.raises(PreconditionError) as pending:
            await critic.save_cut()
        assert pending.value.reason == "GRADIENT_PENDING"

        await critic.initialize(
            {**critic_spec(model), "model": {"path": str(model), "num_layers": 1}}
        )
        with pytest.raises(InvalidRequestError) as other:
            await critic.restore_cut(0)
        assert other.value.reason == "CUT_MISMATCH"
        assert "layers.1" in other.value.message
        assert (await critic.status()).state is WorkerState.READY

        async with speaking(server.runtime.address, run_id, 4) as older:
            with pytest.raises(PreconditionError) as stale:
                await older["critic"].drop_cuts()
        assert stale.value.reason == "STALE_EPOCH"
        assert [cut.step for cut in await critic.list_cuts()] == [0]
        async with speaking(server.runtime.address, "", 5) as nameless:
            for call in (nameless["critic"].list_cuts(), nameless["critic"].drop_cuts()):
                with pytest.raises(InvalidRequestError) as wrong:
                    await call
                assert wrong.value.reason == "KEY_INVALID"


async def test_a_service_keeps_no_cuts_of_a_run_whose_place_another_one_has_taken(
    model: Path, run_id: str
) -> None:
    other = f"{run_id}-other"
    try:
        async with serving(CriticRole()) as server:
            address = server.runtime.address
            async with speaking(address, run_id, 1) as mesh:
                await mesh["critic"].initialize(critic_spec(model))
                await mesh["critic"].save_cut()
                await mesh["critic"].drain()
                async with speaking(address, other, 1) as later:
                    await later["critic"].initialize(critic_spec(model))
                    assert await later["critic"].list_cuts() == ()
                    # They go with its first cut, and not before.
                    assert [cut.step for cut in await mesh["critic"].list_cuts()] == [0]
                    later.begin_step(1)
                    await later["critic"].save_cut()
                    assert [cut.step for cut in await later["critic"].list_cuts()] == [1]
                    await later["critic"].drop_cuts()
                assert await mesh["critic"].list_cuts() == ()
    finally:
        remove_slots(other, "critic")


# --- attach -------------------------------------------------------------------------------


async def until_working(mesh: AsyncMesh, name: str, operation: str) -> Status:
    """Waits until the service has made a part of an operation."""
    async with asyncio.timeout(60):
        while True:
            status = await mesh[name].status()
            if operation in status.operation and status.progress and " 0/" not in status.progress:
                return status
            await asyncio.sleep(0.01)


async def test_an_actor_gives_a_generation_up_and_samples_again_with_the_same_model(
    model: Path, tmp_path: Path, run_id: str
) -> None:
    many = {"samples_per_prompt": 16, "max_new_tokens": 100}
    prompts = PromptSlice(start=0, count=16)
    with process_of("actor", tmp_path) as (address, process):
        async with speaking(address, run_id, 1, name="actor") as mesh:
            actor = mesh["actor"]
            first = await actor.initialize(actor_spec(model), run_seed=3)
            batch = await actor.sample(PromptSlice(start=0, count=2), max_new_tokens=8)
            tokens = (await mesh.fetch(batch, ["tokens"]))["tokens"].values.tolist()
            await actor.publish_weights("float32")
            weights = await actor.get_checksums()
            resident = forked(process.pid)
            working = asyncio.create_task(actor.sample(prompts, **many))
            await until_working(mesh, "actor", "generate")
            async with speaking(address, run_id, 2, name="actor") as later:
                attached = await later["actor"].attach(actor_spec(model), run_seed=3)
                assert attached == first
                with pytest.raises(RolemeshError) as given_up:
                    await working
                assert given_up.value.reason in ("SERVICE_DRAINING", "STALE_EPOCH")
                status = await later["actor"].status()
                assert status.state is WorkerState.READY
                with pytest.raises(NotFoundError):
                    await later.fetch(batch)
                os.kill(resident, 0)
                assert await later["actor"].get_checksums() == weights
                again = await later["actor"].sample(PromptSlice(start=0, count=2), max_new_tokens=8)
                found = (await later.fetch(again, ["tokens"]))["tokens"].values.tolist()
                assert found == tokens


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["one", "tp"])
async def test_a_survivor_gives_an_update_up_and_returns_to_the_cut(
    model: Path, tmp_path: Path, run_id: str, layout: dict[str, int]
) -> None:
    flags = [flag for axis, size in layout.items() for flag in ("--layout", f"{axis}={size}")]
    spec = critic_spec(model, layout)
    async with batch_of_values() as batch:
        with process_of("critic", new_folder(tmp_path), *flags) as (address, process):
            async with speaking(address, run_id, 1) as mesh:
                speaker = Speaker(mesh, batch, tmp_path)
                critic = mesh["critic"]
                await critic.initialize(spec, run_seed=3)
                await speaker.train(1)
                cut = await critic.save_cut()
                at_one = await speaker.fingerprint()
                metrics, at_two = await speaker.train(2), await speaker.fingerprint()
                mesh.begin_step(3)
                working = asyncio.create_task(
                    critic.update(batch, "ppo_value", epochs=2000, mini_batch_rows=3)
                )
                await until_working(mesh, "critic", "update")
                async with speaking(address, run_id, 2) as later:
                    after = Speaker(later, batch, tmp_path)
                    attached = await later["critic"].attach(spec, run_seed=3)
                    with pytest.raises((UnavailableError, PreconditionError)):
                        await working
                    # The update was in the middle of its optimizer steps.
                    assert cut.policy_version < attached.policy_version < 6000
                    assert [one.step for one in await later["critic"].list_cuts()] == [1]
                    later.begin_step(1)
                    assert await later["critic"].restore_cut(1) == cut
                    assert await after.fingerprint() == at_one
                    assert await after.train(2) == metrics
                    assert await after.fingerprint() == at_two
            assert process.poll() is None


async def test_a_rollout_service_takes_weights_anew_though_their_version_is_the_same(
    model: Path, run_id: str
) -> None:
    rollout_spec = {
        "model": {"path": str(model)},
        "rollout": {**ONE_AT_A_TIME, "max_num_seqs": 4},
        "data": DATA,
    }
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(serving(role))
            for name, role in (("actor", ActorRole()), ("rollout", RolloutRole()))
        }
        addresses = {name: server.runtime.address for name, server in servers.items()}
        mesh = await stack.enter_async_context(
            AsyncMesh(addresses, run_id=run_id, epoch=1, retry=QUICK)
        )
        actor_part = actor_spec(model)
        await mesh["actor"].initialize(actor_part)
        await mesh["rollout"].initialize(rollout_spec)
        weights = await mesh["actor"].publish_weights("float32")
        assert (await mesh["rollout"].update_weights(weights)).policy_version == 0
        prompts = PromptSlice(start=0, count=1)
        await mesh["rollout"].sample(prompts, max_new_tokens=4)
        later = await stack.enter_async_context(
            AsyncMesh(addresses, run_id=run_id, epoch=2, retry=QUICK)
        )
        await later["actor"].attach(actor_part)
        attached = await later["rollout"].attach(rollout_spec)
        assert attached.policy_version == -1
        assert (await later["rollout"].status()).policy_version == -1
        with pytest.raises(PreconditionError) as stale:
            await later["rollout"].sample(prompts, max_new_tokens=4)
        assert stale.value.reason == "WEIGHTS_STALE"
        assert "began anew" in stale.value.message
        # What the older epoch published is gone with it.
        with pytest.raises(PreconditionError) as gone:
            await later["rollout"].update_weights(weights)
        assert gone.value.reason == "WEIGHTS_GONE"
        anew = await later["actor"].publish_weights("float32")
        assert (await later["rollout"].update_weights(anew)).policy_version == 0
        assert (await later["rollout"].status()).policy_version == 0
        await later["rollout"].sample(prompts, max_new_tokens=4)
