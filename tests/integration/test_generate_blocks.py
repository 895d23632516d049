"""Generate with blocks: finished rows leave ahead of the rest, from one rank and from several."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.scripted_sampler import NUM_PROMPTS, SCRIPT, SamplerRole, ScriptedBackend
from support.service_calls import initialize, pulled
from support.services import ServiceProcess, assert_same, operation_key, serving, spawn_service

from rolemesh.engine.experience import Experience
from rolemesh.engine.rollout.requests import LaterRequests, RolloutRequest, RolloutTrajectory
from rolemesh.engine.specs import SamplingSpec
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError
from rolemesh.rpc.limits import MAX_ROWS
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.v1 import (
    experience_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
)

LAYOUT = {"dp": 2}

EPOCHS = itertools.count(1)
"""Of the tests that share a service."""


def generate(
    channel: MeshChannel,
    *,
    start: int = 0,
    batch_start: int | None = None,
    prompts: int = 5,
    block_rows: int = 4,
    samples: int = 2,
    **key: Any,
) -> Any:
    request = rollout_pb2.GenerateRequest(
        key=operation_key("generate", **key),
        prompts=rollout_pb2.PromptSlice(
            split=rollout_pb2.SPLIT_TRAIN, start=start, count=prompts, batch_start=batch_start
        ),
        sampling=rollout_pb2.Sampling(
            samples_per_prompt=samples, temperature=1, top_p=1, top_k=-1, max_new_tokens=8
        ),
        block_rows=block_rows,
    )
    return aiter(rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request))


async def all_of(
    call: AsyncIterator[Any],
) -> tuple[list[rollout_pb2.GeneratedBlock], experience_pb2.ExperienceRef]:
    """Blocks as they came, and the result, which must be last."""
    kinds, blocks, result = [], [], None
    async for message in call:
        kinds.append(message.WhichOneof("event"))
        if kinds[-1] == "block":
            blocks.append(message.block)
        elif kinds[-1] == "result":
            result = message.result.experience
    assert result is not None
    assert kinds.index("result") == len(kinds) - 1
    return blocks, result


async def assert_blocks_are_rows_of(
    runtime: Runtime,
    blocks: Sequence[rollout_pb2.GeneratedBlock],
    result: experience_pb2.ExperienceRef,
    block_rows: int = 4,
) -> Experience:
    whole = await pulled(runtime, result)
    assert sorted(block.index for block in blocks) == list(range(-(-len(whole) // block_rows)))
    for block in blocks:
        start = block.index * block_rows
        stop = min(start + block_rows, len(whole))
        assert block.experience.num_rows == stop - start
        assert_same(await pulled(runtime, block.experience), whole.slice(start, stop))
    # The result names the blocks' own shards.
    assert {shard.experience_id for block in blocks for shard in shards_of(block.experience)} == {
        shard.experience_id for shard in shards_of(result)
    }
    return whole


def shards_of(ref: experience_pb2.ExperienceRef) -> Sequence[experience_pb2.Shard]:
    return ref.groups[0].shards


# --- one rank -------------------------------------------------------------------------------


async def test_blocks_leave_while_the_tail_decodes_and_every_listener_gets_all() -> None:
    gate = threading.Event()

    def order(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
        yield from requests[4:8]
        gate.wait()
        yield from [*requests[8:], *requests[:4]]

    role = SamplerRole(ScriptedBackend(order=order))
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        try:
            first = generate(channel)
            early = [message async for message in _until_block(first)]
            # A repeat in the middle hears what was told before it came.
            second = generate(channel)
            early += [message async for message in _until_block(second)]
        finally:
            gate.set()
        assert [message.block.index for message in early] == [1, 1]
        (blocks, result), (again, again_result) = await asyncio.gather(
            all_of(first), all_of(second)
        )
        assert [block.index for block in blocks] == [2, 0]
        assert again == blocks
        # A repeat after the end gets all of it, too.
        later, later_result = await all_of(generate(channel))
        assert later == [early[0].block, *blocks]
        assert result == again_result == later_result
        whole = await assert_blocks_are_rows_of(server.runtime, later, result)
        assert role.backend.calls[1:] == [], "it was sampled once"  # type: ignore[attr-defined]
        assert server.runtime.store.held_bytes == whole.num_bytes + _offsets_bytes(whole, later)


async def _until_block(call: Any) -> AsyncIterator[Any]:
    while True:
        message = await anext(call)
        if message.WhichOneof("event") == "block":
            yield message
            return


def _offsets_bytes(whole: Experience, blocks: Sequence[Any]) -> int:
    """Each ragged column has one more offset in each further shard."""
    ragged = [column for column in whole.columns.values() if column.offsets is not None]
    return 8 * len(ragged) * (len(blocks) - 1)


async def test_the_batch_is_the_same_with_and_without_blocks() -> None:
    async with serving(SamplerRole()) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        batches = []
        for sequence, block_rows in enumerate((0, 2, 4, 64)):
            blocks, result = await all_of(
                generate(channel, block_rows=block_rows, sequence=sequence)
            )
            assert bool(blocks) == bool(block_rows)
            batches.append(await pulled(server.runtime, result))
        for batch in batches[1:]:
            assert_same(batch, batches[0])


async def test_slices_of_a_batch_hold_the_rows_that_it_has_as_a_whole() -> None:
    """Also of prompts that stand in it twice: their samples are numbered through, and differ."""
    start, count, cut = NUM_PROMPTS - 3, NUM_PROMPTS + 6, NUM_PROMPTS - 1
    async with serving(SamplerRole()) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)

        async def rows(sequence: int, **asked: int) -> Experience:
            call = generate(channel, block_rows=0, sequence=sequence, **asked)
            return await pulled(server.runtime, (await all_of(call))[1])

        whole = await rows(0, start=start, prompts=count)
        first = await rows(1, start=start, prompts=cut, batch_start=start)
        rest = await rows(2, start=start + cut, prompts=count - cut, batch_start=start)
        assert_same(Experience.concat([first, rest]), whole)
        ids, indexes = whole["prompt_ids"].values, whole["sample_indexes"].values
        assert len(set(zip(ids.tolist(), indexes.tolist(), strict=True))) == len(whole)
        with pytest.raises(InvalidRequestError, match="give a position up to") as caught:
            await rows(3, start=8, prompts=1, batch_start=9)
        assert caught.value.reason == "SLICE_INVALID"


async def test_blocks_that_cut_groups_are_refused() -> None:
    async with serving(SamplerRole()) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        with pytest.raises(InvalidRequestError, match="block_rows is 3: give a multiple") as caught:
            await all_of(generate(channel, block_rows=3))
    assert caught.value.reason == "SAMPLING_INVALID"


@pytest.mark.parametrize(
    ("prompts", "samples"), [(0, 1), (-1, 1), (1 << 62, 1), (MAX_ROWS // 2 + 1, 2), (1, 2**31 - 1)]
)
async def test_a_slice_that_is_empty_or_beyond_the_bound_is_refused(
    prompts: int, samples: int
) -> None:
    async with serving(SamplerRole()) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        with pytest.raises(InvalidRequestError, match=r"prompts.*(count >= 1|at most)") as caught:
            await all_of(generate(channel, prompts=prompts, samples=samples, block_rows=0))
        assert caught.value.reason == "SLICE_INVALID"


async def test_a_generation_that_fails_holds_none_of_its_blocks_and_can_be_repeated() -> None:
    fails = [True, False]

    def order(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
        yield from requests[:6]
        if fails.pop(0):
            raise ValueError("the script ends here")
        yield from requests[6:]

    role = SamplerRole(ScriptedBackend(order=order))
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        call = generate(channel)
        assert (await anext(call)).block.index == 0
        with pytest.raises(RolemeshError, match="the script ends here"):
            await all_of(call)
        assert server.runtime.store.held_bytes == 0
        blocks, result = await all_of(generate(channel))
        await assert_blocks_are_rows_of(server.runtime, blocks, result)


class TrainedRole(SamplerRole):
    """Trains at the worst moment: as soon as its weights were brought."""

    trained = 4
    updates = 1

    def bring_weights(self) -> int:
        self.backend.policy_version = self.trained
        self.trained, self.updates = self.trained + self.updates, 0
        return 0


async def test_weights_that_change_after_they_were_brought_are_brought_again() -> None:
    role = TrainedRole(ScriptedBackend())
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        _, result = await all_of(generate(channel))
        batch = await pulled(server.runtime, result)
    assert set(batch["policy_versions"].values.tolist()) == {5}


class DivergedBackend(ScriptedBackend):
    """Draws from a distribution that is none."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        for drawn in super().generate(requests, sampling, later):
            yield replace(drawn, logprobs=[math.nan] * len(drawn.logprobs))


async def test_log_probs_that_are_no_numbers_are_refused_and_never_charted() -> None:
    role = SamplerRole(DivergedBackend())
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        with pytest.raises(RolemeshError, match=r"'sampler_logprob/mean'.* is nan") as caught:
            await all_of(generate(channel))
        assert caught.value.reason == "METRIC_NOT_FINITE"
        assert server.runtime.store.held_bytes == 0


# --- several ranks --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    started = spawn_service(tmp_path_factory.mktemp("ranks"), "--layout", "dp=2", script=SCRIPT)
    yield started
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(30) == 0


@pytest.mark.parametrize(("prompts", "block_rows"), [(5, 4), (6, 4), (1, 2), (7, 64)])
async def test_ranks_send_their_parts_and_the_face_sends_whole_blocks(
    service: ServiceProcess, prompts: int, block_rows: int
) -> None:
    epoch = next(EPOCHS)
    options = {"prompts": prompts, "block_rows": block_rows, "epoch": epoch}
    async with (
        serving(SamplerRole()) as alone,
        open_channel(service.address) as channel,
        open_channel(alone.runtime.address) as alone_channel,
    ):
        await initialize(channel, layout=LAYOUT, epoch=epoch)
        await initialize(alone_channel, epoch=epoch)
        blocks, result = await all_of(generate(channel, **options))
        whole = await assert_blocks_are_rows_of(alone.runtime, blocks, result, block_rows)
        assert {shard.rank for shard in shards_of(result)} == ({0, 1} if prompts > 1 else {0})
        # 5 and 7 prompts are cut into 3 + 2 and 4 + 3: a block of two prompts straddles the ranks.
        straddling = [b for b in blocks if len({s.rank for s in shards_of(b.experience)}) == 2]
        assert len(straddling) == (prompts > 1)
        again, again_result = await all_of(generate(channel, **options))
        assert (again, again_result) == (blocks, result)
        _, expected = await all_of(generate(alone_channel, **options))
        assert_same(whole, await pulled(alone.runtime, expected))


async def test_a_rank_whose_output_does_not_count_sends_no_block(tmp_path: Path) -> None:
    service = spawn_service(tmp_path, "--layout", "tp=2", script=SCRIPT)
    try:
        async with (
            serving(SamplerRole()) as reader,
            open_channel(service.address) as channel,
        ):
            # One replica of two ranks: both sample all rows, and the first one's are kept.
            await initialize(channel, layout={"tp": 2}, generate={"tp": 2})
            blocks, result = await all_of(generate(channel))
            await assert_blocks_are_rows_of(reader.runtime, blocks, result)
        assert {shard.rank for shard in shards_of(result)} == {0}
    finally:
        service.end()


async def test_a_rank_that_fails_after_its_block_fails_the_call_and_is_named(
    tmp_path: Path,
) -> None:
    service = spawn_service(tmp_path, "--layout", "dp=2", script=SCRIPT)
    try:
        async with open_channel(service.address) as channel:
            await initialize(channel, layout=LAYOUT, failing_rank=1)
            with pytest.raises(RolemeshError, match=r"toy rank 1.*the script ends here"):
                await all_of(generate(channel, prompts=8, block_rows=2))
        # Rank 0 has done what rank 1 failed to do.
        assert service.process.wait(30) == 1
    finally:
        service.end()
