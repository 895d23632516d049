"""A rollout service that samples with vLLM, fed by an actor: weights, log-probs, updates in flight.

One engine serves the whole file: loading vLLM takes many seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from support.in_flight_checks import halt_at, largest_difference, rows_with_versions
from support.mesh_runs import tiny_model
from support.rollout_checks import load_trainer_model, trained_copy, trainer_checksums
from support.rollout_services import Caller, rows_of
from support.services import serving
from transformers import PreTrainedModel

from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.rollout.servicers import RolloutRole

FLOAT32_LOGPROB = 5e-4
"""What is promised of sampler and trainer; seen here: 1e-6."""
SWITCH = 5
"""Decoding step before which new weights come."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Services:
    """Both services, and what they are called with."""

    def __init__(self, actor: ActorRole, rollout: RolloutRole, callers: list[Caller]) -> None:
        self.actor_role, self.rollout_role = actor, rollout
        self.actor, self.rollout = callers
        self.version = 0

    def model(self, folder: PreTrainedModel) -> PreTrainedModel:
        return trained_copy(folder, self.actor_role.trainer.named_weights())

    async def train(self) -> None:
        batch = await self.actor.generate(self.version, count=6)
        self.version = await self.actor.train(batch.experience, version=self.version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(folder: Path) -> AsyncIterator[Services]:
    actor_role, rollout_role = ActorRole(), RolloutRole()
    async with serving(actor_role) as actor, serving(rollout_role) as rollout:
        callers = [Caller(server.runtime.address) for server in (actor, rollout)]
        await callers[0].initialize(
            model={"path": str(folder), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "hf", "max_model_len": 256},
        )
        await callers[1].initialize(
            model={"path": str(folder)},
            rollout={"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16},
        )
        yield Services(actor_role, rollout_role, callers)
        for caller in callers:
            await caller.channel.close()


async def test_vllm_samples_with_the_published_weights(services: Services, folder: Path) -> None:
    base = load_trainer_model(folder)
    for _ in range(2):
        published = (await services.actor.publish()).weights
        answer = await services.rollout.take(published)
        assert answer.policy_version == services.version
        model = services.model(base)
        held = await services.rollout.checksums()
        assert held.checksums == trainer_checksums(model, torch.float32)
        rows = await rows_of((await services.rollout.generate(1)).experience)
        assert rows["policy_versions"].values.unique().tolist() == [services.version]
        assert largest_difference({services.version: model}, rows) < FLOAT32_LOGPROB
        await services.train()


async def test_updates_in_flight_are_exact_to_the_token(services: Services, folder: Path) -> None:
    base = load_trainer_model(folder)
    await services.rollout.take((await services.actor.publish()).weights)
    before, old = services.version, services.model(base)
    await services.train()
    weights = (await services.actor.publish()).weights
    arrived = halt_at(services.rollout_role, SWITCH)
    generating = asyncio.create_task(services.rollout.generate(2, count=6))
    await arrived.wait()
    assert (await services.rollout.take(weights)).policy_version == services.version
    assert not generating.done()
    rows = await rows_of((await generating).experience)
    known: set[tuple[int, ...]] = set()
    for prompt, completion, versions in rows_with_versions(rows):
        # The first row of a prompt computes it, and the others begin a step later.
        num_old = SWITCH - (tuple(prompt) in known)
        known.add(tuple(prompt))
        expected = [before] * num_old + [services.version] * len(completion)
        assert versions == expected[: len(completion)]
    models = {before: old, services.version: services.model(base)}
    assert largest_difference(models, rows) < FLOAT32_LOGPROB


async def test_keys_of_old_weights_would_show(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_trainer_model(folder)
    await services.rollout.take((await services.actor.publish()).weights)
    before, old = services.version, services.model(base)
    await services.train()
    weights = (await services.actor.publish()).weights
    engine = services.rollout_role.backend.engine
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda **_: True)
    arrived = halt_at(services.rollout_role, SWITCH)
    generating = asyncio.create_task(services.rollout.generate(2, count=6))
    await arrived.wait()
    await services.rollout.take(weights)
    rows = await rows_of((await generating).experience)
    models = {before: old, services.version: services.model(base)}
    assert largest_difference(models, rows) > 10 * FLOAT32_LOGPROB
