"""A rollout service beside an actor: weights over the wire, tokens equal to the actor's own."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.in_flight_checks import halt_at, largest_difference, rows_with_versions
from support.mesh_runs import tiny_model
from support.rollout_checks import load_trainer_model, trained_copy
from support.rollout_services import Caller, process_of, rows_of, shards_of
from support.services import assert_same, segments_of, serving
from support.warm_processes import forked

from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import num_elements
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.rollout import updates
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.services.runtime.experience.published_weights import fetch_boxes
from rolemesh.v1 import weights_pb2, weights_pb2_grpc

FLOAT32_LOGPROB = 2e-5
"""Log-probs near -6 in float32, summed in another order over 2 layers: a few of its 5e-7 steps."""
HF = {"type": "hf", "max_model_len": 256, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def actor_spec(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "optimizer": {"learning_rate": 1e-2},
        "rollout": HF,
        **changes,
    }


def rollout_spec(model: Path, **changes: Any) -> dict[str, Any]:
    return {"model": {"path": str(model)}, "rollout": HF, **changes}


class Pair:
    """An actor and a rollout service on this loop."""

    def __init__(self, actor: Any, rollout: Any) -> None:
        self.actor_server, self.rollout_server = actor, rollout
        self.actor = Caller(actor.runtime.address)
        self.rollout = Caller(rollout.runtime.address)

    async def bring(self, dtype: str = "float32") -> Any:
        return await self.rollout.take((await self.actor.publish(dtype)).weights)


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts both; settings are those of the rollout service."""
    async with AsyncExitStack() as stack:

        async def begin(**settings: Any) -> Pair:
            actor = await stack.enter_async_context(serving(ActorRole(), **settings))
            rollout = await stack.enter_async_context(serving(RolloutRole(), **settings))
            pair = Pair(actor, rollout)
            for caller in (pair.actor, pair.rollout):
                stack.push_async_callback(caller.channel.close)
            await pair.actor.initialize(**actor_spec(model))
            answer = await pair.rollout.initialize(**rollout_spec(model))
            assert answer.policy_version == -1
            return pair

        yield begin


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shm", "grpc"])
async def test_tokens_are_those_of_an_actor_that_samples_itself(
    start: Callable[..., Any], shares_memory: bool
) -> None:
    pair = await start(shared_memory=shares_memory)
    trained = await pair.actor.generate(0, count=6)
    for version in (0, 3):
        answer = await pair.bring()
        assert answer.policy_version == version
        taken, own = await pair.rollout.generate(7), await pair.actor.generate(7)
        assert_same(await rows_of(taken.experience), await rows_of(own.experience))
        assert (await rows_of(taken.experience))["policy_versions"].values.unique() == version
        samplers = await pair.rollout.checksums()
        assert samplers.policy_version == version
        assert samplers.checksums == (await pair.actor.checksums()).checksums
        # Each box once: all weights, tied ones once, in float32.
        manifest = pair.rollout_server.runtime.role.manifest.values()
        expected = 4 * sum(num_elements(parameter.box) for parameter in manifest)
        transport = "shm" if shares_memory else "grpc"
        assert answer.report.metrics["weight_sync_bytes"] == expected
        assert dict(answer.report.fetched_bytes) == {transport: expected}
        if version == 0:
            assert await pair.actor.train(trained.experience, version=0) == 3


async def test_bfloat16_travels_at_half_the_bytes(start: Callable[..., Any]) -> None:
    pair = await start()
    whole = (await pair.bring()).report.metrics["weight_sync_bytes"]
    half = await pair.bring("bfloat16")
    assert half.report.metrics["weight_sync_bytes"] == whole / 2
    trainer = pair.actor_server.runtime.role.trainer
    held = dict(pair.rollout_server.runtime.role.backend._model.named_parameters())
    for name, weight in trainer.named_weights():
        assert torch.equal(held[name], weight.bfloat16().float()), name


async def test_part_of_a_slice_is_sampled_like_the_whole(start: Callable[..., Any]) -> None:
    pair = await start()
    await pair.bring()
    whole = await rows_of((await pair.rollout.generate(3, count=4)).experience)
    for start_at in (0, 2):
        half = await rows_of((await pair.rollout.generate(3, start=start_at, count=2)).experience)
        tokens = whole.slice(2 * start_at, 2 * start_at + 4)["tokens"]
        # Rounding differs with the neighbours by 1e-6: 96 draws, odds of a change below 1 in 1,000.
        assert torch.equal(half["tokens"].values, tokens.values)


async def test_nothing_is_sampled_before_weights_came(start: Callable[..., Any]) -> None:
    pair = await start()
    with pytest.raises(PreconditionError, match="holds no weights") as caught:
        await pair.rollout.generate(0)
    assert caught.value.reason == "WEIGHTS_STALE"


async def test_a_version_that_is_gone_is_refused_until_the_newest_comes(
    start: Callable[..., Any],
) -> None:
    pair = await start()
    old = (await pair.actor.publish()).weights
    await pair.rollout.take(old)
    batch = await pair.actor.generate(0, count=6)
    await pair.actor.train(batch.experience, version=0)
    new = (await pair.actor.publish()).weights
    with pytest.raises(PreconditionError, match="version 3 of it is published") as caught:
        await pair.rollout.take(old)
    assert caught.value.reason == "WEIGHTS_GONE"
    with pytest.raises(PreconditionError, match="still holds version 0") as caught:
        await pair.rollout.generate(1)
    assert caught.value.reason == "WEIGHTS_STALE"
    assert (await pair.rollout.take(new)).policy_version == 3
    await pair.rollout.generate(1)


async def test_updates_take_effect_in_the_order_in_which_they_came(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first one takes long to travel: the sampler must not go back to old weights."""
    pair = await start()
    fetched, go_on = asyncio.Event(), asyncio.Event()

    async def slow_at_first(*asked: Any) -> Any:
        found = await fetch_boxes(*asked)
        if not fetched.is_set():
            fetched.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(updates, "fetch_boxes", slow_at_first)
    batch = await pair.actor.generate(0, count=6)
    older = asyncio.create_task(pair.bring())
    await fetched.wait()
    assert await pair.actor.train(batch.experience, version=0) == 3
    newer = asyncio.create_task(pair.bring())
    # Time enough for it to overtake, if it could.
    await asyncio.wait({newer}, timeout=2.0)
    go_on.set()
    assert [(await update).policy_version for update in (older, newer)] == [0, 3]
    assert (await pair.rollout.checksums()).policy_version == 3


async def test_weights_of_another_model_are_refused(start: Callable[..., Any]) -> None:
    pair = await start()
    weights = (await pair.actor.publish()).weights
    del weights.parameters[3]
    with pytest.raises(InvalidRequestError, match="absent in the published") as caught:
        await pair.rollout.take(weights)
    assert caught.value.reason == "MANIFEST_MISMATCH"


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"layout": {"tp": "2"}}, "REFERENCE_INVALID", "1 entries, but the layout has 2 ranks"),
        ({"layout": {"tp": "zwei"}}, "SPEC_INVALID", "tp is 'zwei'"),
        ({"dtype": 0}, "SPEC_INVALID", "weights.dtype is 0"),
        ({"policy_version": -1}, "REFERENCE_INVALID", "policy_version is -1"),
    ],
)
async def test_a_wrong_reference_names_what_is_wrong(
    start: Callable[..., Any], change: dict[str, Any], reason: str, words: str
) -> None:
    pair = await start()
    weights = (await pair.actor.publish()).weights
    for field, value in change.items():
        if field == "layout":
            weights.layout.clear()
            weights.layout.update(value)
        else:
            setattr(weights, field, value)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await pair.rollout.take(weights)
    assert caught.value.reason == reason


async def test_a_publisher_gives_only_boxes_that_it_has(start: Callable[..., Any]) -> None:
    pair = await start()
    weights = (await pair.actor.publish()).weights
    stub = weights_pb2_grpc.WeightsServiceStub(pair.actor.channel)
    request = weights_pb2.FetchWeightsRequest(
        run_id="run",
        policy_version=0,
        boxes=[weights_pb2.WeightsBox(parameter="model.norm.weight", start=[0], stop=[65])],
    )
    with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight") as caught:
        _ = [part async for part in stub.FetchWeights(request)]
    assert caught.value.reason == "BOX_INVALID"
    # What travels is what any protobuf reader understands.
    request.boxes[0].stop[0] = 64
    parts = [part async for part in stub.FetchWeights(request)]
    assert parts[0].header.total_bytes == 4 * 64 == sum(len(part.chunk) for part in parts[1:])
    norm = dict(pair.actor_server.runtime.role.trainer.named_weights())["model.norm.weight"]
    assert parts[1].chunk == norm.numpy().tobytes()
    assert weights.parameters[0].name == "model.embed_tokens.weight"


async def test_an_actor_takes_no_weights_and_a_rollout_publishes_none(
    start: Callable[..., Any],
) -> None:
    pair = await start()
    weights = (await pair.actor.publish()).weights
    with pytest.raises(UnsupportedError, match="its own trainer's weights"):
        await pair.actor.take(weights)
    with pytest.raises(UnsupportedError, match="published by the actor"):
        await pair.rollout.publish()


async def test_shared_memory_is_freed_with_the_run(model: Path) -> None:
    # Those of an earlier test may still be freed during this one.
    before = set(segments_of(os.getpid()))
    async with serving(ActorRole()) as server:
        actor = Caller(server.runtime.address)
        await actor.initialize(**actor_spec(model))
        await actor.publish()
        first = set(segments_of(os.getpid())) - before
        await actor.publish()
        second = set(segments_of(os.getpid())) - before
        # One version at a time.
        assert len(first) == len(second) == 1
        assert first != second
        await actor.channel.close()
    assert not set(segments_of(os.getpid())) - before


async def test_old_versions_are_unmapped(start: Callable[..., Any]) -> None:
    pair = await start()
    for _ in range(3):
        await pair.bring()
        await pair.rollout.generate(0, count=1)
    gc.collect()
    mapped = {line.path for line in psutil.Process().memory_maps() if "/rolemesh-" in line.path}
    # The publisher's own, of the version that it publishes.
    assert len(mapped) == 1
    assert mapped == {str(SHM_DIRECTORY / name) for name in segments_of(os.getpid())}


# --- weights in the middle of a generation ------------------------------------------------


async def test_weights_come_between_two_steps_of_a_generation(
    start: Callable[..., Any], model: Path
) -> None:
    pair = await start()
    await pair.bring()
    batch = await pair.actor.generate(0, count=6)
    old = load_trainer_model(model)
    arrived = halt_at(pair.rollout_server.runtime.role, 5)
    await pair.actor.train(batch.experience, version=0)
    weights = (await pair.actor.publish()).weights
    generating = asyncio.create_task(pair.rollout.generate(2, max_new_tokens=12))
    await arrived.wait()
    answer = await pair.rollout.take(weights)
    assert answer.policy_version == 3
    assert not generating.done()
    rows = await rows_of((await generating).experience)
    for _, completion, versions in rows_with_versions(rows):
        assert versions == [0 if at < 5 else 3 for at in range(len(completion))]
    new = trained_copy(old, pair.actor_server.runtime.role.trainer.named_weights())
    assert largest_difference({0: old, 3: new}, rows) < FLOAT32_LOGPROB
    assert largest_difference({0: old, 3: old}, rows) > 100 * FLOAT32_LOGPROB


# --- services of their own ----------------------------------------------------------------

LAYOUTS = {"tp2": {"tp": 2}, "fsdp2": {"dp": 2, "fsdp": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def spread_actor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, int]]]:
    """An actor of two ranks in processes of its own."""
    layout = LAYOUTS[request.param]
    flag = ",".join(f"{name}={value}" for name, value in layout.items())
    with process_of("actor", tmp_path_factory.mktemp("actor"), "--layout", flag) as (address, _):
        yield address, layout


@pytest.mark.slow
async def test_an_actor_of_two_ranks_feeds_a_rollout_of_one(
    spread_actor: tuple[str, dict[str, int]], model: Path
) -> None:
    address, layout = spread_actor
    actor = Caller(address)
    async with serving(RolloutRole()) as server:
        rollout = Caller(server.runtime.address)
        await actor.initialize(**actor_spec(model, train=layout, generate={"tp": 1}))
        await rollout.initialize(**rollout_spec(model))
        published = await actor.publish()
        assert len(published.weights.addresses) == 2
        await rollout.take(published.weights)
        # The very weights of the folder, whatever parts they came in.
        batch = await rollout.generate(0, count=6)
        assert await actor.train(batch.experience, version=0) == 3
        answer = await rollout.take((await actor.publish()).weights)
        expected = sum(num_elements(p.box) for p in server.runtime.role.manifest.values())
        assert answer.report.metrics["weight_sync_bytes"] == 4 * expected
        # The actor's own sampler got there by resharding among its ranks.
        own, taken = await actor.generate(9), await rollout.generate(9)
        assert (await rollout.checksums()).checksums == (await actor.checksums()).checksums
        assert taken.experience.num_rows == own.experience.num_rows == 8
        mine, theirs = await rows_of(taken.experience), await shards_of(own.experience)
        # Two ranks sample with other neighbours than one does, which moves a probability by 1e-6:
        # 96 draws, odds of a change below 1 in 1,000.
        assert torch.equal(mine["tokens"].values, theirs["tokens"].values)
    await actor.channel.close()
    await rollout.channel.close()


async def test_a_publisher_that_dies_mid_fetch_is_named_and_nothing_is_sampled(
    model: Path, tmp_path: Path
) -> None:
    with process_of("actor", tmp_path, "--no-shared-memory") as (address, process):
        pid = forked(process.pid)
        actor = Caller(address)
        async with serving(RolloutRole(), shared_memory=False) as server:
            rollout = Caller(server.runtime.address)
            await actor.initialize(**actor_spec(model))
            await rollout.initialize(**rollout_spec(model))
            published = await actor.publish()
            await rollout.take(published.weights)
            # Stopped, it neither sends nor says that it is gone; killed, its connection breaks.
            os.kill(pid, signal.SIGSTOP)
            taking = asyncio.create_task(rollout.take(published.weights))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            # Its port is free: a service of another worker's test may answer there by now.
            died = (UnavailableError, UnsupportedError)
            with pytest.raises(died, match=f"rank 0 at {address}"):
                await taking
            with pytest.raises(PreconditionError, match="update to policy_version 0 failed"):
                await rollout.generate(1)
            assert server.runtime.role.policy_version() == 0
            await rollout.channel.close()
        await actor.channel.close()
    assert not list(SHM_DIRECTORY.glob(f"rolemesh-{pid}-*"))


@pytest.mark.slow
async def test_replicas_of_a_service_take_weights_together_or_not_at_all(
    model: Path, tmp_path: Path
) -> None:
    with process_of("rollout", tmp_path, "--layout", "dp=2") as (address, process):
        rollout = Caller(address)
        async with serving(ActorRole()) as server:
            actor = Caller(server.runtime.address)
            await actor.initialize(**actor_spec(model))
            await rollout.initialize(**rollout_spec(model, layout={"dp": 2}))
            old = (await actor.publish()).weights
            answer = await rollout.take(old)
            manifest = await weights_pb2_grpc.WeightsServiceStub(rollout.channel).GetManifest(
                weights_pb2.GetManifestRequest()
            )
            elements = sum(torch.Size(list(one.shape)).numel() for one in manifest.parameters)
            assert answer.report.metrics["weight_sync_bytes"] == 2 * 4 * elements
            held = await rollout.checksums()
            assert held.checksums == held.other_ranks[0].checksums
            # Both replicas' shares of the prompts, in order.
            mine = await shards_of((await rollout.generate(4)).experience)
            own = await rows_of((await actor.generate(4)).experience)
            assert torch.equal(mine["tokens"].values, own["tokens"].values)
            assert mine["prompt_ids"].values.tolist() == own["prompt_ids"].values.tolist()
            await actor.train((await actor.generate(0, count=6)).experience, version=0)
            new = (await actor.publish()).weights
            with pytest.raises(PreconditionError, match="version 3 of it is published"):
                await rollout.take(old)
            with pytest.raises(PreconditionError, match="update to policy_version 0 failed"):
                await rollout.generate(5)
            assert process.poll() is None
            assert (await rollout.take(new)).policy_version == 3
            held = await rollout.checksums()
            assert held.policy_version == held.other_ranks[0].policy_version == 3
            await actor.channel.close()
        await rollout.channel.close()


@pytest.mark.slow
async def test_slices_of_a_vllm_service_take_their_own_parts(model: Path, tmp_path: Path) -> None:
    rollout_flags = ("--layout", "tp=2")
    spec = {"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    (tmp_path / "actor").mkdir()
    with (
        process_of("rollout", tmp_path, *rollout_flags) as (address, _),
        process_of("actor", tmp_path / "actor", "--layout", "tp=2") as (actor_address, _),
    ):
        rollout, actor = Caller(address), Caller(actor_address)
        await asyncio.gather(
            rollout.initialize(**rollout_spec(model, rollout=spec, layout={"tp": 2})),
            actor.initialize(**actor_spec(model, train={"tp": 2})),
        )
        batch = await actor.generate(0, count=6)
        await actor.train(batch.experience, version=0)
        answer = await rollout.take((await actor.publish()).weights)
        shape = DecoderShape.from_config(json.loads((model / "config.json").read_text()))
        layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
        held = generate_layout(shape, layout, "float32")
        parts = sum(num_elements(p.box) for rank in held.ranks for p in rank.pieces)
        assert answer.report.metrics["weight_sync_bytes"] == 4 * parts
        # Cut alike, so the trainer's slices are the sampler's: hash by hash where neither fuses.
        mine, theirs = await rollout.checksums(), await actor.checksums("TRAINER")
        pairs = [
            (mine.checksums, theirs.checksums),
            (mine.other_ranks[0].checksums, theirs.other_ranks[0].checksums),
        ]
        for sampler, trainer in pairs:
            common = sampler.keys() & trainer.keys() - {"model.embed_tokens.weight"}
            assert len(common) == len(trainer) - 1
            assert all(sampler[name] == trainer[name] for name in common)
        own, taken = await actor.generate(9, greedy=True), await rollout.generate(9, greedy=True)
        mine_rows, own_rows = await rows_of(taken.experience), await shards_of(own.experience)
        # Greedy: two engines round by 1e-6 differently, gaps between logits are 1e-2 here.
        assert torch.equal(mine_rows["tokens"].values, own_rows["tokens"].values)
        assert mine_rows["policy_versions"].values.unique().tolist() == [3]
        for caller in (rollout, actor):
            await caller.channel.close()


async def test_a_full_shared_memory_is_said(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start()

    def full(num_bytes: int) -> Segment:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Segment, "create", full)
    with pytest.raises(CapacityError, match="enlarge /dev/shm") as caught:
        await pair.actor.publish()
    assert caught.value.reason == "EXPERIENCE_CAPACITY"
