"""Slices that share the tokens between their blocks: against one rank, and in what they keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parallel_training import Job, Trained, joined, make_trainer, near_policy, train
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.fit.rank_memory import RankWork, estimated
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel import token_shares
from rolemesh.engine.parallel.token_shares import (
    gather_shares,
    gather_to_slices,
    sum_to_shares,
    take_share,
)
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.trainer import Trainer

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient: as in test_parallel_training, sums in another order."""
STEP_TOLERANCE = 3e-5
"""Absolute, of a weight after three steps of 1e-3; see test_parallel_training."""
METRIC_TOLERANCE = 1e-5
SLICES_TOLERANCE = 1.5
"""Times the distance of one process from float32, in bfloat16; see test_narrow_gathers."""

SHARING = {"sequence_parallel": True}
TP2, TP4 = TrainLayout(tp=2), TrainLayout(tp=4)
ALL_WAYS = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)
LAYERS = 3
BUDGET = {"micro_batch_tokens": 30}
"""Rows have odd lengths of 3 to 15, and a step has three of them, so that in each step a pass has
one row or three, and an odd number of tokens."""


# --- shares ---------------------------------------------------------------------------------


def shares_of_rank(at: RankContext, size: int) -> None:
    """Every operation and its gradient, for 5 tokens, against arithmetic on the whole."""
    rows, longest, width, per_share = 1, 5, 2, -(-5 // size)
    # Small whole numbers, whose sums are exact in any order.
    values = torch.arange(10.0).view(rows, longest, width)
    filled = torch.cat([values[0], torch.zeros(per_share * size - 5, width)])
    own = slice(at.rank * per_share, (at.rank + 1) * per_share)
    scale = float(at.rank + 1)
    total = size * (size + 1) / 2
    with at.connect(HybridLayout(TrainLayout(tp=size))) as mesh:
        whole = values.clone().requires_grad_()
        share = take_share(whole, mesh.tp)
        assert torch.equal(share, filled[None, own])
        assert share.untyped_storage().nbytes() == 4 * per_share * width  # nothing whole is kept
        back = gather_shares(share, mesh.tp, (rows, longest))
        assert torch.equal(back, values)
        back.backward(3 * values)
        assert torch.equal(whole.grad, 3 * values)

        share = filled[None, own].clone().requires_grad_()
        everything = gather_to_slices(share, mesh.tp, None)
        assert torch.equal(everything[0], filled)
        gather_to_slices(share, mesh.tp, (rows, longest)).backward(scale * values)
        assert torch.equal(share.grad, total * filled[None, own])

        part = (scale * values).bfloat16().requires_grad_()
        for in_own_type in (False, True):
            part.grad = None
            summed = sum_to_shares(part, mesh.tp, in_own_type=in_own_type)
            assert torch.equal(summed, (total * filled[None, own]).bfloat16())
            assert torch.equal(part, (scale * values).bfloat16())  # it was not summed in place
            summed.backward(filled[None, own].bfloat16())
            assert torch.equal(part.grad, values.bfloat16())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shares_are_parts_of_the_whole_and_so_are_their_gradients(
    rank_pool: RankPool, size: int
) -> None:
    rank_pool.run(shares_of_rank, size, size)


# --- training -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """By kind. The policy's embedding is tied."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("llama"), seed=4, tied=True, num_layers=LAYERS
    )
    prompts, completions = (3, 5, 1, 7, 2, 4, 3, 6), (4, 6, 2, 8, 7, 9, 2, 9)
    batch = token_batch(prompt_lengths=prompts, completion_lengths=completions)
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    loss = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)
    return {
        "policy": Job(folder, near_policy(batch, scored), loss),
        "critic": Job(folder, batch, PpoValueLossSpec(), kind="critic"),
    }


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, jobs: dict[str, Job]) -> dict[str, Trained]:
    return {
        kind: joined(rank_pool.run(train, 1, replace(job, model=BUDGET)), TrainLayout())
        for kind, job in jobs.items()
    }


@pytest.mark.parametrize(
    ("kind", "layout", "recompute"),
    [
        ("policy", TP2, "none"),
        ("policy", TP2, "full"),
        ("policy", ALL_WAYS, "full"),
        ("critic", TP2, "selective"),
        pytest.param("policy", TP4, "none", marks=pytest.mark.slow),
        pytest.param("policy", ALL_WAYS, "selective", marks=pytest.mark.slow),
        pytest.param("critic", ALL_WAYS, "none", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_steps_agree_with_one_rank(
    rank_pool: RankPool,
    jobs: dict[str, Job],
    alone: dict[str, Trained],
    kind: str,
    layout: TrainLayout,
    recompute: str,
) -> None:
    job = replace(jobs[kind], layout=layout, model={**BUDGET, **SHARING, "recompute": recompute})
    # Joining holds replicas of a weight, norms among them, to the same bits.
    found = joined(rank_pool.run(train, layout.world_size, job), layout)
    expected = alone[kind]
    for name, number in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(
            number, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE
        ), name
    for name, distance in _distances(found, expected).items():
        assert distance < GRADIENT_TOLERANCE, name
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=STEP_TOLERANCE)


def test_bfloat16_layers_are_as_far_from_float32_as_those_of_one_process(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path
) -> None:
    """Each product and sum is rounded, as without shares."""
    folder = tmp_path / "rounded"
    rounded_copy(load_trainer_model(jobs["policy"].folder)).save_pretrained(folder)
    job = replace(jobs["policy"], folder=folder)
    narrow = {"compute_dtype": "bfloat16", "activations": "bfloat16"}

    def trained(layout: TrainLayout, **model: Any) -> Trained:
        spread = replace(job, layout=layout, model=model)
        return joined(rank_pool.run(train, layout.world_size, spread), layout)

    one = trained(TrainLayout(), **narrow)
    floor = _distances(one, trained(TrainLayout()))
    for name, distance in _distances(trained(TP2, **narrow, **SHARING), one).items():
        assert distance < SLICES_TOLERANCE * floor[name], name


def _distances(found: Trained, expected: Trained) -> dict[str, float]:
    """Of the first step's gradients: later ones are of weights that already differ."""
    return {
        name: float(
            (found.gradients[0][name].double() - gradient.double()).norm()
            / gradient.double().norm()
        )
        for name, gradient in expected.gradients[0].items()
    }


# --- what is sent and kept ------------------------------------------------------------------


def sent_while_scoring(at: RankContext, job: Job) -> Counter[tuple[str, str]]:
    """Collective operations on hidden states, with their types, in a pass of one micro-batch."""
    seen: Counter[tuple[str, str]] = Counter()
    places = {
        "all_reduce": (dist, "all_reduce"),
        "all_gather": (token_shares, "all_gather"),
        "reduce_scatter": (token_shares, "_reduce_scatter"),
    }
    real = {name: getattr(*place) for name, place in places.items()}
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        width = trainer.model.config.hidden_size

        def noting(name: str) -> Any:
            def call(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
                if tensor.shape[-1] == width:
                    seen[name, str(tensor.dtype)] += 1
                return real[name](tensor, *arguments, **options)

            return call

        for name, place in places.items():
            setattr(*place, noting(name))
        try:
            trainer.compute_logprobs(job.batch, temperature=1.0)
        finally:
            for name, place in places.items():
                setattr(*place, real[name])
    return seen


def test_each_sum_is_a_reduce_scatter_and_a_gather_of_the_layers_type(
    rank_pool: RankPool, jobs: dict[str, Job]
) -> None:
    model = {"compute_dtype": "bfloat16", "activations": "bfloat16", "micro_batch_tokens": 1000}
    job = replace(jobs["policy"], layout=TP2, model={**model, **SHARING})
    narrow = "torch.bfloat16"
    for seen in rank_pool.run(sent_while_scoring, 2, job):
        # The embedding is summed whole, and the last norm's result gathered.
        assert seen == {
            ("all_reduce", "torch.float32"): 1,
            ("reduce_scatter", narrow): 2 * LAYERS,
            ("all_gather", narrow): 2 * LAYERS + 1,
        }


TOKENS, WIDTH = 2048, 64


def _kept_per_layer(folder: Path, recompute: str, **model: Any) -> int:
    """Bytes of activations that a further layer keeps at the peak, as `rolemesh fit` sees them."""

    def activations(num_layers: int) -> int:
        work = RankWork(
            kind="policy",
            model=ModelSpec(
                path=folder,
                micro_batch_tokens=TOKENS,
                num_layers=num_layers,
                recompute=recompute,  # type: ignore[arg-type]
                **model,
            ),
            numerics="fast",
            layout=HybridLayout(TP2),
            optimizer=OptimizerSpec(),
            loss=PpoPolicyLossSpec(),
            row_tokens=TOKENS,
            prompt_tokens=64,
            passes=1,
        )
        found = estimated(work)
        assert found.peak_phase == "passes"
        return found.at_peak["activations"]

    return activations(3) - activations(2)


BYTES_OF_ALL = 2 * TOKENS * WIDTH
"""Of hidden states in bfloat16."""


@pytest.mark.slow
def test_a_layer_that_is_computed_again_keeps_its_share(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, hidden_size=WIDTH, num_layers=3)
    assert _kept_per_layer(folder, "full") == BYTES_OF_ALL
    assert _kept_per_layer(folder, "full", **SHARING) == BYTES_OF_ALL / 2


@pytest.mark.slow
def test_norms_and_an_attention_that_is_computed_again_keep_shares(tmp_path: Path) -> None:
    """Each of two norms keeps float32 and bfloat16 numbers, attention its input."""
    folder = write_tiny_llama(tmp_path, hidden_size=WIDTH, num_layers=3)
    whole = _kept_per_layer(folder, "selective")
    shared = _kept_per_layer(folder, "selective", **SHARING)
    assert whole - shared == pytest.approx((2 * 3 + 1) * BYTES_OF_ALL / 2, rel=0.01)
