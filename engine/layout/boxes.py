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
    cut_of,
    layer_parameters,
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
    intersection,
)
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout, check_rank
from rolemesh.engine.layout.slices import (
    check_layout,
    is_stack,
    slice_boxes,
    slice_sizes,
    stacked_dimension,
)

_FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
    "shared_experts.gate_proj": "shared_experts.gate_up_proj",
    "shared_experts.up_proj": "shared_experts.gate_up_proj",
}
"""Projections that vLLM stacks by rows in one tensor, in this order."""

_STACKS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""VLLM's names of stacks of experts."""


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
    piece. Of a stack of experts a rank has its share of ep, in chunks over fsdp / ep ranks.

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
    cut = max(layout.fsdp, layout.ep)
    ranks = tuple(shard_at(at.pp, at.tp, at.dp % cut) for at in places)
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
    dp: int,
) -> RankShard:
    pieces, shapes = [], {}
    for tensor, parameter in stage_tensors(shape, pp=pp, size=layout.pp):
        if not is_held(parameter):
            continue
        owned = (dp % layout.ep, layout.ep)
        boxes = slice_boxes(shape, parameter, tp=tp, size=layout.tp, experts=owned)
        held = slice_sizes(shape, parameter, tp=tp, size=layout.tp, experts=owned)
        chunks, index = layout.fsdp, dp % layout.fsdp
        if is_stack(shape, parameter):
            chunks = layout.expert_fsdp
            index = dp // layout.ep % chunks
        elif shape.is_buffer(parameter):
            # No gradient reaches it, so it is whole on all ranks of the data axis.
            chunks, index = 1, 0
        rows = -(-held[0] // chunks)
        first, last = min(index * rows, held[0]), min((index + 1) * rows, held[0])
        shapes[tensor] = (last - first, *held[1:])
        if 0 in shapes[tensor]:
            continue
        window: Box = ((first, last), *((0, size) for size in held[1:]))
        for box, lies in _stacked(shape, parameter, boxes):
            # Of the tensor before the data axis cut it, what of this box is in the chunk.
            common = intersection(lies, window)
            if common is None:
                continue
            part = tuple(
                (start + low - begin, start + high - begin)
                for (start, _), (begin, _), (low, high) in zip(box, lies, common, strict=True)
            )
            origin = tuple(low - begin for (low, _), (begin, _) in zip(common, window, strict=True))
            pieces.append(Piece(parameter, part, tensor, origin))
    return RankShard(tuple(pieces), shapes)


def _stacked(
    shape: DecoderShape, parameter: str, boxes: Sequence[Box]
) -> Iterable[tuple[Box, Box]]:
    """Boxes of a parameter that one tensor stacks, each with where it lies in that tensor."""
    along, passed = stacked_dimension(shape, parameter), 0
    for box in boxes:
        lies = [(0, size) for size in _sizes(box)]
        lies[along] = (passed, passed + lies[along][1])
        passed = lies[along][1]
        yield box, tuple(lies)


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
            index, number = (0, 1) if is_whole else (tp, size)
            if is_stack(shape, parameter):
                boxes = slice_boxes(shape, parameter, tp=index, size=number)
                for box, lies in _stacked(shape, parameter, boxes):
                    pieces.append(Piece(parameter, box, tensor, tuple(low for low, _ in lies)))
                shapes[tensor] = slice_sizes(shape, parameter, tp=index, size=number)
                continue
            for box in slice_boxes(shape, parameter, tp=index, size=number):
                sizes = _sizes(box)
                if sizes[0]:
                    pieces.append(Piece(parameter, box, tensor, (filled, *(0,) * (len(box) - 1))))
                filled += shape.padded_vocab_size // size if is_padded else sizes[0]
                shapes[tensor] = (filled, *sizes[1:])

    if pp == 0 or (is_last and shape.is_tied):
        add(EMBEDDING, (EMBEDDING,))
    layers = generate_layers(shape, layout, pp=pp)
    for tensor, parameters in _fused(layer_parameters(shape, layers)):
        add(tensor.replace(".mlp.", f".{shape.record.vllm_mlp}."), parameters)
    if is_last:
        add(NORM, (NORM,))
        if not shape.is_tied:
            add(LM_HEAD, (LM_HEAD,))
    return RankShard(tuple(pieces), shapes)


def _fused(names: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Tensors of vLLM and the parameters in each, in model order."""
    tensors: dict[str, list[str]] = {}
    for name in names:
        if ".experts." in name and name.endswith(tuple(_STACKS)):
            prefix, stack = name.rsplit(".", 1)
            tensors[f"{prefix}.routed_experts.{_STACKS[stack]}"] = [name]
            continue
        module, kind = name.rsplit(".", 1)
        prefix, part, projection = module.rsplit(".", 2)
        fused = _FUSED.get(f"{part}.{projection}")
        tensors.setdefault(f"{prefix}.{fused}.{kind}" if fused else name, []).append(name)
    return tensors.items()


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
