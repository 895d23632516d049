"""vLLM as several ranks: the model, the prompts, and what each rank saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.rollout_checks import make_requests, set_stop_tokens, tokens_by_row
from support.sampler_in_flight import InFlight
from support.sampler_shards import folder_weights, rank_shard, shard_tensors
from support.tiny_models import write_tiny_llama

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

LOGPROB_BOUND = 5e-4
"""Mean abs difference promised between sampler and trainer, for both types. Measured: 1e-6 with two
slices, as with one; a missed update of this model's weights gives 1."""
SPEC = VllmSpec(dtype="float32", max_model_len=64, max_num_seqs=16)
GREEDY = SamplingSpec(greedy=True, max_new_tokens=24)
SAMPLED = SamplingSpec(max_new_tokens=24)
STOP_TOKENS = (2, *range(300, 400))
"""A fifth of the vocabulary, so that rows end at different steps."""
VOCAB_SIZE = 500
"""Padded to 512: with two slices the last one has 244 real rows of 256."""
LOAD_TIMEOUT_S = 400.0
"""For several loads of vLLM at once on a machine that does other work."""


def write_stopping_model(directory: Path) -> Path:
    """Writes a tiny model that many tokens stop."""
    path = write_tiny_llama(directory, tied=True, vocab_size=VOCAB_SIZE)
    set_stop_tokens(path, STOP_TOKENS)
    return path


@dataclass
class Story:
    """What a rank saw."""

    greedy: list[RolloutTrajectory]
    sampled: list[RolloutTrajectory]
    checksums: dict[str, str]
    """After its own parts were placed."""
    groups: tuple[int, ...] = ()
    """Torch ranks of vLLM's tensor group."""
    whole_checksums: dict[str, str] = field(default_factory=dict)
    """After vLLM's own loaders cut the whole weights."""
    loaded_checksums: dict[str, str] = field(default_factory=dict)
    """Of another engine, which read the folder itself."""
    loaded_greedy: list[RolloutTrajectory] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """policy_version after each refusal, and after the update that follows."""
    files: list[str] = field(default_factory=list)
    """Left in shared memory while the engine runs."""
    environment: dict[str, str | None] = field(default_factory=dict)
    in_flight: InFlight | None = None
    continued: list[RolloutTrajectory] = field(default_factory=list)
    """The other engine's, of what each row had when weights came in flight."""


def prompts(num_rows: int, seed: int = 0) -> list[RolloutRequest]:
    """Uneven prompts within the vocabulary."""
    return [
        replace(request, prompt_tokens=[token % VOCAB_SIZE for token in request.prompt_tokens])
        for request in make_requests(num_rows, seed)
    ]


def place(backend: VllmBackend, mesh: RankMesh, folder: Path, version: int) -> None:
    """Gives the rank its part of the folder's weights."""
    shard = rank_shard(folder, mesh.layout, mesh.rank)
    backend.update_shard(shard_tensors(shard, folder_weights(folder)), version)


def vllm_group() -> tuple[int, ...]:
    """Torch ranks of vLLM's tensor group."""
    from vllm.distributed.parallel_state import get_tp_group

    return tuple(get_tp_group().ranks)


def without_compiler() -> AbstractContextManager[Any]:
    """What would be compiled fails, as on a machine without a compiler."""
    torch._dynamo.reset()  # What was compiled before would be there.
    return mock.patch(
        "torch._inductor.compile_fx.compile_fx", side_effect=RuntimeError("vLLM compiles")
    )


def assert_same_trajectories(
    left: Sequence[RolloutTrajectory], right: Sequence[RolloutTrajectory]
) -> None:
    """Rows, tokens and log-probs are the same to the last bit."""
    assert [t.row for t in left] == [t.row for t in right]
    assert tokens_by_row(left) == tokens_by_row(right)
    assert [list(t.logprobs) for t in left] == [list(t.logprobs) for t in right]
