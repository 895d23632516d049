"""Boxes of a decoder's weights that each rank holds: in training, in generation, or all of it.

Pure: no torch. Training tensors have Hugging Face names; generation tensors have vLLM's, with its
fused projections and padded vocabulary (vLLM 0.32: QKVParallelLinear, MergedColumnParallelLinear,
VocabParallelEmbedding).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    DecoderShape,
    UnsupportedFamilyError,
    check_layout,
    cut_of,
    layer_parameters,
    slice_boxes,
    stage_layers,
    stage_tensors,
)
from rolemesh.engine.layout.manifest import (
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Piece,
    RankShard,
    WeightLayout,
)
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout, check_rank

_FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
"""Projections that vLLM stacks by rows in one tensor, in this order."""


def train_layout(
    shape: DecoderShape,
    layout: TrainLayout,
    dtype: DtypeName = "float32",
    *,
    trained_only: bool = False,
) -> WeightLayout:
    """What each rank holds while it trains: all parameters, or those that training changes.

    Each stage's tensors are cut into tensor slices (`slice_boxes`; the vocabulary without padding),
    then FSDP2's way: dimension 0 of the slice in chunks of ceil(rows / fsdp), so that the last
    ranks of a group may hold fewer rows or none. A tensor without elements has a shape but no
    piece.

    Args:
        shape: The model.
        layout: Ranks.
        dtype: Element type of the tensors and of the manifest.
        trained_only: Whether frozen parameters are left out; see `DecoderShape.trains`.

    Returns:
        Rank r of it is the layout's rank r; tensors have Hugging Face names (a tied projection on
        another stage than the embedding: "lm_head.weight").

    Raises:
        LayoutError: The model cannot be cut so.
    """
    check_layout(shape, layout)
    # Replicas share one shard.
    trains = shape.trains if trained_only else lambda _: True
    shard_at = functools.cache(functools.partial(_train_shard, shape, layout, trains))
    places = map(layout.coordinates, range(layout.world_size))
    ranks = tuple(shard_at(at.pp, at.tp, at.dp % layout.fsdp) for at in places)
    manifest = shape.trained_manifest(dtype) if trained_only else shape.manifest(dtype)
    return WeightLayout(manifest, ranks, dtype)


def generate_layers(shape: DecoderShape, layout: HybridLayout, *, pp: int) -> range:
    """Layers of generation stage `pp`: those of the training stages that it joins.

    Example: 6 layers over 4 training stages are 2, 2, 1, 1; two generation stages have 4 and 2.

    Raises:
        LayoutError: No such stage, or more training stages than layers.
    """
    check_rank(pp, layout.generate.pp)
    ratio, size = layout.stage_ratio, layout.train.pp
    first = stage_layers(shape, pp=pp * ratio, size=size)
    last = stage_layers(shape, pp=(pp + 1) * ratio - 1, size=size)
    return range(first.start, last.stop)


def generate_layout(shape: DecoderShape, layout: HybridLayout, dtype: DtypeName) -> WeightLayout:
    """What each rank holds while it generates with vLLM.

    Tensor names are those of vLLM's parameters: q, k and v stacked in `qkv_proj`, gate and up in
    `gate_up_proj`; embedding and projection have padded rows that no piece covers (vLLM keeps zeros
    there). A tied projection is the embedding, which then also lies on the last stage.

    Args:
        shape: The model.
        layout: Ranks; rank r of the result is the layout's rank r.
        dtype: Element type in which vLLM holds them.

    Raises:
        LayoutError: The model cannot be cut so.
        UnsupportedFamilyError: vLLM has no such model.
    """
    check_layout(shape, layout)
    if shape.head != "lm_head":
        raise UnsupportedFamilyError(
            f"head is {shape.head!r}: only a model with an lm_head generates; give one"
        )
    for name, lacks in shape.record.not_in_vllm.items():
        if name in shape.switched_on:
            raise UnsupportedFamilyError(
                f"the {shape.family} model has {name}, and vLLM's has no {lacks}: sample with "
                "rollout type hf"
            )
    # Replicas share one shard.
    shard_at = functools.cache(functools.partial(_generate_shard, shape, layout))
    places = map(layout.coordinates, range(layout.world_size))
    ranks = tuple(shard_at(at.pp, at.tp) for at in places)
    return WeightLayout(shape.manifest(dtype), ranks, dtype)


def whole_layout(manifest: Manifest, ranks: int = 1) -> WeightLayout:
    """Every parameter whole on each of `ranks` ranks, in a tensor of its own name.

    Raises:
        ManifestError: No ranks.
    """
    if ranks < 1:
        raise ManifestError(f"ranks is {ranks}: give at least 1")
    shard = RankShard(
        tuple(
            Piece(name, parameter.box, name, (0,) * len(parameter.shape))
            for name, parameter in manifest.items()
            if 0 not in parameter.shape
        ),
        {name: parameter.shape for name, parameter in manifest.items()},
    )
    return WeightLayout(manifest, (shard,) * ranks)


def _train_shard(
    shape: DecoderShape,
    layout: TrainLayout,
    is_held: Callable[[str], bool],
    pp: int,
    tp: int,
    chunk: int,
) -> RankShard:
    pieces, shapes = [], {}
    for tensor, parameter in stage_tensors(shape, pp=pp, size=layout.pp):
        if not is_held(parameter):
            continue
        boxes = slice_boxes(shape, parameter, tp=tp, size=layout.tp)
        total = sum(_sizes(box)[0] for box in boxes)
        rows = -(-total // layout.fsdp)
        first, last = min(chunk * rows, total), min((chunk + 1) * rows, total)
        shapes[tensor] = (last - first, *_sizes(boxes[0])[1:])
        passed = 0
        for (start, stop), *others in boxes:
            # Of the rows that are stacked before this box, and of its own, those of the chunk.
            low, high = max(first, passed), min(last, passed + stop - start)
            if low < high and 0 not in shapes[tensor]:
                box: Box = ((start + low - passed, start + high - passed), *others)
                origin = (low - first, *(0,) * len(others))
                pieces.append(Piece(parameter, box, tensor, origin))
            passed += stop - start
    return RankShard(tuple(pieces), shapes)


def _generate_shard(shape: DecoderShape, layout: HybridLayout, pp: int, tp: int) -> RankShard:
    size, is_last = layout.generate.tp, pp == layout.generate.pp - 1
    pieces: list[Piece] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def add(tensor: str, parameters: Sequence[str]) -> None:
        """Stacks this slice of the parameters by rows."""
        filled = 0
        for parameter in parameters:
            is_padded = cut_of(shape, parameter) == "vocab"
            is_whole = parameter.endswith(shape.record.vllm_whole)
            at = {"tp": 0, "size": 1} if is_whole else {"tp": tp, "size": size}
            for box in slice_boxes(shape, parameter, **at):
                sizes = _sizes(box)
                if sizes[0]:
                    pieces.append(Piece(parameter, box, tensor, (filled, *(0,) * (len(box) - 1))))
                filled += shape.padded_vocab_size // size if is_padded else sizes[0]
                shapes[tensor] = (filled, *sizes[1:])

    if pp == 0 or (is_last and shape.is_tied):
        add(EMBEDDING, (EMBEDDING,))
    layers = generate_layers(shape, layout, pp=pp)
    for tensor, parameters in _fused(layer_parameters(shape, layers)):
        add(tensor, parameters)
    if is_last:
        add(NORM, (NORM,))
        if not shape.is_tied:
            add(LM_HEAD, (LM_HEAD,))
    return RankShard(tuple(pieces), shapes)


def _fused(names: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Tensors of vLLM and the parameters in each, in model order."""
    tensors: dict[str, list[str]] = {}
    for name in names:
        module, kind = name.rsplit(".", 1)
        prefix, part, projection = module.rsplit(".", 2)
        fused = _FUSED.get(f"{part}.{projection}")
        tensors.setdefault(f"{prefix}.{fused}.{kind}" if fused else name, []).append(name)
    return tensors.items()


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
