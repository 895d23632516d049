"""Sampling, and the engines that sample."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.models import ComputeDtype


class SamplingSpec(Spec):
    """How completions are drawn."""

    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions that are drawn for each prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; not used when greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens with this probability together; 1 takes all."""
    top_k: int = Field(default=-1)
    """Draw from so many likeliest tokens; -1 takes all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens."""
    greedy: bool = False
    """Take the likeliest token each time."""

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}: give a positive number, or -1 for all tokens")
        return self


class VllmSpec(Spec):
    """Rollout with vLLM in the actor's own process."""

    type: Literal["vllm"] = "vllm"
    max_model_len: int = Field(default=512, ge=2)
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most sequences that are decoded together."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on a CPU device, in whole GiB."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache of the sampler."""
    dtype: ComputeDtype = "bfloat16"
    """Type that weights travel in and are rounded to; on a GPU that of activations too. On a CPU
    the sampler computes with those values in float32, and holds weights and keys in float32."""
    enforce_eager: bool = True
    """Skip graph capture; on a CPU it only costs start-up time."""


class HfSpec(Spec):
    """Rollout with plain transformers: small, slow, the oracle.

    Each rank generates with a whole model (generate tp 1, pp 1). In float32, with trained weights
    that FSDP does not cut, it shares memory with the trainer; otherwise it has weights of its own.
    """

    type: Literal["hf"] = "hf"
    max_model_len: int = Field(default=512, ge=2)
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most sequences that are decoded together."""
    dtype: ComputeDtype = "float32"
    """Type of weights and activations in the sampler. The trainer's weights are float32, so only
    that type can share their memory."""


RolloutSpec = Annotated[VllmSpec | HfSpec, Field(discriminator="type")]
