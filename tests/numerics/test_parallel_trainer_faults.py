"""A trainer's calls that fail: all ranks raise alike, no weight moves, and the next call works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.parallel_training import Job, make_trainer, policy_job
from support.rank_processes import RankContext, RankPool
from support.updates import forward_backward, update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import PpoPolicyLossSpec
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import LossNotFiniteError, NoGradientError

BROKEN_TIMEOUT_S = 5.0
"""A stage waits this long for the one that left its pass."""

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01)
FSDP2 = TrainLayout(dp=2, fsdp=2)
ALL_AXES = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return policy_job(tmp_path_factory.mktemp("llama"), POLICY_LOSS)


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
    [
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (FSDP2, TrainLayout(dp=2), TrainLayout(pp=2), TrainLayout(tp=2))
        ),
        ALL_AXES,
    ],
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
        forward_backward(trainer, job.batch, job.loss)
        if mesh.world.is_last:
            *_, (_, parameter) = trainer.model.named_weights()
            gradient = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = torch.inf
        with pytest.raises(LossNotFiniteError) as caught:
            trainer.optim_step()
        assert trainer.policy_version == 0
        return str(caught.value)


def test_an_infinite_gradient_on_one_rank_raises_on_all(rank_pool: RankPool, job: Job) -> None:
    messages = rank_pool.run(poison_gradient, 8, replace(job, layout=ALL_AXES))
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
            forward_backward(trainer, bare, job.loss)

        def leave(_stage: str, _done: int, _rows: int) -> None:
            raise ConnectionError("the caller left")

        with pytest.raises(ConnectionError):
            forward_backward(trainer, job.batch, job.loss, leave)
        with pytest.raises(NoGradientError):
            trainer.optim_step()

        def fail(*_: object) -> None:
            raise OverflowError("no memory")

        # The backward pass gets through the last layer and stops within the first.
        hook = trainer.model.lm.model.layers[0].mlp.register_full_backward_hook(fail)
        with pytest.raises(OverflowError):
            forward_backward(trainer, job.batch, job.loss)
        hook.remove()
        after = update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)
        fresh = make_trainer(job, at, mesh)
        return after, update_whole(fresh, job.batch, job.loss, epochs=1, mini_batch_rows=8, seed=1)


@pytest.mark.parametrize("layout", [FSDP2, TrainLayout(tp=2)], ids=str)
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
            forward_backward(trainer, job.batch, job.loss)
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
            forward_backward(trainer, job.batch, job.loss, leave)
        with pytest.raises(RuntimeError) as caught:
            trainer.compute_logprobs(job.batch, temperature=1.0)
        return str(caught.value)


def test_stages_refuse_to_go_on_after_a_pass_was_broken_off(rank_pool: RankPool, job: Job) -> None:
    # Messages of the old pass would be taken for those of the new one.
    for said in rank_pool.run(use_broken_stages, 2, replace(job, layout=TrainLayout(pp=2))):
        assert "broken off" in said
