"""Episodes on vLLM as one sampler of two ranks: both end turns at the same token, and go on alike.

A turn that ends on one rank and not on the other would leave both waiting inside vLLM for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.episode_checks import assert_turns_end_when_told
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import make_requests, set_stop_tokens
from support.sampler_shards import folder_weights, rank_shard, shard_tensors
from support.tiny_models import tiny_tokenizer, write_tiny_llama

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec, VllmSpec

LOAD_TIMEOUT_S = 400.0
"""For two loads of vLLM at once on a machine that does other work."""
RANDOM = """
import os
from rolemesh.engine.environments.base import Environment, Observation

class Oracle(Environment):
    stop = ("e",)
    turns = 0

    def reset(self, row):
        return None

    def step(self, completion_text):
        self.turns += 1
        return Observation(text=f" {os.urandom(4).hex()} ", reward=1.0, done=self.turns == 3)
"""


def play(at: RankContext, folder: Path, own: str) -> Any:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    tokenizer = tiny_tokenizer()
    with at.connect(layout) as mesh:
        backend = VllmBackend(
            VllmSpec(dtype="float32", max_model_len=64, max_num_seqs=16), folder, mesh
        )
        shard = rank_shard(folder, layout, mesh.rank)
        backend.update_shard(shard_tensors(shard, folder_weights(folder)), 3)
        assert_turns_end_when_told(backend)
        batch = sample_experience(
            backend,
            [
                Prompt(
                    prompt_id=request.row,
                    text="",
                    tokens=list(request.prompt_tokens),
                    answer="",
                    metadata="{}",
                )
                for request in make_requests(6)
            ],
            SamplingSpec(samples_per_prompt=2, max_new_tokens=50),
            run_seed=5,
            step=0,
            tokenizer=tokenizer,
            progress=lambda *_: None,
            episodes=EpisodeRunner(
                PythonEnvironmentSpec(environment=own), tokenizer, 64, group=mesh.generate_tp
            ),
        )
        backend.close()
        columns = ("tokens", "loss_mask", "logprobs", "environment_rewards")
        return [batch[name].values.tolist() for name in columns]


@pytest.mark.slow
def test_ranks_end_turns_alike_and_hear_the_same(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    set_stop_tokens(folder, (2, 300, 301))
    (tmp_path / "own.py").write_text(RANDOM)
    first, second = rank_pool.run(
        play, 2, folder, f"{tmp_path / 'own.py'}:Oracle", timeout_s=LOAD_TIMEOUT_S
    )
    assert first == second
    _, mask, _, rewards = first
    assert not all(mask)
    assert max(rewards) == 3.0
