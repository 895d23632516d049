"""A run whose sampler holds a weight that nobody sent ends, and says which one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lasting_services import LastingServices, lasting_services
from support.mesh_runs import tiny_model

from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole

SPOILT = "model.layers.1.mlp.down_proj.weight"
POOLS: dict[str, dict[str, Any]] = {
    "in the actor": {"one": {"roles": ["actor", "reward"]}},
    "a service": {role: {"roles": [role]} for role in ("actor", "reward", "rollout")},
}


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[LastingServices]:
    roles = (ActorRole(), RewardRole(), RolloutRole())
    async with lasting_services(roles, tiny_model(tmp_path / "tiny"), tmp_path) as running:
        yield running


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("first", [0, 2], ids=["the first update", "a later one"])
async def test_a_spoilt_weight_ends_the_run_with_its_name(
    services: LastingServices, pools: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(sampler: HfBackend, policy_version: int) -> None:
        if policy_version >= first:
            held = sampler._parameters[SPOILT]
            held.data = held.data + 0.05

    def spoiling(name: str) -> None:
        whole = getattr(HfBackend, name)

        def take(
            sampler: HfBackend, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
        ) -> None:
            whole(sampler, tensors, policy_version)
            spoil(sampler, policy_version)

        monkeypatch.setattr(HfBackend, name, take)

    for name in ("update_weights", "update_shard"):
        spoiling(name)
    recipe = services.recipe(
        algorithm={
            "type": "grpo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 4,
        },
        critic=None,
        reference=None,
        run__steps=3,
        run__evaluation__num_prompts=0,
        pools=POOLS[pools],
    )
    with pytest.raises(Exception, match=r"nats a token from the trainer's") as ended:
        await services.train(recipe)
    told = str(ended.value)
    if pools == "in the actor":
        assert f"weights differ: {SPOILT!r}" in told
