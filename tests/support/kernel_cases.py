"""Cases in which Triton's kernels must give what their references in torch give.

Run by Triton's interpreter (tests/kernels) and on a GPU (tests/gpu). The interpreter takes
milliseconds for what a GPU does in none: all of them are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from support.token_batches import token_batch, with_shared_prompts

from rolemesh.engine.algorithms.estimators.advantages import gae
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.kernels.choice import KERNELS_VARIABLE
from rolemesh.engine.models.layers import fused_layers
from rolemesh.engine.models.layers.shared_attention import inputs_of, sharing_attention
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.packing.pass_cost import PassCost
from rolemesh.engine.specs import MaskingSpec, PpoPolicyLossSpec, TokenTruncationSpec

TOLERANCE = 2e-5
"""float32: sums over some hundred numbers of size 1 in another order."""
BFLOAT16_TOLERANCE = 0.02
"""Of the norm: a gradient's factors are rounded to 2^-9 of their size, on a CPU its result too."""

Tensors = dict[str, torch.Tensor]


@contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Has the switch say so; torch: transformers' own layers on a CPU, too."""
    before = os.environ.get(KERNELS_VARIABLE)
    os.environ[KERNELS_VARIABLE] = choice
    try:
        with mock.patch.object(fused_layers, "_serve_on_cpu", return_value=False):
            yield
    finally:
        if before is None:
            del os.environ[KERNELS_VARIABLE]
        else:
            os.environ[KERNELS_VARIABLE] = before


def both(compute: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
    """What the kernels give, and what the references do."""
    with kernels("triton"):
        found = compute()
    with kernels("torch"):
        return found, compute()


def assert_both_agree(compute: Callable[[], Tensors], tolerance: float = TOLERANCE) -> None:
    """Compares all tensors, NaN with NaN too."""
    found, expected = both(compute)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def scored(device: str, num_tokens: int, num_rows: int, width: int, **options: Any) -> Tensors:
    """Log-probs, entropy and gradients of a head; `entropy_weight` None: no loss reads it."""
    generator = torch.Generator().manual_seed(num_tokens + num_rows)
    scale = options.pop("scale", 0.3)
    entropy_weight = options.pop("entropy_weight", 0.5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    hidden = draw(num_tokens, width).requires_grad_()
    vocabulary = (scale * draw(num_rows, width)).requires_grad_()
    weights = draw(num_tokens)
    targets = torch.randint(num_rows, (num_tokens,), generator=generator).to(device)
    logprobs, entropy = token_logprobs(hidden, vocabulary, targets, with_entropy=True, **options)
    assert entropy is not None
    loss = weights @ logprobs
    if entropy_weight is not None:
        loss = loss + entropy_weight * (weights.flip(0) @ entropy)
    loss.backward()
    assert hidden.grad is not None
    assert vocabulary.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "gradient of hidden": hidden.grad,
        "gradient of vocabulary": vocabulary.grad,
    }


HEADS: dict[str, dict[str, Any]] = {
    "one tile": {"num_tokens": 16, "num_rows": 64, "width": 32},
    "ragged on all sides": {"num_tokens": 37, "num_rows": 301, "width": 50},
    "one token": {"num_tokens": 1, "num_rows": 70, "width": 8},
    "blocks of the vocabulary": {
        **{"num_tokens": 70, "num_rows": 301, "width": 24},
        "chunk_tokens": 7,
    },
    "temperature": {"num_tokens": 20, "num_rows": 90, "width": 16, "temperature": 0.6},
    "no loss reads the entropy": {
        **{"num_tokens": 20, "num_rows": 90, "width": 16, "entropy_weight": None},
    },
    "logits that overflow": {"num_tokens": 20, "num_rows": 90, "width": 16, "scale": 12.0},
    "no tokens": {"num_tokens": 0, "num_rows": 30, "width": 16},
}
"""Shapes that leave tiles of 64 (float32) partly empty, and the choices of a call."""

LOSSES = {
    "plain": PpoPolicyLossSpec(),
    "asymmetric": PpoPolicyLossSpec(clip_low=0.1, clip_high=0.35),
    "entropy": PpoPolicyLossSpec(entropy_coefficient=0.02),
    "dual clip, k1": PpoPolicyLossSpec(dual_clip=1.5, kl_in_loss=0.1, kl_form="k1"),
    "masked": PpoPolicyLossSpec(off_policy=MaskingSpec(low=0.5, high=2.0)),
    "capped, k2": PpoPolicyLossSpec(
        off_policy=TokenTruncationSpec(cap=1.2), kl_in_loss=0.1, kl_form="k2"
    ),
    "everything, k3": PpoPolicyLossSpec(
        aggregation="seq_mean_token_mean",
        off_policy=TokenTruncationSpec(cap=1.5),
        **{"dual_clip": 2.0, "entropy_coefficient": 0.01, "kl_in_loss": 0.05, "kl_form": "k3"},
    ),
}


def lost(
    device: str, spec: PpoPolicyLossSpec, lengths: tuple[int, ...], change: str = ""
) -> Tensors:
    """Loss, gradients and metrics of a ragged micro-batch with holes.

    Args:
        device: Of the model's outputs.
        spec: The loss.
        lengths: Completion tokens of each row.
        change: "on policy" has all log-probs alike, "far" some ratios that overflow, "broken" a
            log-prob that is NaN; "no entropy" gives none.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    count = sum(lengths)

    def draw() -> torch.Tensor:
        return -2 * torch.rand(count, generator=generator)

    logprobs, sampled, proximal, reference = draw(), draw(), draw(), draw()
    advantages = torch.randn(count, generator=generator)
    advantages[::5] = 0
    if change == "on policy":
        sampled, proximal, reference = (logprobs.clone() for _ in range(3))
    if change == "far":
        sampled[::3] -= 300
        proximal[1::3] += 300
        reference[2::3] += 300
    if change == "broken":
        logprobs[2] = torch.nan
    offsets = offsets_of(torch.tensor(lengths))

    def column(values: torch.Tensor) -> Column:
        return Column(ColumnKind.COMPLETION, values, offsets)

    mask = torch.rand(count, generator=generator) < 0.8
    mask[2:3] = True
    batch = Experience(
        {
            "logprobs": column(sampled),
            "proximal_logprobs": column(proximal),
            "reference_logprobs": column(reference),
            "advantages": column(advantages),
            "loss_mask": column(mask),
        }
    )
    now = logprobs.to(device).requires_grad_()
    entropy = torch.rand(count, generator=generator).to(device).requires_grad_()
    outputs = ModelOutputs(logprobs_N=now, entropy_N=None if change == "no entropy" else entropy)
    loss, metrics = make_loss(spec)(outputs, batch, LossScale(3 * count + 1.0, 12.0))
    (0.7 * loss).backward()
    assert now.grad is not None
    found = {"loss": loss.detach(), "gradient": now.grad}
    if entropy.grad is not None:
        found["gradient of entropy"] = entropy.grad
    return found | {name: number.detach().double() for name, number in metrics.items()}


def estimated(
    device: str, lengths: tuple[int, ...], dtype: torch.dtype, gamma: float, lam: float
) -> Tensors:
    """Advantages and returns of ragged rows with holes, in which NaN stands."""
    generator = torch.Generator().manual_seed(7)
    count = sum(lengths)
    mask = torch.rand(count, generator=generator) < 0.7
    rewards, values = torch.randn(2, count, generator=generator, dtype=torch.float64).to(dtype)
    rewards[~mask] = torch.nan
    values[~mask] = torch.nan
    advantages, returns = gae(
        rewards.to(device),
        values.to(device),
        mask.to(device),
        offsets_of(torch.tensor(lengths)),
        gamma=gamma,
        lam=lam,
    )
    assert advantages.dtype == dtype
    return {"advantages": advantages, "returns": returns}


def attended(
    device: str,
    group: int,
    prompt: int,
    completions: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    rounded: torch.dtype = torch.float32,
) -> Tensors:
    """Attention of rows of which `group` neighbours share a prompt, and its gradients.

    It computes in `dtype`, on numbers that `rounded` can hold.
    """
    batch = token_batch(prompt_lengths=[prompt] * len(completions), completion_lengths=completions)
    cost = PassCost(pairs_per_token=float("inf"), pairs_per_call=100.0, margin=1.0)
    packed = pack_rows(with_shared_prompts(batch, group), device, cost)
    inputs = inputs_of(packed.layout)
    generator = torch.Generator().manual_seed(5)
    # Four heads of queries, two of keys and values.
    query, key, value = (
        torch.randn(1, heads, packed.tokens_1S.shape[1], 64, generator=generator)
        .to(device, rounded)
        .to(dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    )
    found, _ = sharing_attention(torch.nn.Module(), query, key, value, None, tree=inputs["tree"])
    weights = torch.randn(found.shape, generator=generator).to(device)
    (weights * found).sum().backward()
    return {"attended": found.detach()} | {
        name: tensor.grad
        for name, tensor in (("query", query), ("key", key), ("value", value))
        if tensor.grad is not None
    }


ROWS = (5, 0, 70, 1, 0, 130, 16)
"""Tokens of rows: none, one, a block of 16, and more than the longest block of the interpreter."""
