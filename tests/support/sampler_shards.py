"""Weights as a rank of vLLM holds them, cut straight from the whole folder."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import DtypeName, RankShard
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.model_folders.model_files import read_config_file
from rolemesh.engine.models.buffers import saved_buffers

PADDING = 7.5
"""What stands in rows that no piece covers: a sampler that reads them shows it."""


def folder_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Whole float32 parameters by Hugging Face name; experts as transformers' model stacks them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = (*model.named_parameters(), *saved_buffers(model))
    return {name: weight.detach().clone() for name, weight in weights}


def rank_shard(
    folder: Path,
    layout: HybridLayout | None = None,
    rank: int = 0,
    dtype: DtypeName = "float32",
) -> RankShard:
    """What the rank holds; without a layout there is one rank."""
    shape = DecoderShape.from_config(read_config_file(folder))
    layout = layout or HybridLayout(TrainLayout(), GenerateLayout())
    return generate_layout(shape, layout, dtype).ranks[rank]


def shard_tensor(shard: RankShard, name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One of its tensors, float32."""
    tensor = torch.full(shard.shapes[name], PADDING)
    for piece in shard.pieces:
        if piece.tensor == name:
            content = weights[piece.parameter][tuple(slice(*ends) for ends in piece.box)]
            at = zip(piece.origin, content.shape, strict=True)
            tensor[tuple(slice(start, start + size) for start, size in at)] = content
    return tensor


def shard_tensors(
    shard: RankShard, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors, one at a time: each is gone before the next is made, or it is an error."""
    for name in shard.shapes:
        pair = [(name, shard_tensor(shard, name, weights))]
        held = weakref.ref(pair[0][1])
        yield pair.pop()
        assert held() is None, f"{name} is still held when the next tensor is asked for"
