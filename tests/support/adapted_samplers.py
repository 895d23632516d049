"""vLLM samplers of an adapter and trainers of it, for tests that hold one against the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import AdapterSpec, ModelSpec, VllmSpec

LOGPROB = 2e-5
"""Largest difference of a log-prob near -6, float32: some of its 5e-7 steps. Measured 5e-6."""
FAR = 0.05
"""Mean difference where another adapter is scored, or none. Measured 0.3 at least."""
MAX_MODEL_LEN = 128

ALL = AdapterSpec(rank=4, alpha=8.0)
SOME = AdapterSpec(
    rank=3, alpha=6.0, scaling="rslora", targets=("self_attn.v_proj", "gate_proj", "down_proj")
)
"""Parts of fused matrices, a rank that vLLM has no slot of, and a scale that is no power of two."""


@dataclass(frozen=True)
class Case:
    """A sampler."""

    way: str
    dtype: str
    family: str
    adapter: AdapterSpec

    def folder(self, directory: Path) -> Path:
        """A base whose weights are no values of bfloat16."""
        if self.family == "llama":
            return write_tiny_llama(directory)
        # Untied, and with biases beside the fused matrices.
        return write_tiny_decoder(
            directory,
            self.family,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=256,
            eos_token_id=2,
        )


@dataclass
class Trained:
    """A base and the trainers of its adapters."""

    case: Case
    folder: Path

    def trainer(self, seed: int, *, scale: float = 0.1, **fields: Any) -> CausalLm:
        """A trainer's model with random factors, B not zero."""
        model = CausalLm(
            ModelSpec.model_validate(
                {
                    "path": self.folder,
                    "compute_dtype": self.case.dtype,
                    "adapter": self.case.adapter,
                    **fields,
                }
            )
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, factor in model.trained_weights():
                if name.endswith("lora_B.weight"):
                    factor.copy_(scale * torch.randn(factor.shape, generator=generator))
                else:
                    factor.add_(0.1 * torch.randn(factor.shape, generator=generator))
        return model


@dataclass
class Sampler(Trained):
    """With an engine."""

    backend: VllmBackend


@contextmanager
def made_sampler(case: Case, directory: Path, *, shares_engine: bool = False) -> Iterator[Sampler]:
    """A sampler of a base in a folder that is made, unless it is there."""
    folder = directory if directory.exists() else case.folder(directory)
    spec = VllmSpec.model_validate(
        {
            "dtype": case.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "adapters": case.way,
        }
    )
    backend = make_backend(spec, folder, adapter=case.adapter, shares_engine=shares_engine)
    assert isinstance(backend, VllmBackend)
    made = Sampler(case, folder, backend)
    yield made
    made.backend.close()


def factors(model: CausalLm) -> dict[str, torch.Tensor]:
    """What the trainer sends."""
    return dict(model.trained_weights())


@torch.no_grad()
def scores(
    model: CausalLm, requests: Sequence[RolloutRequest], trajectories: Sequence[RolloutTrajectory]
) -> list[torch.Tensor]:
    """The trainer's log-probs of each completion."""
    prompts = {request.row: list(request.prompt_tokens) for request in requests}
    rows = [torch.tensor([*prompts[t.row], *t.completion_tokens]) for t in trajectories]
    lengths = torch.tensor([len(prompts[t.row]) for t in trajectories])
    batch = Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, lengths),
        }
    )
    padded = pack_rows(batch, "cpu")
    logprobs_N = model.finish(model.stage_forward(padded, None), padded, temperature=1.0).logprobs_N
    return list(logprobs_N.split([len(t.completion_tokens) for t in trajectories]))


def differences(
    model: CausalLm, requests: Sequence[RolloutRequest], trajectories: Sequence[RolloutTrajectory]
) -> torch.Tensor:
    """abs(sampler - trainer) of each completion token."""
    sampled = torch.tensor([value for t in trajectories for value in t.logprobs])
    return (sampled - torch.cat(scores(model, requests, trajectories))).abs()
