"""Triton's kernels, by its interpreter, against their references in torch."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from support.kernel_cases import (
    BFLOAT16_TOLERANCE,
    HEADS,
    LOSSES,
    ROWS,
    TOLERANCE,
    assert_both_agree,
    both,
    estimated,
    kernels,
    lost,
    scored,
)
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.kernels.choice import KERNELS_VARIABLE
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

CPU = "cpu"


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS)
def test_logprobs_entropy_and_gradients_are_the_references(case: dict[str, Any]) -> None:
    # Logits grow with the scale, and so do their steps and those of the sums in an entropy.
    assert_both_agree(lambda: scored(CPU, **case), TOLERANCE * max(1.0, case.get("scale", 0.0)))


def test_bfloat16_products_are_summed_in_float32() -> None:
    case = {"num_tokens": 37, "num_rows": 301, "width": 50}
    with kernels("triton"):
        found = scored(CPU, **case, compute_dtype=torch.bfloat16)
    # Both factors are rounded here, as on a GPU: the reference on a CPU rounds one alone.
    generator = torch.Generator().manual_seed(37 + 301)
    hidden = torch.randn(37, 50, generator=generator).bfloat16().double()
    vocabulary = (0.3 * torch.randn(301, 50, generator=generator)).bfloat16().double()
    torch.randn(37, generator=generator)
    targets = torch.randint(301, (37,), generator=generator)
    expected = (hidden @ vocabulary.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    # 2^-24 of logits of size 10, where a rounded logit is off by 2^-5.
    torch.testing.assert_close(found["logprobs"].double(), expected, rtol=1e-5, atol=1e-5)
    with kernels("torch"):
        reference = scored(CPU, **case, compute_dtype=torch.bfloat16)
    for name in ("gradient of hidden", "gradient of vocabulary"):
        error = float((found[name] - reference[name]).norm() / reference[name].norm())
        assert error < BFLOAT16_TOLERANCE, name


def test_gradients_of_logits_come_in_blocks_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rolemesh.engine.kernels import linear_logprobs

    shapes = []
    real = linear_logprobs.logit_gradients

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        gradients = real(*args, **kwargs)
        shapes.append(tuple(gradients.shape))
        return gradients

    monkeypatch.setattr(linear_logprobs, "logit_gradients", recording)
    with kernels("triton"):
        scored(CPU, num_tokens=40, num_rows=700, width=8, chunk_tokens=15)
    # 15 x 700 numbers are 262 for each of 40 tokens: 256, in whole multiples of 128.
    assert shapes == [(40, 256), (40, 256), (40, 188)]


def test_an_entropy_that_no_loss_reads_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from rolemesh.engine.kernels import linear_logprobs

    seen = []
    real = linear_logprobs.logit_gradients

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(args[5] is None and args[6] is None)
        return real(*args, **kwargs)

    monkeypatch.setattr(linear_logprobs, "logit_gradients", recording)
    with kernels("triton"):
        scored(CPU, num_tokens=3, num_rows=20, width=8, entropy_weight=None)
        scored(CPU, num_tokens=3, num_rows=20, width=8, entropy_weight=1.0)
    assert seen == [True, False]


def test_splits_of_the_vocabulary_add_up_to_the_whole() -> None:
    from rolemesh.engine.kernels.linear_logprobs import Tiles, combine, partial_sums

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, 24, generator=generator)
    vocabulary = torch.randn(130, 24, generator=generator)
    targets = torch.randint(130, (21,), generator=generator)
    logits = hidden.double() @ vocabulary.double().T / 0.7
    highest = logits.amax(1)
    exps = (logits - highest[:, None]).exp()
    expected = [
        exps.sum(1),
        ((logits - highest[:, None]) * exps).sum(1),
        logits.gather(1, targets[:, None]).squeeze(1),
    ]
    tiles = Tiles(16, 16, 16)
    for splits in (1, 4, 99):
        sums, largest = partial_sums(
            hidden, vocabulary, targets, temperature=0.7, tiles=tiles, splits=splits
        )
        torch.testing.assert_close(largest.double(), highest, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums.double(), torch.stack(expected), rtol=1e-5, atol=1e-4)
    # Three slices as ranks hold them, one of them without rows.
    parts = [
        partial_sums(hidden, vocabulary[a:b], targets, temperature=0.7, first_row=a, tiles=tiles)
        for a, b in ((0, 50), (50, 50), (50, 130))
    ]
    sums, largest = combine(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    )
    torch.testing.assert_close(largest.double(), highest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), torch.stack(expected), rtol=1e-5, atol=1e-4)


def score_slice(at: RankContext, bounds: list[int], choice: str) -> dict[str, torch.Tensor]:
    """This rank's slice, by the kernels or without them."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(19, 24, generator=generator).requires_grad_()
    whole = torch.randn(90, 24, generator=generator)
    targets = torch.randint(90, (19,), generator=generator)
    first, end = bounds[at.rank], bounds[at.rank + 1]
    own = whole[first:end].clone().requires_grad_()
    os.environ[KERNELS_VARIABLE] = choice
    try:
        with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
            logprobs, entropy = token_logprobs(
                hidden, own, targets, with_entropy=True, group=mesh.tp, first_row=first
            )
            assert entropy is not None
            (logprobs.sum() + 0.3 * entropy.sum()).backward()
    finally:
        del os.environ[KERNELS_VARIABLE]
    assert hidden.grad is not None
    assert own.grad is not None
    return {
        **{"logprobs": logprobs.detach(), "entropy": entropy.detach()},
        **{"hidden": hidden.grad, "vocabulary": own.grad},
    }


def test_ranks_that_cut_the_vocabulary_give_what_the_reference_does(rank_pool: RankPool) -> None:
    bounds = [0, 40, 90]
    found = rank_pool.run(score_slice, 2, bounds, "triton")
    expected = rank_pool.run(score_slice, 2, bounds, "torch")
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", ["", "on policy", "far"])
@pytest.mark.parametrize("spec", LOSSES.values(), ids=LOSSES)
def test_loss_gradient_and_metrics_are_the_references(spec: PpoPolicyLossSpec, change: str) -> None:
    assert_both_agree(lambda: lost(CPU, spec, (7, 1, 0, 16, 3), change))


def test_an_entropy_that_nobody_asked_for_is_no_metric() -> None:
    compute = partial(lost, CPU, LOSSES["dual clip, k1"], (7, 1, 0, 16, 3), "no entropy")
    assert "entropy" not in compute()
    assert_both_agree(compute)


def test_losses_of_many_blocks_and_of_no_token() -> None:
    spec = LOSSES["everything, k3"]
    assert_both_agree(lambda: lost(CPU, spec, (900, 1, 700)))
    assert_both_agree(lambda: lost(CPU, spec, (0, 0)))


def test_a_logprob_that_is_nan_makes_the_loss_nan() -> None:
    found, expected = both(lambda: lost(CPU, LOSSES["everything, k3"], (4, 3), "broken"))
    for name in ("loss", "policy_loss", "kl_loss", "approx_kl"):
        assert bool(expected[name].isnan()), name
        assert bool(found[name].isnan()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.0, 0.9), (1.0, 1.0)])
def test_advantages_and_returns_are_the_references(
    gamma: float, lam: float, dtype: torch.dtype
) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    assert_both_agree(lambda: estimated(CPU, (5, 0, 20, 1, 0, 33), dtype, gamma, lam), tolerance)


def test_blocks_of_a_long_row_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from rolemesh.engine.kernels import segmented_scan

    monkeypatch.setattr(segmented_scan, "MOST_BLOCK_TOKENS", 16)
    assert_both_agree(lambda: estimated(CPU, ROWS, torch.float64, 0.99, 0.9), 1e-10)


def test_an_update_by_the_kernels_trains_as_the_references_do(tmp_path: Any) -> None:
    """The whole way: rows laid out, head, loss and gradients of a real trainer."""
    folder = write_tiny_llama(tmp_path / "tiny")
    spec = PpoPolicyLossSpec(kl_in_loss=0.1, entropy_coefficient=0.01)

    def trained() -> dict[str, torch.Tensor]:
        trainer = Trainer.policy(
            ModelSpec(path=folder, compute_dtype="float32", share_prefixes="never"),
            OptimizerSpec(learning_rate=1e-3),
        )
        batch = token_batch(prompt_lengths=(3, 5), completion_lengths=(4, 6))
        logprobs = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
        shifted = Column(logprobs.kind, logprobs.values - 0.1, logprobs.offsets)
        batch = batch | Experience({"logprobs": logprobs, "reference_logprobs": shifted})
        metrics = update_whole(trainer, batch, spec, epochs=1, mini_batch_rows=2, seed=0)
        return {
            "logprobs": logprobs.values,
            **{name: torch.tensor(number) for name, number in metrics.items()},
        }

    assert_both_agree(trained, 1e-4)
