"""One rank places bfloat16 parts in vLLM's model, exactly as vLLM's loaders would.

float32 parts of every family: test_families.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    rounded_copy,
)
from support.sampler_shards import PADDING, folder_weights, rank_shard, shard_tensors
from support.tiny_families import write_tiny_decoder
from support.tiny_models import HEAD_DIM

from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

pytestmark = pytest.mark.slow

LOGPROB_BOUND = 5e-4
"""Mean abs difference promised between sampler and trainer."""
LOAD_TIMEOUT_S = 300.0

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}
"""A tied and an own head, biases of q, k and v, norms of q and k."""

Result = tuple[dict[str, str], dict[str, str], list[RolloutTrajectory], float]


def requests() -> list[RolloutRequest]:
    generator = torch.Generator().manual_seed(5)
    return [
        RolloutRequest(
            row=row,
            prompt_tokens=torch.randint(4, 100, (2 + row,), generator=generator).tolist(),
            seed=row,
        )
        for row in range(6)
    ]


def place_and_load(at: RankContext, folder: Path, dtype: str) -> Result:
    """Checksums after parts were placed and after whole weights were loaded, and samples."""
    backend = VllmBackend(
        VllmSpec.model_validate({"dtype": dtype, "max_model_len": 48, "max_num_seqs": 8}), folder
    )
    try:
        weights = folder_weights(folder)
        backend.update_weights(((n, torch.zeros_like(t)) for n, t in weights.items()), 1)
        backend.update_shard(shard_tensors(rank_shard(folder), weights), 2)
        placed = dict(backend.weight_checksums())
        sampled = list(backend.generate(requests(), SamplingSpec(max_new_tokens=16)))
        (padding,) = backend.engine.apply_model(largest_padding)
        backend.update_weights(weights.items(), 3)
        return placed, dict(backend.weight_checksums()), sampled, padding
    finally:
        backend.close()


def largest_padding(model: Any) -> float:
    """What stands in the embedding's padded rows."""
    return float(model.model.embed_tokens.weight[100:].abs().max())


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_parts_are_what_vllm_loads(process: RankPool, tmp_path: Path, name: str) -> None:
    family, config = FAMILIES[name]
    folder = write_tiny_decoder(
        tmp_path, family, head_dim=HEAD_DIM, hidden_size=4 * HEAD_DIM, eos_token_id=2, **config
    )
    (result,) = process.run(place_and_load, 1, folder, "bfloat16", timeout_s=LOAD_TIMEOUT_S)
    placed, loaded, sampled, padding = result
    assert placed == loaded
    assert padding == 0.0 != PADDING
    model = rounded_copy(load_trainer_model(folder))
    assert logprob_differences(model, requests(), sampled).mean() < LOGPROB_BOUND
