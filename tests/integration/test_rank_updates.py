"""Weights that come to a rollout service of several ranks while it generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.in_flight_checks import largest_difference, rows_with_versions
from support.mesh_runs import tiny_model
from support.rollout_checks import load_trainer_model, trained_copy
from support.rollout_services import Caller, process_of, shards_of
from support.services import operation_key, serving
from transformers import PreTrainedModel

from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.v1 import rollout_pb2, rollout_pb2_grpc

FLOAT32_LOGPROB = 2e-5
"""Log-probs near -6 in float32, summed in another order over 2 layers: a few of its 5e-7 steps."""
SLICED_LOGPROB = 5e-4
"""What is promised of sampler and trainer; two slices add in another order than one rank."""
HF = {"type": "hf", "max_model_len": 256, "max_num_seqs": 2}
"""Two rows at a time: when the first block is finished, most of the others have not begun."""
VLLM = {**HF, "type": "vllm", "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Services:
    """An actor on this loop, and a rollout service of two ranks."""

    def __init__(self, actor: Any, rollout: str, model: Path) -> None:
        self.actor, self.rollout = Caller(actor.runtime.address), Caller(rollout)
        self._role = actor.runtime.role
        self._base = load_trainer_model(model)

    def model(self) -> PreTrainedModel:
        """The policy as the actor holds it."""
        return trained_copy(self._base, self._role.trainer.named_weights())

    async def train(self) -> Any:
        """Optimizer steps, and what the actor publishes after them."""
        batch = await self.actor.generate(0, count=6)
        held = self._role.policy_version()
        await self.actor.train(batch.experience, version=held)
        return (await self.actor.publish()).weights

    async def begin(self, step: int) -> asyncio.Task[Any]:
        """A generation of which a block is finished, and most rows are not."""
        has_begun = asyncio.Event()
        generating = asyncio.create_task(
            self.rollout.generate(
                step,
                count=16,
                max_new_tokens=100,
                block_rows=2,
                on_block=lambda _: has_begun.set(),
            )
        )
        waiting = asyncio.create_task(has_begun.wait())
        await asyncio.wait({generating, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not generating.done()
        return generating


@asynccontextmanager
async def services(
    model: Path, folder: Path, layout: dict[str, int], rollout: dict[str, Any]
) -> AsyncIterator[Services]:
    flag = ",".join(f"{name}={value}" for name, value in layout.items())
    with process_of("rollout", folder, "--layout", flag) as (address, _):
        async with serving(ActorRole()) as server:
            both = Services(server, address, model)
            await both.actor.initialize(
                model={"path": str(model), "compute_dtype": "float32"},
                optimizer={"learning_rate": 1e-2},
                rollout={"type": "hf", "max_model_len": 256},
            )
            await both.rollout.initialize(
                model={"path": str(model)}, rollout=rollout, layout=layout
            )
            yield both
            await both.actor.channel.close()
            await both.rollout.channel.close()


async def assert_taken_in_flight(both: Services, bound: float) -> None:
    """An update is answered within a generation, whose tokens are those of its two versions."""
    await both.rollout.take((await both.actor.publish()).weights)
    old = both.model()
    weights = await both.train()
    generating = await both.begin(1)
    answer = await both.rollout.take(weights)
    assert answer.policy_version == weights.policy_version
    assert answer.report.metrics["weight_sync_bytes"] > 0
    assert not generating.done()
    rows = await shards_of((await generating).experience)
    versions = rows["policy_versions"].values
    assert versions.unique().tolist() == [0, weights.policy_version]
    for _, _, mine in rows_with_versions(rows):
        assert mine == sorted(mine)
    models = {0: old, weights.policy_version: both.model()}
    assert largest_difference(models, rows) < bound
    held = await both.rollout.checksums()
    assert held.policy_version == held.other_ranks[0].policy_version == weights.policy_version


@pytest.mark.slow
async def test_replicas_take_weights_while_they_generate(model: Path, tmp_path: Path) -> None:
    async with services(model, tmp_path, {"dp": 2}, HF) as both:
        await assert_taken_in_flight(both, FLOAT32_LOGPROB)
        held = both.model()
        old = (await both.actor.publish()).weights
        # Publishing again drops what is asked for: what runs goes on, and nothing new begins.
        new = await both.train()
        generating = await both.begin(2)
        with pytest.raises(PreconditionError, match=r"version 3 .* was asked for, but version 6"):
            await both.rollout.take(old)
        rows = await shards_of((await generating).experience)
        assert rows["policy_versions"].values.unique().tolist() == [3]
        assert largest_difference({3: held}, rows) < FLOAT32_LOGPROB
        with pytest.raises(PreconditionError, match="update to policy_version 3 failed"):
            await both.rollout.generate(3)
        # In their turn: no generation runs.
        assert (await both.rollout.take(new)).policy_version == 6
        rows = await shards_of((await both.rollout.generate(3)).experience)
        assert rows["policy_versions"].values.unique().tolist() == [6]


@pytest.mark.slow
async def test_slices_take_weights_while_they_generate(model: Path, tmp_path: Path) -> None:
    async with services(model, tmp_path, {"tp": 2}, VLLM) as both:
        await assert_taken_in_flight(both, SLICED_LOGPROB)


async def test_ahead_is_what_the_face_alone_says(model: Path) -> None:
    async with serving(RolloutRole()) as server:
        rollout = Caller(server.runtime.address)
        await rollout.initialize(model={"path": str(model)}, rollout=HF)
        stub = rollout_pb2_grpc.RolloutServiceStub(rollout.channel)
        request = rollout_pb2.UpdateWeightsRequest(key=operation_key("update"), ahead=True)
        with pytest.raises(InvalidRequestError, match="ahead is true") as caught:
            async for _ in stub.UpdateWeights(request):
                pass
        assert caught.value.reason == "REQUEST_INVALID"
        await rollout.channel.close()
