"""What stands between the products of a decoder layer, in Triton: norms, SwiGLU, rotary positions.

The references are transformers' own modules, each a handful of operations that read and write all
activations (`models/layers/fused_layers.py` puts these in their place). Numbers are float32 in
between; results have the types that transformers' have, also where factors have two types, as under
autocast. Nothing is written in place, no sum is made by atomic operations.

Not taken from a library: Liger's (0.8.5) give a result of the input's type where transformers
promotes it, write gradients over what the forward pass was given, and do not run by Triton's
interpreter.

Shape letters: R rows, D width of a row, B batch, H heads, T tokens, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 4096
"""Numbers of a tile of norms and rotations."""
GATE_ELEMENTS = 1024
"""Numbers that a program of SwiGLU takes: with 4096 its backward pass needs too many registers."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs that share the rows of a norm's backward pass, each with a sum of its own."""


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm (arXiv 1910.07467, eq. 4).

        weight * x / sqrt(mean(x^2) + epsilon)

    Args:
        x: float32 or bfloat16 [..., D].
        weight_D: float32 or bfloat16 [D].
        epsilon: Keeps the root away from 0.

    Returns:
        [..., D], of the wider type of both.
    """
    result: torch.Tensor = _RmsNorm.apply(x, weight_D, epsilon)  # type: ignore[no-untyped-call]
    return result


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate * sigmoid(gate) * up (arXiv 2002.05202, eq. 6).

    Args:
        gate: float32 or bfloat16, of any shape.
        up: Of the same type and shape.

    Returns:
        Of the same type and shape.
    """
    result: torch.Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def rotate(x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864, eq. 34), on halves of a head as transformers pairs them.

    Args:
        x_BHTE: float32 or bfloat16 [B, H, T, E], queries or keys; E is even.
        cos: float32 or bfloat16 [B or 1, T, E], without gradient.
        sin: Alike.

    Returns:
        [B, H, T, E] of the wider type of both; a token's heads stand together in memory.
    """
    result: torch.Tensor = _Rotate.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        x, weight_D = x.contiguous(), weight_D.contiguous()
        width = x.shape[-1]
        num_rows = x.numel() // width
        result = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight_D.dtype))
        scale_R = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        columns, rows = _tile(width)
        if num_rows:
            _norm[(triton.cdiv(num_rows, rows),)](
                x,
                weight_D,
                result,
                scale_R,
                num_rows,
                epsilon,
                WIDTH=width,
                COLUMNS=columns,
                ROWS=rows,
                num_warps=_num_warps(columns),
            )
        ctx.save_for_backward(x, weight_D, scale_R)
        return result

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight_D, scale_R = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        width = x.shape[-1]
        columns, rows = _tile(width)
        blocks = triton.cdiv(len(scale_R), rows)
        blocks_per_program = triton.cdiv(blocks, min(blocks, _most_programs(x.device)) or 1)
        programs = triton.cdiv(blocks, blocks_per_program or 1)
        grad_x = torch.empty_like(x)
        sums_PD = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        if programs:
            _norm_backward[(programs,)](
                gradient.contiguous(),
                x,
                weight_D,
                scale_R,
                grad_x,
                sums_PD,
                len(scale_R),
                blocks_per_program,
                NEEDS_WEIGHT=need_weight,
                WIDTH=width,
                COLUMNS=columns,
                ROWS=rows,
                num_warps=_num_warps(columns),
            )
        grad_weight = sums_PD.sum(0).to(weight_D.dtype) if need_weight else None
        return grad_x if need_x else None, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        result = torch.empty_like(gate)
        num_elements = gate.numel()
        if num_elements:
            _swiglu[(triton.cdiv(num_elements, GATE_ELEMENTS),)](
                gate, up, result, num_elements, BLOCK=GATE_ELEMENTS
            )
        ctx.save_for_backward(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        num_elements = gate.numel()
        if num_elements:
            _swiglu_backward[(triton.cdiv(num_elements, GATE_ELEMENTS),)](
                gradient.contiguous(),
                gate,
                up,
                grad_gate,
                grad_up,
                num_elements,
                BLOCK=GATE_ELEMENTS,
            )
        return grad_gate, grad_up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x_BHTE.dtype
        return _rotated(x_BHTE, cos, sin, torch.promote_types(x_BHTE.dtype, cos.dtype), back=False)

    @staticmethod
    def backward(ctx: Any, gradient_BHTE: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient_BHTE, cos, sin, ctx.dtype, back=True), None, None


def _rotated(
    x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, *, back: bool
) -> torch.Tensor:
    """Rotated by its position, or back by it."""
    batch, num_heads, length, width = x_BHTE.shape
    if x_BHTE.stride(-1) != 1:
        x_BHTE = x_BHTE.contiguous()
    result_BTHE = torch.empty(batch, length, num_heads, width, dtype=dtype, device=x_BHTE.device)
    columns = triton.next_power_of_2(width // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, BLOCK_ELEMENTS // 2 // columns))
    if result_BTHE.numel():
        _rotate[(batch * length, triton.cdiv(num_heads, heads))](
            x_BHTE,
            cos,
            sin,
            result_BTHE,
            *x_BHTE.stride()[:3],
            0 if len(cos) == 1 else length,
            length,
            num_heads,
            HALF=width // 2,
            BACK=back,
            COLUMNS=columns,
            HEADS=heads,
        )
    return result_BTHE.transpose(1, 2)


def _tile(width: int) -> tuple[int, int]:
    """Columns and rows of a tile that holds whole rows, powers of two."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, BLOCK_ELEMENTS // columns)


def _num_warps(columns: int) -> int:
    """Groups of 32 threads for a tile of whole rows: wide rows would not fit fewer registers."""
    return max(4, min(16, columns // 1024))


def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_PROCESSOR * count


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    result: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Some whole rows; leaves the inverse of each one's root."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_D = tl.arange(0, COLUMNS)
    is_column = column_D < WIDTH
    is_there = (row_R < num_rows)[:, None] & is_column[None, :]
    place = row_R.to(tl.int64)[:, None] * WIDTH + column_D[None, :]
    wide = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + epsilon)
    # Rounded before it is weighted, as transformers does.
    normed = (wide * scale_R[:, None]).to(x.dtype.element_ty).to(tl.float32)
    weight_D = tl.load(weight + column_D, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        result + place, (normed * weight_D[None, :]).to(result.dtype.element_ty), mask=is_there
    )
    tl.store(scales + row_R, scale_R, mask=row_R < num_rows)


@triton.jit
def _norm_backward(
    gradient: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    blocks_per_program: tl.tensor,
    NEEDS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Neighbouring blocks of rows, one after the other; the weight's gradient is summed over them.

    With n the normed row and g the gradient times the weight: (g - n mean(g n)) / root.
    """
    program = tl.program_id(0)
    column_D = tl.arange(0, COLUMNS)
    is_column = column_D < WIDTH
    weight_D = tl.load(weight + column_D, mask=is_column, other=0.0).to(tl.float32)
    sum_D = tl.zeros((COLUMNS,), dtype=tl.float32)
    for block in range(program * blocks_per_program, (program + 1) * blocks_per_program):
        row_R = block * ROWS + tl.arange(0, ROWS)
        is_there = (row_R < num_rows)[:, None] & is_column[None, :]
        place = row_R.to(tl.int64)[:, None] * WIDTH + column_D[None, :]
        pulled = tl.load(gradient + place, mask=is_there, other=0.0).to(tl.float32)
        scale_R = tl.load(scales + row_R, mask=row_R < num_rows, other=0.0)
        normed = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32) * scale_R[:, None]
        if NEEDS_WEIGHT:
            sum_D += tl.sum(pulled * normed.to(x.dtype.element_ty).to(tl.float32), 0)
        pulled *= weight_D[None, :]
        mean_R = tl.sum(pulled * normed, 1) / WIDTH
        found = scale_R[:, None] * (pulled - normed * mean_R[:, None])
        tl.store(grad_x + place, found.to(grad_x.dtype.element_ty), mask=is_there)
    if NEEDS_WEIGHT:
        tl.store(sums + program.to(tl.int64) * WIDTH + column_D, sum_D, mask=is_column)


@triton.jit
def _swiglu(
    gate: tl.tensor, up: tl.tensor, result: tl.tensor, num_elements: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < num_elements
    wide = tl.load(gate + place, mask=is_there, other=0.0).to(tl.float32)
    # Rounded before the product, as transformers does.
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype.element_ty).to(tl.float32)
    found = opened * tl.load(up + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(result + place, found.to(result.dtype.element_ty), mask=is_there)


@triton.jit
def _swiglu_backward(
    gradient: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    num_elements: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """D silu / d gate = sigmoid(gate) (1 + gate (1 - sigmoid(gate)))."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < num_elements
    pulled = tl.load(gradient + place, mask=is_there, other=0.0).to(tl.float32)
    wide = tl.load(gate + place, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=is_there, other=0.0).to(tl.float32)
    opening = tl.sigmoid(wide)
    slope = opening * (1 + wide * (1 - opening))
    of_gate = (pulled * factor * slope).to(grad_gate.dtype.element_ty)
    tl.store(grad_gate + place, of_gate, mask=is_there)
    of_up = (pulled * wide * opening).to(grad_up.dtype.element_ty)
    tl.store(grad_up + place, of_up, mask=is_there)


@triton.jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    result: tl.tensor,
    stride_batch: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    angles_per_row: tl.tensor,
    length: tl.tensor,
    num_heads: tl.tensor,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    is_column = column < HALF
    is_there = (head_H < num_heads)[:, None] & is_column[None, :]
    at = x + row * stride_batch + position * stride_token
    at += head_H.to(tl.int64)[:, None] * stride_head + column[None, :]
    first = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_there, other=0.0).to(tl.float32)
    angle = (row * angles_per_row + position) * 2 * HALF + column
    cos_1 = tl.load(cos + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angle + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angle + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if BACK:
        found_1 = first * cos_1 + second * sin_2
        found_2 = second * cos_2 - first * sin_1
    else:
        found_1 = first * cos_1 - second * sin_1
        found_2 = second * cos_2 + first * sin_2
    to = result + (token * num_heads + head_H[:, None]) * 2 * HALF + column[None, :]
    tl.store(to, found_1.to(result.dtype.element_ty), mask=is_there)
    tl.store(to + HALF, found_2.to(result.dtype.element_ty), mask=is_there)
