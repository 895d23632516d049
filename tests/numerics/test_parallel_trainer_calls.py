"""A trainer's calls on many ranks: scoring, parts of a batch, refusals, and what fails on one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.parallel_training import Job, make_trainer, near_policy, record_gradients, whole
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.batching import balanced_partition
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import LossNotFiniteError, NoGradientError, Trainer

SCORE_TOLERANCE = 2e-5
"""Log-probs of some -6, float32 through two layers, with sums in another order."""
GRADIENT_TOLERANCE = 5e-6
"""Relative; see test_parallel_training."""
BFLOAT16_TOLERANCE = 0.02
"""Relative, of a gradient over the model: rounding to bfloat16 (1/256) hits other sums when rows
lie in other rectangles. Gathered weights are cast as whole ones are, so cutting adds nothing."""

BROKEN_TIMEOUT_S = 5.0
"""A stage waits this long for the one that left its pass."""

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01)
FSDP2 = TrainLayout(dp=2, fsdp=2)
ALL_AXES = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), POLICY_LOSS)


# --- scoring ------------------------------------------------------------------------------


def score(at: RankContext, job: Job, rows: list[list[int]]) -> tuple[Experience, list[Any]]:
    """Scores a replica's rows twice, with a step between, which leaves no stale weight behind."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        part = job.batch.select(torch.tensor(rows[mesh.dp.index], dtype=torch.int64))
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


@pytest.mark.parametrize("layout", [FSDP2, ALL_AXES, TrainLayout(pp=2, tp=2)], ids=str)
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_scores_of_each_replicas_rows_equal_one_ranks(
    rank_pool: RankPool, job: Job, layout: TrainLayout, kind: str
) -> None:
    if kind == "critic":
        job = replace(job, kind="critic", loss=PpoValueLossSpec())
    [(expected, _)] = rank_pool.run(score, 1, job, [list(range(8))])
    job = replace(job, layout=layout)
    # Unequal, and one empty where there are several.
    rows = [[6, 1, 0, 3, 2, 7, 4, 5], []][: layout.dp]
    found = rank_pool.run(score, layout.world_size, job, rows)
    for rank, (scored, calls) in enumerate(found):
        at = layout.coordinates(rank)
        done = [call[1] for call in calls]
        assert done == sorted(done)
        assert done[-1:] == ([8] if rows[at.dp] else [])
        own = torch.tensor(rows[at.dp], dtype=torch.int64)
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
        part = balanced_partition(lengths, mesh.dp.size)[mesh.dp.index]
        held, plan = job.batch, None
        if not holds_all:
            held = job.batch.select(torch.tensor(part))
            plan = UpdatePlan.of_mini_batch(lengths, part)
        alone = trainer.forward_backward(held, job.loss, plan=plan, without_gradients=True)
        with pytest.raises(NoGradientError):
            trainer.optim_step()
        metrics, outputs = trainer.forward_backward_with_outputs(held, job.loss, plan=plan)
        trainer.optim_step()
        return Accumulated(metrics, outputs, steps[0], trainer.model.shape, alone)


@pytest.mark.parametrize("layout", [TrainLayout(dp=4), FSDP2, ALL_AXES], ids=str)
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


@pytest.mark.parametrize("layout", [FSDP2, ALL_AXES], ids=str)
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
    [(FSDP2, 2), (TrainLayout(dp=4, fsdp=4), 4), (TrainLayout(dp=4, fsdp=2), 2)],
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


@pytest.mark.parametrize("layout", [FSDP2, TrainLayout(tp=2, dp=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("kind", ["policy", "critic"])
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


# --- what fails on one rank ---------------------------------------------------------------


def _with_nan(batch: Experience, row: int) -> Experience:
    """An advantage that is not a number, in one row."""
    rows = [values.clone() for values in batch["advantages"].rows()]
    mask = [bool(values.any()) for values in batch["loss_mask"].rows()]
    assert mask[row]
    rows[row].fill_(torch.nan)
    return batch | Experience(
        {"advantages": Column.ragged(ColumnKind.COMPLETION, rows, torch.float32)}
    )


def survive_nan(at: RankContext, job: Job) -> tuple[str, bool, int, dict[str, float]]:
    """Meets a loss that is NaN on one replica, then trains on."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        before = {name: weight.clone() for name, weight in trainer.named_weights()}
        poisoned = _with_nan(job.batch, row=3)
        with pytest.raises(LossNotFiniteError) as caught:
            update_whole(trainer, poisoned, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        moved = any(not torch.equal(before[name], w) for name, w in trainer.named_weights())
        with pytest.raises(NoGradientError):
            trainer.optim_step()
        metrics = update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        return str(caught.value), moved, trainer.policy_version, metrics


@pytest.mark.parametrize(
    "layout",
    [FSDP2, TrainLayout(dp=2), TrainLayout(pp=2), TrainLayout(tp=2), ALL_AXES],
    ids=str,
)
def test_a_nan_on_one_rank_raises_on_all_and_moves_no_weight(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    found = rank_pool.run(survive_nan, layout.world_size, replace(job, layout=layout))
    messages = {message for message, _, _, _ in found}
    assert len(messages) == 1
    assert "loss is nan" in messages.pop()
    for _, moved, policy_version, metrics in found:
        assert not moved
        assert policy_version == 1
        assert metrics == found[0][3]
    [clean] = rank_pool.run(update_once, 1, job)
    assert found[0][3]["grad_norm"] == pytest.approx(clean["grad_norm"], rel=1e-5)


def update_once(at: RankContext, job: Job) -> dict[str, float]:
    """One clean step."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        return update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)


def poison_gradient(at: RankContext, job: Job) -> str:
    """A gradient that is infinite on the last rank alone."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        trainer.forward_backward(job.batch, job.loss)
        if mesh.world.is_last:
            *_, (_, parameter) = trainer.model.named_weights()
            gradient = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = torch.inf
        with pytest.raises(LossNotFiniteError) as caught:
            trainer.optim_step()
        assert trainer.policy_version == 0
        return str(caught.value)


@pytest.mark.parametrize("layout", [FSDP2, TrainLayout(pp=2), ALL_AXES], ids=str)
def test_an_infinite_gradient_on_one_rank_raises_on_all(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    messages = rank_pool.run(poison_gradient, layout.world_size, replace(job, layout=layout))
    assert len(set(messages)) == 1
    assert "norm" in messages[0]


def refuse(at: RankContext, job: Job) -> list[str]:
    """Calls that one rank cannot make; and that the next call works."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        said = []
        lengths = job.batch["tokens"].lengths().tolist()
        plan = UpdatePlan.of_update(lengths, mesh.dp, epochs=1, mini_batch_rows=8, seed=1)
        # The second replica lacks a row.
        rows = plan.rows[1:] if mesh.dp.index == 1 else plan.rows
        with pytest.raises(ValueError, match="row") as caught:
            trainer.update(job.batch.select(torch.tensor(rows)), job.loss, plan)
        said.append(str(caught.value))
        # The second replica has a row whose prompt is longer than the row.
        prompts = job.batch["prompt_lengths"].values.clone()
        if mesh.dp.index == 1:
            prompts[:] = 99
        broken = Experience(
            {"tokens": job.batch["tokens"], "prompt_lengths": Column(ColumnKind.ROW, prompts)}
        )
        with pytest.raises(ValueError, match="prompt_lengths") as caught:
            trainer.compute_logprobs(broken, temperature=1.0)
        said.append(str(caught.value))
        update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        return said


@pytest.mark.parametrize("layout", [FSDP2, TrainLayout(dp=2)], ids=str)
def test_rows_that_one_rank_cannot_use_are_refused_on_all(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    first, second = rank_pool.run(refuse, 2, replace(job, layout=layout))
    assert "give it the rows of the plan" in second[0]
    assert first[0] == f"rank 1 cannot use its rows: {second[0]}"
    assert "prompt_lengths of row" in second[1]
    assert first[1] == f"rank 1 cannot use its rows: {second[1]}"


def break_off(at: RankContext, job: Job) -> tuple[dict[str, float], dict[str, float]]:
    """Passes that every rank breaks off, before the first layer and in the middle; then a step."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        bare = job.batch.require(["tokens", "prompt_lengths", "loss_mask"])
        with pytest.raises(ColumnMissingError, match="'logprobs'"):
            trainer.forward_backward(bare, job.loss)

        def leave(_stage: str, _done: int, _rows: int) -> None:
            raise ConnectionError("the caller left")

        with pytest.raises(ConnectionError):
            trainer.forward_backward(job.batch, job.loss, leave)
        with pytest.raises(NoGradientError):
            trainer.optim_step()

        def fail(*_: object) -> None:
            raise OverflowError("no memory")

        # The backward pass gets through the last layer and stops within the first.
        hook = trainer.model.lm.model.layers[0].mlp.register_full_backward_hook(fail)
        with pytest.raises(OverflowError):
            trainer.forward_backward(job.batch, job.loss)
        hook.remove()
        after = update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        fresh = make_trainer(job, at, mesh)
        return after, update_whole(fresh, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)


@pytest.mark.parametrize("layout", [FSDP2, TrainLayout(dp=2), TrainLayout(tp=2)], ids=str)
def test_a_pass_that_was_broken_off_leaves_nothing_behind(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    for after, fresh in rank_pool.run(break_off, 2, replace(job, layout=layout)):
        assert after == fresh


def give_what_only_one_stage_sees(at: RankContext, job: Job) -> list[str]:
    """Batches that the first or the last stage alone would find wrong; then a step."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        tokens = job.batch["tokens"]
        values = tokens.values.clone()
        values[-1] = 10_000
        unknown = job.batch | Experience({"tokens": Column(tokens.kind, values, tokens.offsets)})
        by_row = torch.zeros(job.batch.num_rows)
        wrong_kind = job.batch | Experience({"advantages": Column(ColumnKind.ROW, by_row)})
        said = []
        for refused in (unknown, wrong_kind):
            with pytest.raises(ValueError, match="column") as caught:
                update_whole(trainer, refused, job.loss, epochs=1, mini_batch_rows=8, seed=1)
            said.append(str(caught.value))
        with pytest.raises(ValueError, match="token 10000") as caught:
            trainer.compute_logprobs(unknown, temperature=1.0)
        with pytest.raises(ValueError, match="temperature"):
            trainer.compute_logprobs(job.batch, temperature=0.0)
        said.append(str(caught.value))
        update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        return said


@pytest.mark.parametrize("layout", [TrainLayout(), TrainLayout(pp=2), TrainLayout(tp=2)], ids=str)
def test_what_one_stage_would_find_wrong_is_refused_on_all_before_the_pass(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    for said in rank_pool.run(
        give_what_only_one_stage_sees, layout.world_size, replace(job, layout=layout)
    ):
        assert "token 10000" in said[0]
        assert "'advantages' is a row column" in said[1]
        assert "token 10000" in said[2]


def break_off_scoring(at: RankContext, job: Job) -> tuple[dict[str, float], dict[str, float]]:
    """Steps with a broken-off scoring between gradient and step, and without."""
    with at.connect(HybridLayout(job.layout)) as mesh:

        def leave(_stage: str, _done: int, _rows: int) -> None:
            raise ConnectionError("the caller left")

        broken, calm = (make_trainer(job, at, mesh) for _ in range(2))
        for trainer in (broken, calm):
            trainer.forward_backward(job.batch, job.loss)
        with pytest.raises(ConnectionError):
            broken.compute_logprobs(job.batch, temperature=1.0, progress=leave)
        return broken.optim_step(), calm.optim_step()


def test_scoring_that_was_broken_off_takes_no_gradient_along(rank_pool: RankPool, job: Job) -> None:
    for broken, calm in rank_pool.run(break_off_scoring, 2, replace(job, layout=FSDP2)):
        assert broken == calm
        assert broken["grad_norm"] > 0


def use_broken_stages(at: RankContext, job: Job) -> str:
    """Breaks a pass off on every stage, then makes another."""
    with at.connect(HybridLayout(job.layout), timeout_s=BROKEN_TIMEOUT_S) as mesh:
        trainer = make_trainer(job, at, mesh)

        def leave(_stage: str, _done: int, _rows: int) -> None:
            raise ConnectionError("the caller left")

        with pytest.raises((ConnectionError, RuntimeError)):
            trainer.forward_backward(job.batch, job.loss, leave)
        with pytest.raises(RuntimeError) as caught:
            trainer.compute_logprobs(job.batch, temperature=1.0)
        return str(caught.value)


def test_stages_refuse_to_go_on_after_a_pass_was_broken_off(rank_pool: RankPool, job: Job) -> None:
    # Messages of the old pass would be taken for those of the new one.
    for said in rank_pool.run(use_broken_stages, 2, replace(job, layout=TrainLayout(pp=2))):
        assert "broken off" in said
