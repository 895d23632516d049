"""A trainer's calls on many ranks: scoring, parts of a batch, and the memory that they leave.

Refusals and what fails on one rank are in test_parallel_trainer_faults.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.parallel_training import Job, make_trainer, policy_job, record_gradients, whole
from support.rank_processes import RankContext, RankPool
from support.slow_cases import mostly_slow
from support.updates import for_whole_batch, update_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import assuming
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.specs import ModelSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import NoGradientError

SCORE_TOLERANCE = 2e-5
"""Log-probs of some -6, float32 through two layers, with sums in another order."""
GRADIENT_TOLERANCE = 5e-6
"""Relative; see test_parallel_training."""
BFLOAT16_TOLERANCE = 0.02
"""Relative, of a gradient over the model: rounding to bfloat16 (1/256) hits other sums when rows
lie in other rectangles. Gathered weights are cast as whole ones are, so cutting adds nothing."""

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01)
FSDP2 = TrainLayout(dp=2, fsdp=2)
ALL_AXES = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)
CUT_ROWS = TrainLayout(dp=4, cp=2, fsdp=4)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return policy_job(tmp_path_factory.mktemp("llama"), POLICY_LOSS)


# --- scoring ------------------------------------------------------------------------------


def score(at: RankContext, job: Job, rows: list[list[int]]) -> tuple[Experience, list[Any]]:
    """Scores a replica's rows twice, with a step between, which leaves no stale weight behind."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        part = job.batch.select(torch.tensor(rows[mesh.parts.index], dtype=torch.int64))
        calls: list[Any] = []
        update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=4, seed=1)
        if trainer.kind == "critic":
            values = trainer.compute_values(part, lambda *call: calls.append(call))
            return Experience({"values": values}), calls
        trainer.compute_logprobs(part, temperature=0.7)
        update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=4, seed=2)
        scored = trainer.compute_logprobs(
            part, temperature=0.7, with_entropy=True, progress=lambda *call: calls.append(call)
        )
        return scored, calls


@pytest.mark.parametrize(
    ("kind", "layout"),
    mostly_slow(
        (0, 3, 5),
        [
            (kind, layout)
            for kind in ("policy", "critic")
            for layout in (FSDP2, ALL_AXES, TrainLayout(pp=2, tp=2), CUT_ROWS)
        ],
    ),
    ids=str,
)
def test_scores_of_each_replicas_rows_equal_one_ranks(
    rank_pool: RankPool, job: Job, layout: TrainLayout, kind: str
) -> None:
    if kind == "critic":
        job = replace(job, kind="critic", loss=PpoValueLossSpec())
    [(expected, _)] = rank_pool.run(score, 1, job, [list(range(8))])
    job = replace(job, layout=layout)
    # Unequal, and one empty where there are several.
    rows = [[6, 1, 0, 3, 2, 7, 4, 5], []][: layout.num_parts]
    found = rank_pool.run(score, layout.world_size, job, rows)
    for rank, (scored, calls) in enumerate(found):
        at = layout.coordinates(rank)
        done = [call[1] for call in calls]
        assert done == sorted(done)
        part = rows[at.dp // layout.cp]
        assert done[-1:] == ([8] if part else [])
        own = torch.tensor(part, dtype=torch.int64)
        if at.pp < layout.pp - 1:
            assert scored.num_rows == 0
            continue
        assert scored.num_rows == len(own)
        for name, column in expected.select(own).columns.items():
            torch.testing.assert_close(
                scored[name].values, column.values, rtol=0, atol=SCORE_TOLERANCE
            )


# --- parts of a batch ---------------------------------------------------------------------


@dataclass
class Accumulated:
    """What forward_backward gave."""

    metrics: dict[str, float]
    outputs: Experience
    gradients: dict[str, torch.Tensor]
    shape: Any
    alone: dict[str, float]
    """Metrics of the same loss without gradients."""


def accumulate(at: RankContext, job: Job, holds_all: bool) -> Accumulated:
    """One forward_backward over the whole batch, of which a rank holds all or just its part."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        steps = record_gradients(trainer)
        lengths = job.batch["tokens"].lengths().tolist()
        part = balanced_partition(lengths, mesh.parts.size)[mesh.parts.index]
        held, plan = job.batch.select(torch.tensor(part)), UpdatePlan.of_mini_batch(lengths, part)
        if holds_all:
            held, plan = job.batch, for_whole_batch(plan)
        alone, _ = trainer.forward_backward(held, job.loss, plan, without_gradients=True)
        with pytest.raises(NoGradientError):
            trainer.optim_step()
        metrics, outputs = trainer.forward_backward(held, job.loss, plan)
        trainer.optim_step()
        return Accumulated(metrics, outputs, steps[0], trainer.model.shape, alone)


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(at, marks=pytest.mark.slow) for at in (TrainLayout(dp=4), FSDP2)), ALL_AXES],
    ids=str,
)
def test_a_rank_that_holds_only_its_rows_does_the_same_bit_by_bit(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    job = replace(job, layout=layout)
    all_rows = rank_pool.run(accumulate, layout.world_size, job, True)
    own_rows = rank_pool.run(accumulate, layout.world_size, job, False)
    for left, right in zip(all_rows, own_rows, strict=True):
        assert left.metrics == right.metrics
        assert left.alone == right.alone == pytest.approx(left.metrics, rel=1e-5, abs=1e-6)
        assert left.gradients.keys() == right.gradients.keys()
        assert all(
            torch.equal(left.gradients[name], right.gradients[name]) for name in left.gradients
        )
    lengths = job.batch["tokens"].lengths().tolist()
    parts = balanced_partition(lengths, layout.dp)
    [alone] = rank_pool.run(accumulate, 1, replace(job, layout=TrainLayout()), True)
    for rank, found in enumerate(all_rows):
        at = layout.coordinates(rank)
        if at.pp == layout.pp - 1:
            expected = alone.outputs.select(torch.tensor(parts[at.dp]))["logprobs"].values
            torch.testing.assert_close(
                found.outputs["logprobs"].values, expected, rtol=0, atol=SCORE_TOLERANCE
            )


def test_gradients_do_not_depend_on_who_takes_which_rows(rank_pool: RankPool, job: Job) -> None:
    lengths = job.batch["tokens"].lengths().tolist()
    # The same rows in another order are cut into other parts.
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    layout = TrainLayout(dp=4, fsdp=2)
    moved = replace(job, layout=layout, batch=job.batch.select(order))
    moved_lengths = moved.batch["tokens"].lengths().tolist()
    parts = {
        frozenset(order[part].tolist()) for part in balanced_partition(moved_lengths, layout.dp)
    }
    assert parts != {frozenset(part) for part in balanced_partition(lengths, layout.dp)}
    found = []
    for one in (replace(job, layout=layout), moved):
        ranks = rank_pool.run(accumulate, layout.world_size, one, True)
        found.append(whole([rank.gradients for rank in ranks], ranks[0].shape, layout))
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() < GRADIENT_TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize("layout", [pytest.param(FSDP2, marks=pytest.mark.slow), ALL_AXES], ids=str)
def test_bfloat16_products_work_on_cut_weights(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    job = replace(job, model={"compute_dtype": "bfloat16", "recompute": "full"})
    [alone] = rank_pool.run(accumulate, 1, job, True)
    ranks = rank_pool.run(accumulate, layout.world_size, replace(job, layout=layout), True)
    found = whole([rank.gradients for rank in ranks], alone.shape, layout)
    expected = whole([alone.gradients], alone.shape, TrainLayout())
    distance = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    size = sum(float(gradient.square().sum()) for gradient in expected.values())
    assert (distance / size) ** 0.5 < BFLOAT16_TOLERANCE


# --- memory ------------------------------------------------------------------------------


def held_bytes(at: RankContext, job: Job) -> tuple[list[int], int, int]:
    """Bytes of weights after loading, scoring and a step; of moments; and of the whole model."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        weights = []

        def note() -> None:
            # A gathered parameter would be a plain tensor here, of full size.
            local = [getattr(p, "_local_tensor", p) for p in trainer.model.parameters()]
            weights.append(sum(tensor.untyped_storage().nbytes() for tensor in local))

        note()
        trainer.compute_logprobs(job.batch, temperature=1.0)
        note()
        update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        note()
        moments = sum(tensor.nbytes for tensor in trainer.optimizer_state("exp_avg").values())
        assert trainer.model.shape is not None
        manifest = trainer.model.shape.manifest("float32")
        return weights, moments, sum(parameter.num_bytes for parameter in manifest.values())


@pytest.mark.parametrize(
    ("layout", "share"),
    mostly_slow((2,), [(FSDP2, 2), (TrainLayout(dp=4, fsdp=4), 4), (TrainLayout(dp=4, fsdp=2), 2)]),
    ids=str,
)
def test_between_passes_a_rank_holds_its_part_of_weights_and_moments_alone(
    rank_pool: RankPool, job: Job, layout: TrainLayout, share: int
) -> None:
    # All dimensions of the tiny model divide by 4, so every part is equal.
    for weights, moments, whole_bytes in rank_pool.run(
        held_bytes, layout.world_size, replace(job, layout=layout)
    ):
        assert weights == [whole_bytes // share] * 3
        assert moments == whole_bytes // share


def load_in_parts(at: RankContext, job: Job) -> tuple[int, dict[str, torch.Tensor], Any]:
    """Elements in memory before the cut; a rank's parts after it; and the sizes of the model."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        spec = ModelSpec(path=job.folder)
        loaded = (
            ScoringModel(spec, VALUE_HEAD, mesh=mesh)
            if job.kind == "critic"
            else CausalLm(spec, mesh=mesh)
        )
        held = sum(p.numel() for p in loaded.parameters() if not p.is_meta)
        RankModel(loaded)
        parts = {name: local_part(w.detach()).clone() for name, w in loaded.named_weights()}
        return held, parts, loaded.shape


@pytest.mark.parametrize(
    ("kind", "layout"), [("policy", FSDP2), ("critic", TrainLayout(tp=2, dp=2, fsdp=2))], ids=str
)
def test_weights_that_the_data_axis_cuts_are_never_whole_on_a_rank(
    rank_pool: RankPool, job: Job, layout: TrainLayout, kind: str
) -> None:
    job = replace(job, layout=layout, kind=kind)
    ranks = rank_pool.run(load_in_parts, layout.world_size, job)
    assert [held for held, _, _ in ranks] == [0] * layout.world_size
    found = whole([parts for _, parts, _ in ranks], ranks[0][2], layout)
    stored = load_file(job.folder / "model.safetensors")
    for name, weight in found.items():
        # The critic's head, which a policy's folder lacks, begins at zero.
        expected = stored[name] if name in stored else torch.zeros_like(weight)
        assert torch.equal(weight, expected), name
    assert ("score.weight" in found) == (kind == "critic")


def recomputes(at: RankContext, job: Job, rooms: list[int]) -> bool:
    """Whether a rank of which each has another room recomputes its layers."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        # As on a GPU that has so much left.
        with assuming("cuda", rooms[mesh.rank]):
            model = make_trainer(job, at, mesh).model
        forward = model.lm.base_model.layers[0].forward
        return getattr(forward, "__name__", "") == "forward" and hasattr(forward, "__wrapped__")


@pytest.mark.parametrize(("rooms", "expected"), [([1 << 40, 1], True), ([1 << 40] * 2, False)])
def test_ranks_recompute_alike_though_one_has_less_room(
    rank_pool: RankPool, job: Job, rooms: list[int], expected: bool
) -> None:
    assert rank_pool.run(recomputes, 2, replace(job, layout=FSDP2), rooms) == [expected] * 2
