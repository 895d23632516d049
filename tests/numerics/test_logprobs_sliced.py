"""Log-probs over a vocabulary that ranks cut among them, against the whole [N, V] computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.largest_tensor import LargestTensor
from support.rank_processes import RankContext, RankPool

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs

FLOAT64_TOLERANCE = 1e-10
"""Sums in another order, in float64."""
FLOAT32_TOLERANCE = 1e-5
"""Sums over 24 products and 257 exponentials in another order, in float32."""
BFLOAT16_GRADIENT_TOLERANCE = 0.02
"""Of the norm: a gradient's factors and result are rounded to 2^-9 of their size."""

NUM_TOKENS, WIDTH, VOCABULARY = 37, 24, 257

SLICES: dict[str, list[int]] = {
    "two": [0, 129, 257],
    "four, one without rows": [0, 100, 250, 257, 257],
    "four, the first without rows": [0, 0, 1, 250, 257],
}
"""First row of each slice, and the end."""

Result = dict[str, torch.Tensor]


def _inputs(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    vocabulary = scale * torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(2, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return (
        hidden.to(dtype).requires_grad_(),
        vocabulary.to(dtype).requires_grad_(),
        targets,
        weights.to(dtype),
    )


def _whole(dtype: torch.dtype, scale: float, temperature: float) -> Result:
    """The oracle: all logits at once in float64, gradients by autograd."""
    hidden, vocabulary, targets, weights = _inputs(dtype, scale)
    hidden, vocabulary = (leaf.detach().double().requires_grad_() for leaf in (hidden, vocabulary))
    table = torch.log_softmax(hidden @ vocabulary.T / temperature, -1)
    logprobs = table.gather(1, targets[:, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(-1)
    (weights[0].double() @ logprobs + weights[1].double() @ entropy).backward()
    assert hidden.grad is not None
    assert vocabulary.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "vocabulary": vocabulary.grad,
    }


def score_slice(
    at: RankContext,
    bounds: list[int],
    dtype: torch.dtype,
    scale: float,
    temperature: float,
    options: dict[str, Any],
) -> Result:
    """This rank's slice: log-probs, entropy and gradients."""
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        hidden, vocabulary, targets, weights = _inputs(dtype, scale)
        first, end = bounds[at.rank], bounds[at.rank + 1]
        own = vocabulary.detach()[first:end].clone().requires_grad_()
        logprobs, entropy = token_logprobs(
            hidden,
            own,
            targets,
            temperature=temperature,
            with_entropy=True,
            group=mesh.tp,
            first_row=first,
            **options,
        )
        assert entropy is not None
        (weights[0] @ logprobs + weights[1] @ entropy).backward()
        assert hidden.grad is not None
        assert own.grad is not None
        return {
            "logprobs": logprobs.detach(),
            "entropy": entropy.detach(),
            "hidden": hidden.grad,
            "vocabulary": own.grad,
        }


def _check(parts: list[Result], expected: Result, dtype: torch.dtype, tolerance: float) -> None:
    whole = {**parts[0], "vocabulary": torch.cat([part["vocabulary"] for part in parts])}
    for name, tensor in expected.items():
        assert whole[name].dtype == dtype
        torch.testing.assert_close(whole[name].double(), tensor, rtol=tolerance, atol=tolerance)
    for part in parts[1:]:
        for name in ("logprobs", "entropy", "hidden"):
            assert torch.equal(part[name], parts[0][name]), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bounds", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)],
    ids=["float64", "float32"],
)
def test_slices_agree_with_full_logits_in_value_and_gradient(
    rank_pool: RankPool,
    dtype: torch.dtype,
    tolerance: float,
    bounds: list[int],
    temperature: float,
) -> None:
    options = {"chunk_tokens": 10}
    parts = rank_pool.run(score_slice, len(bounds) - 1, bounds, dtype, 0.3, temperature, options)
    _check(parts, _whole(dtype, 0.3, temperature), dtype, tolerance)


def _several_of_slice(at: RankContext, bounds: list[int]) -> tuple[torch.Tensor, ...]:
    """This rank's slice of log-probs of four ids a place, and of their gradients."""
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        hidden, vocabulary, _, _ = _inputs(torch.float64, 0.3)
        first, end = bounds[at.rank], bounds[at.rank + 1]
        own = vocabulary.detach()[first:end].clone().requires_grad_()
        ids, weights = _several()
        logprobs, _ = token_logprobs(
            hidden, own, ids, chunk_tokens=10, group=mesh.tp, first_row=first
        )
        (weights * logprobs).sum().backward()
        assert hidden.grad is not None
        assert own.grad is not None
        return logprobs.detach(), hidden.grad, own.grad


def _several() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(VOCABULARY, (NUM_TOKENS, 4), generator=generator)
    return ids, torch.randn(ids.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("bounds", [SLICES["two"], SLICES["four, one without rows"]], ids=str)
def test_slices_agree_on_several_ids_at_a_place(rank_pool: RankPool, bounds: list[int]) -> None:
    hidden, vocabulary, _, _ = _inputs(torch.float64, 0.3)
    ids, weights = _several()
    expected = torch.log_softmax(hidden @ vocabulary.T, -1).gather(1, ids)
    (weights * expected).sum().backward()
    parts = rank_pool.run(_several_of_slice, len(bounds) - 1, bounds)
    found = (*parts[0][:2], torch.cat([part[2] for part in parts]))
    for ours, theirs in zip(found, (expected, hidden.grad, vocabulary.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_extreme_logits_that_lie_in_one_slice_stay_exact(rank_pool: RankPool) -> None:
    """Logits of several hundred: without the largest of all slices an exponential overflows."""
    bounds = SLICES["two"]
    parts = rank_pool.run(score_slice, 2, bounds, torch.float64, 100.0, 1.0, {"chunk_tokens": 10})
    _check(parts, _whole(torch.float64, 100.0, 1.0), torch.float64, FLOAT64_TOLERANCE)


def test_bfloat16_slices_round_as_one_rank_does(rank_pool: RankPool) -> None:
    options = {"compute_dtype": torch.bfloat16}
    parts = rank_pool.run(score_slice, 2, SLICES["two"], torch.float32, 2.0, 1.0, options)
    hidden, vocabulary, targets, weights = _inputs(torch.float32, 2.0)
    logprobs, entropy = token_logprobs(hidden, vocabulary, targets, with_entropy=True, **options)
    assert entropy is not None
    (weights[0] @ logprobs + weights[1] @ entropy).backward()
    for ours, expected in ((parts[0]["logprobs"], logprobs), (parts[0]["entropy"], entropy)):
        torch.testing.assert_close(ours, expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
    for ours, leaf in (
        (parts[0]["hidden"], hidden),
        (torch.cat([part["vocabulary"] for part in parts]), vocabulary),
    ):
        assert leaf.grad is not None
        error = float((ours - leaf.grad).norm() / leaf.grad.norm())
        assert error < BFLOAT16_GRADIENT_TOLERANCE


def largest_tensor(at: RankContext, num_tokens: int, slice_rows: int, chunk_tokens: int) -> int:
    """Elements of the largest tensor in a forward and backward pass."""
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        hidden = torch.ones(num_tokens, 8, requires_grad=True)
        own = torch.ones(slice_rows, 8, requires_grad=True)
        targets = torch.arange(num_tokens) % (slice_rows * at.world_size)
        with LargestTensor() as largest:
            logprobs, entropy = token_logprobs(
                hidden,
                own,
                targets,
                chunk_tokens=chunk_tokens,
                with_entropy=True,
                group=mesh.tp,
                first_row=at.rank * slice_rows,
            )
            assert entropy is not None
            (logprobs.sum() + entropy.sum()).backward()
        return largest.numel


def test_no_tensor_is_larger_than_a_chunk_of_one_slices_logits(rank_pool: RankPool) -> None:
    num_tokens, slice_rows, chunk_tokens = 200, 150, 16
    sizes = rank_pool.run(largest_tensor, 2, num_tokens, slice_rows, chunk_tokens)
    assert sizes == [chunk_tokens * slice_rows] * 2
    assert sizes[0] < num_tokens * slice_rows


def no_tokens(at: RankContext) -> tuple[int, float]:
    """Scores nothing; log-probs given, and what the vocabulary's gradient sums to."""
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        hidden, vocabulary, targets, _ = _inputs(torch.float32, 1.0)
        logprobs, _ = token_logprobs(hidden[:0], vocabulary, targets[:0], group=mesh.tp)
        logprobs.sum().backward()
        assert vocabulary.grad is not None
        return len(logprobs), float(vocabulary.grad.abs().sum())


def test_no_tokens_give_no_logprobs_and_zero_gradient(rank_pool: RankPool) -> None:
    assert rank_pool.run(no_tokens, 2) == [(0, 0.0), (0, 0.0)]
