"""Memory of vLLM on one GPU, by arithmetic: it takes the share that it is told, and divides it.

Pure: no torch. Of vLLM 0.32: `gpu_memory_utilization` times the memory of the device is all that it
takes, and keys and values get what weights, graphs and the largest pass leave
(vllm/v1/worker/gpu_worker.py, determine_available_memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rolemesh.engine.layout.adapters import AdapterShape
from rolemesh.engine.layout.families import DecoderShape, layer_factors, parameter_shape
from rolemesh.engine.layout.manifest import ITEM_BYTES
from rolemesh.engine.layout.slices import slice_sizes
from rolemesh.engine.specs import VllmSpec
from rolemesh.engine.specs.by_device import Device, sampler_choices

GRAPH_BYTES = 1 << 30
"""CUDA graphs of all batch sizes. vLLM's logs say 0.5 to 1 GiB for 1B to 8B; not measured here."""

PASS_TOKENS = 8192
"""Tokens of the largest pass that vLLM measures its activations by (max_num_batched_tokens of a
library user on a large GPU)."""

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's slots for adapters (MaxLoRARanks in vllm/config/lora.py). An adapter lies in the
smallest that holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerMemory:
    """What a sampler needs on each GPU, in bytes."""

    weights: int
    """Of this rank's slice; those of the output layer in float32, as the trainer scores. With the
    slot of an adapter that is trained."""
    arriving: int
    """What an update brings, beside them until it is in its place: all weights, or the factors of
    an adapter alone, in float32 and whole on each GPU."""
    passes: int
    """Activations and logits of the largest pass."""
    graphs: int
    """CUDA graphs."""
    token: int
    """Keys and values of a token."""
    row_tokens: int
    """Tokens of the longest row."""

    @property
    def least(self) -> int:
        """What it needs to hold one row of the greatest length; with less it does not start."""
        return self.weights + self.passes + self.graphs + self.token * self.row_tokens

    def rows(self, budget: int) -> int:
        """Rows of the greatest length whose keys and values a budget holds together."""
        free = budget - self.weights - self.passes - self.graphs
        return max(0, free // (self.token * self.row_tokens))


def sampler_memory(shape: DecoderShape, spec: VllmSpec, tp: int, chosen: int = 0) -> SamplerMemory:
    """What vLLM needs on each of the tp GPUs of a replica.

    Args:
        shape: Sizes of the model, with the adapter that is trained, if there is one.
        spec: The sampler.
        tp: Slices of generation.
        chosen: Experts that a token goes through; 0: the model has none.

    Raises:
        ValueError: The sampler cannot have the adapter as the spec says.
    """
    item = ITEM_BYTES[spec.dtype]
    base = replace(shape, adapter=None)
    vocabulary = shape.padded_vocab_size * shape.hidden_size
    parameters = sum(math.prod(parameter_shape(base, name)) for name in base.manifest(spec.dtype))
    # A tied head is cast from the embedding, and is then a tensor of its own.
    head = 4 * vocabulary - (0 if shape.is_tied else item * vocabulary)
    weights = arriving = (parameters * item + head) // tp
    widest = 2 * shape.intermediate_size // tp
    if shape.experts is not None:
        # Of each chosen expert gate and up together, in the place of which its result comes, and
        # their product (vllm/model_executor/layers/fused_moe, workspaces).
        inner = shape.experts.inner_size // tp
        widest = max(widest, chosen * (max(2 * inner, shape.hidden_size) + inner))
    widest += 2 * shape.hidden_size
    choices = sampler_choices(
        spec,
        Device("cuda"),
        has_adapter=shape.adapter is not None,
        adapts_experts=shape.adapter is not None and shape.adapter.has_experts,
    )
    if shape.adapter is not None:
        factors = layer_factors(shape, range(shape.num_layers))
        arriving = 4 * sum(math.prod(parameter_shape(shape, name)) for name in factors)
        if choices["adapters"].value == "slots":
            weights += item * slot_elements(shape, tp)
    sequences = choices["max_num_seqs"].value
    # Logits, and their log-probs, in float32.
    passes = PASS_TOKENS * widest * item + 2 * 4 * sequences * shape.padded_vocab_size
    kv_heads = max(1, shape.num_kv_heads // tp)
    return SamplerMemory(
        weights=weights,
        arriving=arriving,
        passes=passes,
        graphs=0 if choices["enforce_eager"].value else GRAPH_BYTES,
        token=2 * shape.num_layers * kv_heads * shape.head_dim * item,
        row_tokens=spec.max_model_len,
    )


def slot_elements(shape: DecoderShape, tp: int) -> int:
    """Elements of the slot of an adapter on each of tp GPUs, which cut it where they cut matrices.

    Args:
        shape: With the adapter.
        tp: Slices of generation.
    """
    assert shape.adapter is not None
    held = [rank for rank in SLOT_RANKS if rank >= shape.adapter.rank]
    rank = min(held, default=shape.adapter.rank)  # a larger one vLLM refuses when it starts
    wide = replace(shape, adapter=AdapterShape(rank, shape.adapter.targets))
    return sum(
        math.prod(slice_sizes(wide, name, tp=0, size=tp))
        for name in layer_factors(wide, range(shape.num_layers))
    )
