"""Sampling, and the engines that sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.models.sections import ComputeDtype
from rolemesh.engine.specs.sampling.servers import ServersSpec

MOST_STOPS = 16
"""Texts, or tokens, that may end a completion."""

StopText = Annotated[str, Field(min_length=1, max_length=256)]


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
    stop: tuple[StopText, ...] = Field(default=(), max_length=MOST_STOPS)
    """Texts that end a completion, beside the model's own end of a turn; they stay in it. Where the
    policy talks to an environment, that says where a turn ends."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), max_length=MOST_STOPS
    )
    """The same by tokens."""

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
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most sequences that are decoded together. None: 256 on a GPU, 64 on a CPU."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on a CPU device, in whole GiB."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache of the sampler."""
    dtype: ComputeDtype = "bfloat16"
    """Type that weights travel in and are rounded to."""
    activations: ComputeDtype | None = None
    """Type that the sampler computes in, and holds weights and keys in. None: that of dtype on a
    GPU; on a CPU float32 with numerics "exact", and where it has no bfloat16 instructions."""
    adapters: Literal["slots", "merged"] | None = None
    """How the sampler adds an adapter that is trained. slots: beside its matrices, in layers of
    vLLM's own; an update brings the factors alone. merged: into the matrices, at each update; sums
    rounded to bfloat16 would lose small updates, so activations must be float32. None: merged where
    they are, for on a CPU slots take three times as long, and on a GPU they take no float32;
    otherwise slots."""
    enforce_eager: bool | None = None
    """Skip graph capture. None: graphs on a GPU, none on a CPU."""
    prefix_caching: bool = True
    """Compute what prompts have in common once: on a GPU while the weights stay, on a CPU within a
    generation."""
    replay_routes: bool = False
    """Whether each sampled token keeps the experts that it went through, by which the trainer then
    scores and trains it (arXiv 2510.11370). Of a mixture. On a GPU it has not run."""
    async_scheduling: bool | None = None
    """Schedule the next step while one runs. None: on a GPU, where one rank samples and no weights
    come between two tokens. It cannot be true where they may."""


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
    replay_routes: bool = False
    """Whether each sampled token keeps the experts that it went through, by which the trainer then
    scores and trains it (arXiv 2510.11370). Of a mixture."""


class VllmServerSpec(ServersSpec):
    """Rollout with `vllm serve` processes, unmodified, that run elsewhere.

    Each rank samples its own rows there (generate tp 1, pp 1), and needs no memory of its device.
    """

    type: Literal["vllm_server"] = "vllm_server"
    shared_folder: Path | None = None
    """Folder that this service and the servers see: adapters on their way are written there. Needed
    with an adapter."""
    server_folder: str | None = None
    """The same folder as the servers name it; None: as shared_folder does."""
    max_model_len: int = Field(default=512, ge=2)
    """Longest prompt and completion together, in tokens; no server's --max-model-len is less."""
    dtype: ComputeDtype = "bfloat16"
    """Type that the servers compute in (--dtype), and that whole weights are rounded to. With
    float32, sampler and trainer are held to be equal but for the order of sums."""
    update_timeout_s: float = Field(default=600.0, gt=0)
    """Most seconds that servers may take to load weights."""

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        if self.server_folder is not None and self.shared_folder is None:
            raise ValueError(
                f"server_folder is {self.server_folder!r} without shared_folder: give both, or "
                "shared_folder alone where the servers see it at the same path"
            )
        return self


RolloutSpec = Annotated[VllmSpec | HfSpec | VllmServerSpec, Field(discriminator="type")]
