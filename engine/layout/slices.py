"""How a decoder's parameters are cut: into tensor slices, padded vocabulary, shares of experts.

Pure: no torch. Tensor slices cut attention by heads and the MLP by its inner width (arXiv
1909.08053, section 3), the vocabulary in padded blocks as vLLM does. Stacks of experts are cut
within each expert, and shared out whole among ranks.
"""

from __future__ import annotations

from rolemesh.engine.layout.adapters import adapted_parameter, split_factor
from rolemesh.engine.layout.families import (
    DecoderShape,
    cut_of,
    parameter_shape,
    part_of_layer,
    projection_rows,
    stage_layers,
)
from rolemesh.engine.layout.family_records import FUSED_CUTS
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout


def check_layout(shape: DecoderShape, layout: TrainLayout | HybridLayout) -> None:
    """Raises LayoutError unless the model can be cut so: heads, widths, vocabulary and layers.

    Of a HybridLayout, both sides are checked.
    """
    train = layout.train if isinstance(layout, HybridLayout) else layout
    if train.pp > shape.num_layers:
        raise LayoutError(
            f"pp {train.pp} is more than the model's {shape.num_layers} layers: give a stage at "
            "least one layer"
        )
    first = len(stage_layers(shape, pp=0, size=train.pp))
    if shape.num_deepstack_levels > first:
        raise LayoutError(
            f"pp {train.pp} leaves the first stage {first} of {shape.num_layers} layers, but what "
            f"the {shape.family} model is shown of images is added behind the first "
            f"{shape.num_deepstack_levels}, which must be on that stage: give a smaller pp, or "
            "more layers"
        )
    check_slices(shape, train.tp, field="tp")
    number = shape.experts.number if shape.experts else 1
    if number % train.ep:
        raise LayoutError(
            f"ep {train.ep} does not divide the {number} experts of the {shape.family} model's "
            "layers: give a divisor"
            if shape.experts
            else f"ep is {train.ep}, but the {shape.family} model has no experts: give 1"
        )
    check_row_cuts(shape, train)
    if isinstance(layout, HybridLayout):
        check_slices(shape, layout.generate.tp, field="generate.tp")


def check_row_cuts(shape: DecoderShape, train: TrainLayout) -> None:
    """Raises LayoutError unless cp ranks can share out the heads that a tensor slice has."""
    heads = shape.num_heads // train.tp
    kv_heads = shape.num_kv_heads * replica_ranks_of_kv(shape, train.tp) // train.tp
    which = "heads" if train.tp == 1 else f"heads of a slice of tp {train.tp}"
    if heads % train.cp:
        fits = [cp for cp in range(1, heads + 1) if not (heads % cp or train.dp % cp)]
        raise LayoutError(
            f"cp {train.cp} does not divide the {heads} query {which} of the {shape.family} model, "
            f"which its ranks share out around attention: give one of {fits}"
        )
    if kv_heads % train.cp and train.cp % kv_heads:
        raise LayoutError(
            f"cp {train.cp} neither divides the {kv_heads} key-value {which} of the "
            f"{shape.family} model nor is a multiple: give a divisor or a multiple"
        )


def check_slices(shape: DecoderShape, size: int, *, field: str = "tp") -> None:
    """Raises LayoutError, naming `field`, unless the model can be cut into `size` slices."""
    for name, number in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.intermediate_size),
        ("the experts' inner width", shape.experts.inner_size if shape.experts else 0),
        ("the vocabulary, padded,", shape.padded_vocab_size),
    ):
        if number % size:
            raise LayoutError(
                f"{field} {size} does not divide {name} {number} of the {shape.family} model: "
                "give a divisor"
            )
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        raise LayoutError(
            f"{field} {size} neither divides num_key_value_heads {shape.num_kv_heads} of the "
            f"{shape.family} model nor is a multiple: give a divisor or a multiple"
        )
    if size > shape.num_kv_heads and any(part.cut == "qkv" for part in shape.record.parts):
        raise LayoutError(
            f"{field} {size} is more than num_key_value_heads {shape.num_kv_heads} of the "
            f"{shape.family} model, whose keys lie in one tensor with its queries: give at most "
            f"{shape.num_kv_heads}"
        )


def slice_boxes(
    shape: DecoderShape, name: str, *, tp: int, size: int, experts: tuple[int, int] = (0, 1)
) -> tuple[Box, ...]:
    """The parts of a parameter that slice `tp` of `size` holds, in global coordinates.

    The slice has them stacked by rows (of experts: by rows of each), in this order: one box, but of
    projections that one tensor holds, one of each. Real rows only: the last slices of a padded
    vocabulary hold fewer rows, or none (an empty range). With more slices than key-value heads,
    neighbours hold the same head.

    Args:
        shape: The model.
        name: Of the parameter.
        tp: The slice.
        size: How many there are.
        experts: Of a stack of experts, which of how many equal parts.

    Example: a vocabulary of 100 is padded to 128; slices 0..3 of 4 hold rows 0 to 32, 32 to 64,
    64 to 96 and 96 to 100.

    Raises:
        LayoutError: `size` does not fit the model (see `check_slices`), or `tp` is not below it.
    """
    check_slices(shape, size)
    if not 0 <= tp < size:
        raise LayoutError(f"slice is {tp}: give 0 to {size - 1}")
    sizes = parameter_shape(shape, name)
    if is_stack(shape, name) and experts != (0, 1):
        number = sizes[0] // experts[1]
        owned = (experts[0] * number, (experts[0] + 1) * number)
        return tuple((owned, *others) for _, *others in slice_boxes(shape, name, tp=tp, size=size))
    cut = cut_of(shape, name)
    others = tuple((0, number) for number in sizes[1:])
    if cut == "whole" or size == 1:
        return (((0, sizes[0]), *others),)
    if cut in ("columns", "experts_columns"):
        width = sizes[-1] // size
        columns = (tp * width, (tp + 1) * width)
        return ((*((0, number) for number in sizes[:-1]), columns),)
    if cut == "vocab":
        block = shape.padded_vocab_size // size
        rows = (min(tp * block, sizes[0]), min((tp + 1) * block, sizes[0]))
        return ((rows, *others),)
    split = split_factor(name)
    part = part_of_layer(shape, name if split is None else adapted_parameter(split[0]))
    assert part is not None  # all that is outside of layers is whole, or cut as the vocabulary
    boxes: list[Box] = []
    start = 0
    for one, number in zip(FUSED_CUTS.get(cut, (cut,)), projection_rows(shape, part), strict=True):
        sharing = replica_ranks_of_kv(shape, size) if one == "kv_heads" else 1
        held = number * sharing // size
        first = start + tp // sharing * held
        cut_rows = (first, first + held)
        stack: Box = ((0, sizes[0]), cut_rows, *others[1:])
        boxes.append(stack if cut == "experts_gate_up" else (cut_rows, *others))
        start += number
    return tuple(boxes)


def is_stack(shape: DecoderShape, name: str) -> bool:
    """Whether a parameter is a stack of experts [experts, rows, columns]."""
    return len(parameter_shape(shape, name)) == 3


def stacked_dimension(shape: DecoderShape, name: str) -> int:
    """Along which dimension a tensor stacks the boxes of `slice_boxes`: that of the rows."""
    return 1 if is_stack(shape, name) else 0


def slice_sizes(
    shape: DecoderShape, name: str, *, tp: int, size: int, experts: tuple[int, int] = (0, 1)
) -> tuple[int, ...]:
    """Shape of what slice `tp` of `size` holds of a parameter; see `slice_boxes`."""
    boxes = slice_boxes(shape, name, tp=tp, size=size, experts=experts)
    sizes = [stop - start for start, stop in boxes[0]]
    stacked = stacked_dimension(shape, name)
    sizes[stacked] = sum(box[stacked][1] - box[stacked][0] for box in boxes)
    return tuple(sizes)


def replica_ranks_of_kv(shape: DecoderShape, size: int) -> int:
    """How many neighbouring slices of `size` hold the same key-value head: 1 when none does."""
    check_slices(shape, size)
    return max(1, size // shape.num_kv_heads)
