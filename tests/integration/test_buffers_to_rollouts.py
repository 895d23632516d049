"""A buffer that is in the model's files reaches a rollout service unrounded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.lasting_services import lasting_services
from support.mesh_runs import tiny_model
from support.tiny_families import write_tiny_decoder

from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


async def test_a_published_bias_of_experts_is_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its tokenizer stays; weights and config are of another family.
    model = tiny_model(tmp_path / "glm")
    write_tiny_decoder(
        model,
        "glm4_moe",
        vocab_size=512,
        max_position_embeddings=512,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        eos_token_id=2,
    )
    bias = load_file(model / "model.safetensors")[BIAS]
    assert not torch.equal(bias, bias.bfloat16().float())
    held: list[tuple[torch.Tensor, torch.dtype]] = []
    take = HfBackend.update_weights

    def noted(
        sampler: HfBackend, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        take(sampler, weights, policy_version)
        norm = sampler._parameters["model.norm.weight"]
        held.append((sampler._parameters[BIAS].clone(), norm.dtype))

    monkeypatch.setattr(HfBackend, "update_weights", noted)
    roles = (ActorRole(), RewardRole(), RolloutRole())
    async with lasting_services(roles, model, tmp_path) as services:
        recipe = services.recipe(
            algorithm={
                "type": "grpo",
                "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
                "mini_batch_rows": 4,
            },
            critic=None,
            reference=None,
            run__evaluation__num_prompts=0,
            actor__model__compute_dtype="bfloat16",
            actor__rollout__dtype="bfloat16",
            pools={role: {"roles": [role]} for role in ("actor", "reward", "rollout")},
        )
        run = await services.train(recipe)
    assert len(held) >= 2
    for found, others in held:
        assert torch.equal(found, bias)
        assert others == torch.bfloat16
    exported = load_file(run.directory / "model" / "model.safetensors")
    assert torch.equal(exported[BIAS], bias)
