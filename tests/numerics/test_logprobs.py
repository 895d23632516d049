"""Chunked log-probs and entropy against the whole [N, V] computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.largest_tensor import LargestTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolemesh.engine.models.vocabulary import logprobs as head
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs

FLOAT64_TOLERANCE = 1e-10
"""Sums in another order, in float64."""
FLOAT32_TOLERANCE = 1e-5
"""Sums over 300 products and 257 exponentials in another order, in float32."""
BFLOAT16_GRADIENT_TOLERANCE = 0.02
"""Of the norm: a gradient's factors and result are rounded to 2^-9 of their size."""

NUM_TOKENS, WIDTH, VOCABULARY = 37, 24, 257


def _inputs(dtype: torch.dtype, scale: float = 0.3) -> tuple[torch.Tensor, ...]:
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


def _whole(
    hidden: torch.Tensor, vocabulary: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: all logits at once, gradients by autograd."""
    all_logprobs = torch.log_softmax(hidden @ vocabulary.T / temperature, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 10, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)],
    ids=["float64", "float32"],
)
def test_chunks_agree_with_full_logits_in_value_and_gradient(
    dtype: torch.dtype, tolerance: float, chunk_tokens: int, temperature: float
) -> None:
    hidden, vocabulary, targets, weights = _inputs(dtype)
    logprobs, entropy = token_logprobs(
        hidden,
        vocabulary,
        targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    (weights[0] @ logprobs + weights[1] @ entropy).backward()

    hidden_64, vocabulary_64, _, weights_64 = _inputs(torch.float64)
    expected_logprobs, expected_entropy = _whole(hidden_64, vocabulary_64, targets, temperature)
    (weights_64[0] @ expected_logprobs + weights_64[1] @ expected_entropy).backward()

    assert logprobs.dtype == entropy.dtype == dtype
    for ours, expected in (
        (logprobs, expected_logprobs),
        (entropy, expected_entropy),
        (hidden.grad, hidden_64.grad),
        (vocabulary.grad, vocabulary_64.grad),
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_several_ids_at_a_place_agree_with_full_logits(
    chunk_tokens: int, with_entropy: bool
) -> None:
    hidden, vocabulary, targets, weights = _inputs(torch.float64)
    generator = torch.Generator().manual_seed(11)
    others = torch.randint(len(vocabulary), (NUM_TOKENS, 3), generator=generator)
    # The first id comes twice, as a target does that is among a teacher's likeliest tokens.
    ids = torch.cat([targets[:, None], others, targets[:, None]], 1)
    weights_NJ = torch.randn(ids.shape, generator=generator, dtype=torch.float64)
    logprobs, entropy = token_logprobs(
        hidden, vocabulary, ids, temperature=0.7, chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )  # fmt: skip
    loss = (weights_NJ * logprobs).sum()
    (loss if entropy is None else loss + weights[1] @ entropy).backward()

    hidden_64, vocabulary_64, _, _ = _inputs(torch.float64)
    table = torch.log_softmax(hidden_64 @ vocabulary_64.T / 0.7, -1)
    expected = (weights_NJ * table.gather(1, ids)).sum()
    if with_entropy:
        expected = expected - weights[1] @ (table.exp() * table).sum(-1)
    expected.backward()
    for ours, theirs in (
        (logprobs, table.gather(1, ids)),
        (hidden.grad, hidden_64.grad),
        (vocabulary.grad, vocabulary_64.grad),
    ):
        torch.testing.assert_close(ours, theirs, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_logprob_gradient_is_the_same_whether_or_not_entropy_is_asked_for(
    with_entropy: bool,
) -> None:
    hidden, vocabulary, targets, weights = _inputs(torch.float64)
    logprobs, entropy = token_logprobs(
        hidden, vocabulary, targets, chunk_tokens=8, with_entropy=with_entropy
    )
    assert (entropy is not None) == with_entropy
    (weights[0] @ logprobs).backward()
    reference_hidden, reference_vocabulary, _, _ = _inputs(torch.float64)
    (weights[0] @ _whole(reference_hidden, reference_vocabulary, targets, 1.0)[0]).backward()
    torch.testing.assert_close(
        hidden.grad, reference_hidden.grad, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
    )
    torch.testing.assert_close(
        vocabulary.grad, reference_vocabulary.grad, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
    )


class _Writes(TorchDispatchMode):
    """Counts results, new or in place, of so many elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and result.numel() == self.numel
        return result


def test_the_gradient_of_an_entropy_is_made_only_where_a_loss_reads_it() -> None:
    writes = {}
    gradients = {}
    for case, with_entropy, weight in (
        ("not asked for", False, 0.0),
        ("a metric", True, 0.0),
        ("in the loss", True, 1.0),
    ):
        hidden, vocabulary, targets, weights = _inputs(torch.float32)
        logprobs, entropy = token_logprobs(
            hidden, vocabulary, targets, temperature=0.7, with_entropy=with_entropy
        )
        loss = weights[0] @ logprobs
        if weight:
            assert entropy is not None
            loss = loss + weight * entropy.sum()
        with _Writes(NUM_TOKENS * VOCABULARY) as counted:
            loss.backward()
        writes[case] = counted.count
        gradients[case] = (hidden.grad, vocabulary.grad)
    assert writes["a metric"] == writes["not asked for"] < writes["in the loss"]
    for found, expected in zip(gradients["a metric"], gradients["not asked for"], strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("scale", "trains_entropy"),
    [(0.3, False), (3.0, False), (0.3, True)],
    ids=["doubtful", "certain", "with entropy"],
)
@pytest.mark.parametrize(
    ("compute_dtype", "tolerance"),
    [(torch.float32, 100 * FLOAT32_TOLERANCE), (torch.bfloat16, BFLOAT16_GRADIENT_TOLERANCE)],
    ids=["float32", "bfloat16"],
)
def test_the_gradient_of_states_before_a_frozen_vocabulary(
    compute_dtype: torch.dtype, tolerance: float, scale: float, trains_entropy: bool
) -> None:
    """Of each token by itself, those with a probability near 1 as well.

    There a gradient is a hundredth of its summands or less, so float32's tolerance is larger.
    """
    hidden, vocabulary, _, weights = _inputs(torch.float64, scale)
    vocabulary = vocabulary.detach().bfloat16().double()
    targets = (hidden @ vocabulary.T).argmax(1)
    logprobs, entropy = _whole(hidden, vocabulary, targets, 0.7)
    (weights[0] @ logprobs + trains_entropy * (weights[1] @ entropy)).backward()
    ours = hidden.detach().float().requires_grad_()
    found, also = token_logprobs(
        ours, vocabulary.float(), targets, temperature=0.7, chunk_tokens=8,
        compute_dtype=compute_dtype, with_entropy=True,
    )  # fmt: skip
    loss = weights[0].float() @ found
    (loss + weights[1].float() @ also if trains_entropy else loss).backward()
    error_N = (ours.grad.double() - hidden.grad).norm(dim=1) / hidden.grad.norm(dim=1)
    clear_N = hidden.grad.norm(dim=1) > 1e-3
    assert int(clear_N.sum()) > NUM_TOKENS // 2
    assert float(error_N[clear_N].max()) < tolerance


def test_a_frozen_vocabulary_is_multiplied_no_more_in_the_backward_pass() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float32)
    for is_trained in (True, False):
        logprobs, _ = token_logprobs(hidden, vocabulary.requires_grad_(is_trained), targets)
        with _Writes(NUM_TOKENS * VOCABULARY) as logits:
            logprobs.sum().backward()
        assert (logits.count > 0) == is_trained


def test_an_entropy_alone_can_be_trained() -> None:
    hidden, vocabulary, targets, weights = _inputs(torch.float64)
    _, entropy = token_logprobs(hidden, vocabulary, targets, chunk_tokens=8, with_entropy=True)
    assert entropy is not None
    (weights[1] @ entropy).backward()
    whole, rows, _, _ = _inputs(torch.float64)
    (weights[1] @ _whole(whole, rows, targets, 1.0)[1]).backward()
    for leaf, expected in ((hidden, whole), (vocabulary, rows)):
        torch.testing.assert_close(
            leaf.grad, expected.grad, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
        )


@pytest.mark.parametrize(
    ("device", "rows", "chunk", "kept"),
    [
        ("cpu", 49152, 512, 2730),
        ("cpu", 2**20, 512, 512),
        ("meta", 49152, 5461, 5461),
        ("meta", 0, 2**28, 2**28),
    ],
)
def test_chunks_suit_the_device_where_no_number_is_given(
    device: str, rows: int, chunk: int, kept: int
) -> None:
    """Every device but a CPU counts as a GPU: 5,461 rows of 49,152 float32 logits are 1 GiB."""
    vocabulary = torch.empty(rows, 1, device=device)
    assert head.default_chunk_tokens(vocabulary) == chunk
    assert head.default_kept_tokens(vocabulary) == kept


@pytest.mark.parametrize(("chunk_tokens", "num_chunks", "num_again"), [(None, 1, 0), (10, 4, 3)])
def test_the_last_logits_are_kept_for_one_backward_pass(
    chunk_tokens: int | None, num_chunks: int, num_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    class Counting(head.Projection):
        def __call__(self, hidden_CD: torch.Tensor) -> torch.Tensor:
            nonlocal made
            made += 1
            return super().__call__(hidden_CD)

    monkeypatch.setattr(head, "Projection", Counting)
    hidden, vocabulary, targets, _ = _inputs(torch.float32)
    logprobs, _ = token_logprobs(hidden, vocabulary, targets, chunk_tokens=chunk_tokens)
    assert made == num_chunks
    logprobs.sum().backward(retain_graph=True)
    assert made == num_chunks + num_again
    once = hidden.grad.clone(), vocabulary.grad.clone()
    logprobs.sum().backward()
    assert made == 2 * num_chunks + num_again
    for leaf, first in zip((hidden, vocabulary), once, strict=True):
        assert torch.equal(leaf.grad, 2 * first)


def test_gradients_pass_torchs_finite_differences() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float64)

    def both(hidden: torch.Tensor, vocabulary: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return token_logprobs(
            hidden, vocabulary, targets[:3], temperature=1.3, chunk_tokens=2, with_entropy=True
        )

    small = vocabulary.detach()[:9].clone().requires_grad_()
    targets = targets % 9
    assert torch.autograd.gradcheck(both, (hidden.detach()[:3].clone().requires_grad_(), small))


def test_bfloat16_rounds_the_vocabulary_and_never_states_or_logits() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float32, scale=2.0)
    ours = token_logprobs(
        hidden, vocabulary, targets, compute_dtype=torch.bfloat16, with_entropy=True
    )
    whole_hidden = hidden.detach().clone().requires_grad_()
    rounded_vocabulary = vocabulary.detach().bfloat16().float().requires_grad_()
    expected = _whole(whole_hidden, rounded_vocabulary, targets, 1.0)
    for our, wanted in zip(ours, expected, strict=True):
        assert our is not None
        assert our.dtype == torch.float32
        torch.testing.assert_close(our, wanted, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
        our.sum().backward(retain_graph=True)
        wanted.sum().backward(retain_graph=True)
    for leaf, rounded in ((hidden, whole_hidden), (vocabulary, rounded_vocabulary)):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        error = float((leaf.grad - rounded.grad).norm() / rounded.grad.norm())
        assert error < BFLOAT16_GRADIENT_TOLERANCE


def test_an_autocast_around_the_call_does_not_lower_float32_products() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float32)
    plain, _ = token_logprobs(hidden, vocabulary, targets)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = token_logprobs(hidden, vocabulary, targets)
    assert torch.equal(plain, inside)


def test_extreme_logits_give_finite_values_and_gradients() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float32, scale=100.0)
    logprobs, entropy = token_logprobs(hidden, vocabulary, targets, with_entropy=True)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    for tensor in (logprobs, entropy, hidden.grad, vocabulary.grad):
        assert bool(tensor.isfinite().all())
    assert bool((logprobs <= 0).all())


def test_no_tokens_give_no_logprobs_and_zero_gradient() -> None:
    hidden, vocabulary, targets, _ = _inputs(torch.float32)
    logprobs, _ = token_logprobs(hidden[:0], vocabulary, targets[:0])
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert float(vocabulary.grad.abs().sum()) == 0


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_as_large_as_all_logits_is_ever_made(compute_dtype: torch.dtype) -> None:
    num_tokens, width, vocabulary_size, chunk_tokens = 200, 8, 300, 16
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    vocabulary = torch.randn(vocabulary_size, width, requires_grad=True)
    targets = torch.randint(vocabulary_size, (num_tokens,))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(
            hidden,
            vocabulary,
            targets,
            chunk_tokens=chunk_tokens,
            compute_dtype=compute_dtype,
            with_entropy=True,
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numel == chunk_tokens * vocabulary_size
    assert largest.numel < num_tokens * vocabulary_size
