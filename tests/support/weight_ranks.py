"""Whole weights, cut for ranks without a plan: the oracle of transfers. And simple layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import (
    ITEM_BYTES,
    Box,
    DtypeName,
    Manifest,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
)
from rolemesh.engine.layout.ranks import GenerateLayout, Grouping, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Transport
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES
from rolemesh.engine.weights.transfer import WeightTransfer

Weights = dict[str, torch.Tensor]
WAIT_S = 240.0
BUCKET_BYTES = 60_000
"""Small enough for several buckets a model."""


def random_weights(manifest: Manifest, seed: int = 0) -> Weights:
    """Whole parameters; no two elements of a parameter are alike in any float type of 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(TORCH_DTYPES[parameter.dtype])
        for name, parameter in manifest.items()
    }


def cut(layout: WeightLayout, rank: int, weights: Mapping[str, torch.Tensor]) -> Weights:
    """The tensors of one rank, straight from the whole; zeros where no piece lies."""
    tensors: Weights = {}
    # A layout of fewer ranks holds nothing on the others.
    shard = layout.ranks[rank] if rank < len(layout.ranks) else RankShard((), {})
    for name, shape in shard.shapes.items():
        dtype = layout.dtype or next(iter(layout.manifest.values())).dtype
        tensors[name] = torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
    for piece in shard.pieces:
        part = weights[piece.parameter][tuple(slice(*extent) for extent in piece.box)]
        at = tuple(
            slice(start, start + size) for start, size in zip(piece.origin, part.shape, strict=True)
        )
        tensors[piece.tensor][at] = part.to(tensors[piece.tensor].dtype)
    return tensors


def missing_bytes(plan: Plan, rank: int) -> int:
    """Bytes of the elements that a rank needs in the target and lacks in the source."""
    total = 0
    for name, parameter in plan.source.manifest.items():
        held, needed = (
            _mask(side, rank, name, parameter.shape) for side in (plan.source, plan.target)
        )
        total += int((needed & ~held).sum()) * ITEM_BYTES[plan.wire_dtype(name)]
    return total


def transfer_once(
    transport: Transport, plan: Plan, tensors: Mapping[str, torch.Tensor], version: int = 0
) -> Weights:
    """All target tensors of the transport's rank."""
    transfer = WeightTransfer(plan, transport.rank, transport, timeout_s=WAIT_S)
    arrived: Weights = {}
    for name, tensor in transfer.run(tensors, policy_version=version):
        assert name not in arrived
        arrived[name] = tensor
    return arrived


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, types and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def hybrids(most_ranks: int, grouping: Grouping = "interval") -> Iterator[HybridLayout]:
    """Every (p, t, d, p_g, t_g) that so many ranks can run."""
    for pp in range(1, most_ranks + 1):
        for tp in range(1, most_ranks // pp + 1):
            for dp in range(1, most_ranks // (pp * tp) + 1):
                for pp_g in divisors(pp):
                    for tp_g in divisors(tp):
                        generate = GenerateLayout(pp=pp_g, tp=tp_g, grouping=grouping)
                        yield HybridLayout(TrainLayout(pp=pp, tp=tp, dp=dp), generate)


def thinned(layouts: Iterable[HybridLayout]) -> list[Any]:
    """Parameters of a test: every sixth layout, and as slow tests the others."""
    return [
        pytest.param(layout, id=label(layout), marks=[pytest.mark.slow] if number % 6 else [])
        for number, layout in enumerate(layouts)
    ]


def label(layout: HybridLayout) -> str:
    """As the paper writes it: p-t-d to p_g-t_g."""
    train, generate = layout.train, layout.generate
    return f"{train.pp}-{train.tp}-{train.dp} to {generate.pp}-{generate.tp}"


def decoder(**changes: object) -> DecoderShape:
    """A decoder that any tensor size up to 8 divides, with up to 8 stages."""
    sizes: dict[str, object] = {
        "model_type": "qwen2",
        "hidden_size": 4,
        "intermediate_size": 840,
        "num_hidden_layers": 8,
        "num_attention_heads": 840,
        "num_key_value_heads": 840,
        "head_dim": 1,
        "vocab_size": 6700,
        "tie_word_embeddings": True,
    }
    return DecoderShape.from_config({**sizes, **changes})


# --- weights that every layout cuts evenly, so that Table 2 holds to the byte ------------------


def even_manifest(layout: HybridLayout) -> Manifest:
    """Two layers a stage, each with two parameters cut by rows and one cut by columns."""
    width = 2 * layout.world_size
    parameters = {}
    for layer in range(2 * layout.train.pp):
        for name, shape in (("a", (width, 3)), ("b", (width, 5)), ("c", (3, width))):
            parameters[f"layer.{layer}.{name}"] = Parameter(shape, "float32")
    return parameters


def even_train(layout: HybridLayout) -> WeightLayout:
    """Each parameter a tensor, cut over stages and slices."""
    manifest = even_manifest(layout)
    ranks = []
    for rank in range(layout.world_size):
        at = layout.train.coordinates(rank)
        names = _stage(manifest, at.pp, layout.train.pp)
        pieces = []
        for name in names:
            box = _slice(manifest[name].shape, name, at.tp, layout.train.tp)
            pieces.append(Piece(name, box, name, (0, 0)))
        shapes = {piece.tensor: _size(piece.box) for piece in pieces}
        ranks.append(RankShard(tuple(pieces), shapes))
    return WeightLayout(manifest, tuple(ranks), "float32")


def even_generate(layout: HybridLayout, dtype: DtypeName = "float32") -> WeightLayout:
    """A and b in one fused tensor, b below a; a is narrower, which leaves padding."""
    manifest = even_manifest(layout)
    ranks = []
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        pieces: list[Piece] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for name in _stage(manifest, at.pp, layout.generate.pp):
            layer, kind = name.rsplit(".", 1)
            box = _slice(manifest[name].shape, name, at.tp, layout.generate.tp)
            rows = _size(box)[0]
            if kind == "c":
                pieces.append(Piece(name, box, name, (0, 0)))
                shapes[name] = _size(box)
            else:
                pieces.append(Piece(name, box, f"{layer}.ab", (0 if kind == "a" else rows, 0)))
                shapes[f"{layer}.ab"] = (2 * rows, 5)
        ranks.append(RankShard(tuple(pieces), shapes))
    return WeightLayout(manifest, tuple(ranks), dtype)


def even_whole(manifest: Manifest, world_size: int) -> WeightLayout:
    """Everything on every rank."""
    pieces = tuple(Piece(name, part.box, name, (0, 0)) for name, part in manifest.items())
    shapes = {name: part.shape for name, part in manifest.items()}
    return WeightLayout(manifest, (RankShard(pieces, shapes),) * world_size, "float32")


def even_zero(manifest: Manifest, world_size: int) -> WeightLayout:
    """Each parameter cut over all ranks, as ZeRO-3 does (here along its wide dimension)."""
    ranks = []
    for rank in range(world_size):
        pieces = tuple(
            Piece(name, _slice(part.shape, name, rank, world_size), name, (0, 0))
            for name, part in manifest.items()
        )
        ranks.append(RankShard(pieces, {piece.tensor: _size(piece.box) for piece in pieces}))
    return WeightLayout(manifest, tuple(ranks), "float32")


def model_bytes(manifest: Manifest) -> int:
    """M."""
    return sum(parameter.num_bytes for parameter in manifest.values())


def _stage(manifest: Manifest, stage: int, stages: int) -> list[str]:
    names = list(manifest)
    size = len(names) // stages
    return names[stage * size : (stage + 1) * size]


def _slice(shape: tuple[int, ...], name: str, index: int, size: int) -> Box:
    dim = 1 if name.endswith(".c") else 0
    run = shape[dim] // size
    extents = [(0, length) for length in shape]
    extents[dim] = (index * run, (index + 1) * run)
    return tuple(extents)


def _size(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _mask(layout: WeightLayout, rank: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for piece in layout.ranks[rank].pieces if rank < len(layout.ranks) else ():
        if piece.parameter == name:
            mask[tuple(slice(*extent) for extent in piece.box)] = True
    return mask
