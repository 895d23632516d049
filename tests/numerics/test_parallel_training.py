"""Training on many ranks against training on one: losses, every gradient, three steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    GRADIENT_TOLERANCE,
    Job,
    Tensors,
    Trained,
    assert_agree,
    distance,
    joined,
    near_policy,
    train,
)
from support.rank_processes import RankPool
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import (
    ClipCovPolicyLossSpec,
    KlCovPolicyLossSpec,
    LossSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.train.trainer import Trainer

POLICY_LOSS = PpoPolicyLossSpec(
    entropy_coefficient=0.01,
    kl_in_loss=0.1,
    # The mean of its weights is that of all ranks.
    off_policy=MaskingSpec(low=0.7, high=1.4, normalize="batch"),
)
VALUE_LOSS = PpoValueLossSpec()
LAYERS = 3
"""Not a multiple of two stages."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Tied and untied."""
    return {
        tied: write_tiny_llama(
            tmp_path_factory.mktemp("llama"), seed=4, tied=tied, num_layers=LAYERS
        )
        for tied in (True, False)
    }


@pytest.fixture(scope="module")
def jobs(folders: dict[bool, Path]) -> dict[tuple[str, bool], Job]:
    """By kind and tied."""
    made = {}
    for tied, folder in folders.items():
        batch = token_batch()
        trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
        scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
        made["policy", tied] = Job(folder, near_policy(batch, scored), POLICY_LOSS)
        made["critic", tied] = Job(folder, batch, VALUE_LOSS, kind="critic")
    return made


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> Any:
    """Trains a job on one rank, once: in a process like the others, with as many threads."""
    known: dict[str, Trained] = {}

    def run(job: Job) -> Trained:
        job = replace(job, layout=TrainLayout(), model={})
        key = f"{job.folder} {job.kind} {job.mini_batch_rows} {job.optimizer}"
        if key not in known:
            known[key] = joined(rank_pool.run(train, 1, job), job.layout)
        return known[key]

    return run


@pytest.fixture(scope="module")
def spread(rank_pool: RankPool) -> Any:
    """Trains a job on the ranks of its layout, once."""
    known: dict[str, Trained] = {}

    def run(job: Job) -> Trained:
        told = job.loss, job.layout, job.mini_batch_rows, job.model, job.optimizer
        key = f"{job.folder} {job.kind} {told}"
        if key not in known:
            known[key] = joined(rank_pool.run(train, job.layout.world_size, job), job.layout)
        return known[key]

    return run


LAYOUTS = {
    "tp2": TrainLayout(tp=2),
    "tp4 (2 kv heads)": TrainLayout(tp=4),
    "pp2": TrainLayout(pp=2),
    "pp3": TrainLayout(pp=3),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "dp2": TrainLayout(dp=2),
    "hsdp2x2": TrainLayout(dp=4, fsdp=2),
    "tp2-dp2": TrainLayout(tp=2, dp=2),
    "tp2-fsdp2": TrainLayout(tp=2, dp=2, fsdp=2),
    "tp4-fsdp2 (2 kv heads)": TrainLayout(tp=4, dp=2, fsdp=2),
    "tp2-hsdp2x2": TrainLayout(tp=2, dp=4, fsdp=2),
    "pp2-fsdp2": TrainLayout(pp=2, dp=2, fsdp=2),
    "pp2-dp2": TrainLayout(pp=2, dp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    "tp2-pp2-dp2": TrainLayout(tp=2, pp=2, dp=2, order="tp-dp-pp"),
    "cp2": TrainLayout(dp=2, cp=2),
    "cp4-fsdp2 (2 kv heads)": TrainLayout(dp=4, cp=4, fsdp=2),
    "cp2-fsdp4": TrainLayout(dp=4, cp=2, fsdp=4),
    "tp2-cp2-dp4": TrainLayout(tp=2, dp=4, cp=2),
    "tp2-pp2-cp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, cp=2, fsdp=2),
}


UNTIED = ("tp2-pp2-fsdp2",)
"""Layouts in which `make test` trains an untied model, too: all ways at once. A head of its own is
cut in four below, and on a stage of its own."""
SLOW = (
    *("tp2", "pp2", "tp2-dp2", "tp4-fsdp2 (2 kv heads)", "tp2-hsdp2x2", "pp2-fsdp2", "pp2-dp2"),
    *("tp2-pp2-dp2", "cp2", "tp2-cp2-dp4", "tp2-fsdp2", "dp2"),
)
"""Layouts of two ways of which `make test` tries each by itself, and both together with a third or
with another kind of replicas; those of which it tries one with more ranks; and replicas of whole
models, with which it trains by losses that choose tokens."""


def _policies() -> Iterator[Any]:
    """Each layout, tied and untied."""
    for name, layout in LAYOUTS.items():
        for tied in (True, False):
            is_slow = name in SLOW if tied else name not in UNTIED
            yield pytest.param(
                *(layout, tied),
                id=f"{name}-{'tied' if tied else 'untied'}",
                marks=[pytest.mark.slow] if is_slow else [],
            )


@pytest.mark.parametrize(("layout", "tied"), list(_policies()))
def test_three_steps_of_a_policy_agree_with_one_rank(
    jobs: dict[tuple[str, bool], Job], alone: Any, spread: Any, layout: TrainLayout, tied: bool
) -> None:
    job = replace(jobs["policy", tied], layout=layout)
    assert_agree(spread(job), alone(job))


@pytest.mark.parametrize(
    "name",
    # All ways at once; the policy is trained in each way by itself.
    [
        *("tp2-pp2-fsdp2", "cp2-fsdp4"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tp2", "pp2", "fsdp2", "hsdp2x2", "pp2-dp2", "tp2-pp2-cp2-fsdp2")
        ),
    ],
    ids=str,
)
def test_three_steps_of_a_critic_agree_with_one_rank(
    jobs: dict[tuple[str, bool], Job], alone: Any, spread: Any, name: str
) -> None:
    job = replace(jobs["critic", True], layout=LAYOUTS[name])
    assert_agree(spread(job), alone(job))


@pytest.mark.parametrize(
    ("name", "recompute"),
    mostly_slow(
        (1, 2, 5),
        [
            ("fsdp2", "selective"),
            ("fsdp2", "full"),
            ("tp2-pp2-fsdp2", "selective"),
            ("tp2-pp2-fsdp2", "full"),
            ("cp2", "selective"),
            ("cp2-fsdp4", "full"),
            ("tp2-pp2-cp2-fsdp2", "full"),
        ],
    ),
)
def test_recomputed_activations_change_no_bit(
    jobs: dict[tuple[str, bool], Job], spread: Any, name: str, recompute: str
) -> None:
    job = replace(jobs["policy", True], layout=LAYOUTS[name])
    _assert_equal(spread(replace(job, model={"recompute": recompute})), spread(job))


@pytest.mark.parametrize(
    ("layout", "tied"),
    mostly_slow(
        (1, 2),
        [
            (TrainLayout(tp=4), True),
            (TrainLayout(tp=4), False),
            (TrainLayout(tp=4, dp=2, fsdp=2), True),
            (TrainLayout(tp=4, dp=2, fsdp=2), False),
        ],
    ),
    ids=str,
)
def test_a_slice_without_vocabulary_takes_part(
    tmp_path: Path, alone: Any, spread: Any, layout: TrainLayout, tied: bool
) -> None:
    # 130 tokens are padded to 192, 48 a slice: the last one has none.
    folder = write_tiny_decoder(tmp_path, "qwen2", vocab_size=130, tie_word_embeddings=tied)
    batch = token_batch(vocab_size=130)
    scored = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec()
    ).compute_logprobs(batch, temperature=1.0)["logprobs"]
    job = Job(folder, near_policy(batch, scored), POLICY_LOSS, layout=layout)
    assert_agree(spread(job), alone(job))


def test_stages_alone_change_no_bit_of_an_untied_model(
    jobs: dict[tuple[str, bool], Job], alone: Any, spread: Any
) -> None:
    # No sum crosses ranks but the norm's, and that is not clipped to here.
    for kind in ("policy", "critic"):
        job = replace(jobs[kind, False], layout=TrainLayout(pp=2), optimizer={"max_grad_norm": 1e6})
        found, expected = spread(job), alone(job)
        norm = expected.metrics["grad_norm"]
        assert found.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
        _assert_equal(replace(found, metrics={**found.metrics, "grad_norm": norm}), expected)


def test_the_gradient_norm_counts_every_element_once(
    jobs: dict[tuple[str, bool], Job], spread: Any
) -> None:
    for name in ("tp4 (2 kv heads)", "hsdp2x2", "tp2-pp2-fsdp2", "cp2-fsdp4"):
        found = spread(replace(jobs["policy", True], layout=LAYOUTS[name]))
        squares = [
            sum(float(gradient.double().square().sum()) for gradient in gradients.values())
            for gradients in found.gradients
        ]
        # The metric is the mean of three steps.
        expected = sum(one**0.5 for one in squares) / 3
        assert found.metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["dp2", "fsdp2"], ids=str)
def test_replicas_without_rows_take_part(
    rank_pool: RankPool, folders: Any, spread: Any, name: str
) -> None:
    batch = token_batch(prompt_lengths=(3, 4), completion_lengths=(5, 2))
    scored = Trainer.policy(
        ModelSpec(path=folders[True], compute_dtype="float32"), OptimizerSpec()
    ).compute_logprobs(batch, temperature=1.0)["logprobs"]
    # Three mini-batches would be one row each; there are two, for two and for four replicas.
    layout = LAYOUTS[name]
    job = Job(
        folders[True],
        near_policy(batch, scored),
        POLICY_LOSS,
        layout=replace(layout, dp=4, fsdp=4 if layout.fsdp > 1 else 1),
        mini_batch_rows=2,
    )
    expected = joined(rank_pool.run(train, 1, replace(job, layout=TrainLayout())), TrainLayout())
    found = spread(job)
    for key, gradient in expected.gradients[0].items():
        assert distance(found.gradients[0][key], gradient) < GRADIENT_TOLERANCE, key


@pytest.mark.parametrize(
    "loss",
    [
        ClipCovPolicyLossSpec(covariance_share=0.1, covariance_low=0.1),
        KlCovPolicyLossSpec(covariance_share=0.1),
    ],
    ids=lambda loss: loss.type,
)
def test_tokens_are_chosen_among_those_of_all_ranks(
    rank_pool: RankPool, jobs: dict[tuple[str, bool], Job], spread: Any, loss: LossSpec
) -> None:
    job = replace(jobs["policy", True], loss=loss, layout=LAYOUTS["dp2"])
    alone = joined(rank_pool.run(train, 1, replace(job, layout=TrainLayout())), TrainLayout())
    assert alone.metrics["covariance_chosen_fraction"] >= 0.1
    assert_agree(spread(job), alone)


def _assert_equal(found: Trained, expected: Trained) -> None:
    assert found.metrics == expected.metrics
    for left, right in zip(found.gradients, expected.gradients, strict=True):
        _assert_same_bits(left, right)
    _assert_same_bits(found.weights, expected.weights)
    for name, moment in expected.moments.items():
        _assert_same_bits(found.moments[name], moment)


def _assert_same_bits(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name
