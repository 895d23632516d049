"""Whole weights of a lone rank, written straight into its vLLM model on a CPU.

Imports vLLM, so it is itself imported late. An update of SmolLM2-135M takes 0.28 s, and 0.38 s by
vLLM's loaders, which copy each matrix once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rolemesh.engine.layout.manifest import RankShard
from rolemesh.engine.rollout.vllm.weights.shards import rewritten, weight_places


def holds_as(model: nn.Module, shard: RankShard) -> bool:
    """Whether a model is on a CPU and has the tensors of a shard, and no experts.

    Args:
        model: VLLM's.
        shard: What the rank holds while it generates.
    """
    places = weight_places(model, torch.float32)
    return (
        all(weight.device.type == "cpu" for weight in model.parameters())
        and not any(isinstance(module, RoutedExperts) for module in model.modules())
        and {name: place.shape for name, place in places.items()} == dict(shard.shapes)
    )


@torch.no_grad()
def place_whole(
    model: nn.Module,
    shard: RankShard,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    """Replaces every weight, and packs each for the kernels as soon as all of it is there.

    Padded rows of the vocabulary become zeros. A head that is tied to the embedding is not packed
    here. After a failure some weights are new and others old.

    Args:
        model: VLLM's, which `holds_as` the shard.
        shard: With each parameter whole.
        weights: (Hugging Face name, floating [global shape]), read once. Each parameter of the
            shard comes once, in any order: those of one tensor need not be neighbours.
        dtype: Of the model.
    """
    places = weight_places(model, dtype)
    pieces = {piece.parameter: piece for piece in shard.pieces}
    num_left = Counter(piece.tensor for piece in shard.pieces)
    opened: dict[str, tuple[ExitStack, torch.Tensor]] = {}
    for name, weight in weights:
        piece = pieces[name]
        if piece.tensor not in opened:
            stack = ExitStack()
            opened[piece.tensor] = stack, stack.enter_context(rewritten(places[piece.tensor]))
        stack, tensor = opened[piece.tensor]
        ends = zip(piece.origin, weight.shape, strict=True)
        tensor[tuple(slice(begin, begin + size) for begin, size in ends)].copy_(weight)
        num_left[piece.tensor] -= 1
        if not num_left[piece.tensor]:
            del opened[piece.tensor]
            if isinstance(places[piece.tensor].module, VocabParallelEmbedding):
                tensor[len(weight) :] = 0
            stack.close()
