"""The policy as its own teacher: the moving average of its weights, and passes made with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import ALPHA, RANK
from support.cut_ranks import (
    raw,
    refused_restore,
    restore_and_go_on,
    save_and_go_on,
    write_beside_training,
)
from support.parallel_training import (
    STEP_TOLERANCE,
    Job,
    Tensors,
    Trained,
    joined,
    make_trainer,
    part_of,
    policy_job,
)
from support.rank_processes import RankContext, RankPool
from support.sharded_checkpoints import load, refused_load, save
from support.updates import update_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.optimizers import average
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints.checkpoint import open_checkpoint

DECAY = 0.7
ADAPTER = {"adapter": {"rank": RANK, "alpha": ALPHA}}
TP2, PP2, FSDP2 = TrainLayout(tp=2), TrainLayout(pp=2), TrainLayout(dp=2, fsdp=2)
WHOLE_OR_ADAPTED = pytest.mark.parametrize("model", [{}, ADAPTER], ids=["whole", "adapted"])
LOGPROB_TOLERANCE = 1e-4
"""Nats: weights after three steps differ by STEP_TOLERANCE, and sums by their order."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = policy_job(tmp_path_factory.mktemp("llama"), PpoPolicyLossSpec())
    return replace(made, average=DECAY)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder in shared memory, as that of services, but of this test alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cuts-") as folder:
        yield Path(folder)


def _spec(job: Job, **model: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {"path": job.folder, "compute_dtype": "float32", "micro_batch_tokens": 24, **model}
    )


def _trainer(job: Job, average: float | None = DECAY, **model: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer.policy(_spec(job, **model), OptimizerSpec(learning_rate=1e-3), average=average)


def _train(trainer: Trainer, job: Job) -> None:
    """Three optimizer steps."""
    update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=3, seed=5)


def _bits(tensors: Any) -> dict[str, bytes]:
    return {name: raw(one) for name, one in tensors}


@pytest.mark.parametrize(("model", "decay"), [({}, 0.99), (ADAPTER, 0.3)], ids=["whole", "adapted"])
def test_the_average_is_that_of_a_loop_in_float64(
    job: Job, model: dict[str, Any], decay: float
) -> None:
    trainer = _trainer(job, decay, **model)
    expected = {name: one.double() for name, one in trainer.named_weights()}
    step = trainer.optim_step

    def stepping(learning_rate: float | None = None) -> dict[str, float]:
        metrics = step(learning_rate)
        for name, weight in trainer.named_weights():
            expected[name] = decay * expected[name] + (1 - decay) * weight.double()
        return metrics

    trainer.optim_step = stepping  # type: ignore[method-assign]
    before = _bits(trainer.averaged_weights().items())
    _train(trainer, job)
    found = trainer.averaged_weights()
    assert found.keys() == expected.keys()
    assert all(".lora_" in name for name in found) == bool(model)
    assert _bits(found.items()) != before
    for name, one in found.items():
        # Three roundings of float32.
        torch.testing.assert_close(one.double(), expected[name], rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "compute_dtype"), [({}, "bfloat16"), (ADAPTER, "float32")], ids=["whole", "adapted"]
)
def test_it_scores_as_a_model_that_has_the_averaged_weights(
    job: Job, model: dict[str, Any], compute_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few rows of a matrix, and a part of a vector.
    monkeypatch.setattr(average, "SWAP_BYTES", 100)
    model = {**model, "compute_dtype": compute_dtype}
    trainer = _trainer(job, **model)
    _train(trainer, job)
    bits = _bits(trainer.named_weights()), _bits(trainer.averaged_weights().items())
    own = trainer.compute_logprobs(job.batch, temperature=1.0)["logprobs"].values
    with trainer.averaged():
        found = compute_logprobs(trainer.rank_model, job.batch, temperature=0.8, top_k=3)

    other = CausalLm(_spec(job, **model))
    with torch.no_grad():
        for name, weight in other.trained_weights():
            weight.copy_(trainer.averaged_weights()[name])
    expected = compute_logprobs(RankModel(other), job.batch, temperature=0.8, top_k=3)
    for name in ("logprobs", "top_ids", "top"):
        assert torch.equal(found[name].values, expected[name].values), name
    assert not torch.equal(found["logprobs"].values, own)

    def broken(stage: str, done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), trainer.averaged():
        trainer.compute_logprobs(job.batch, temperature=1.0, progress=broken)
    assert (_bits(trainer.named_weights()), _bits(trainer.averaged_weights().items())) == bits
    again = trainer.compute_logprobs(job.batch, temperature=1.0)["logprobs"].values
    assert torch.equal(again, own)


def test_training_has_the_same_bits_beside_an_average_and_without(job: Job) -> None:
    kept, plain = _trainer(job), _trainer(job, None)
    _train(kept, job)
    with kept.averaged():
        kept.compute_logprobs(job.batch, temperature=1.0)
    _train(kept, job)
    for _ in range(2):
        _train(plain, job)
    assert _bits(kept.named_weights()) == _bits(plain.named_weights())
    assert plain.averaged_weights() == {}
    with pytest.raises(ValueError, match=r"no average .* give the actor teacher\.average"):
        plain.averaged().__enter__()


def test_the_copies_of_a_cut_have_the_weights_and_not_the_average(job: Job) -> None:
    """On a GPU they go on behind the call that began them; see `ModelInTraining.save_cut`."""
    trainer = _trainer(job)
    _train(trainer, job)
    weights = _bits(trainer.named_weights())
    copied = []

    class Copying:
        def settle(self) -> None:
            copied.append(_bits(trainer.named_weights()))

    trainer._cut_slots = Copying()  # type: ignore[assignment]
    with trainer.averaged():
        assert _bits(trainer.named_weights()) != weights
    assert copied == [weights]


# --- ranks --------------------------------------------------------------------------------


def _teach(at: RankContext, job: Job) -> tuple[Trained, Tensors, bool]:
    """Trains, and scores by the average; whether weights were left as they were."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        metrics = update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=3, seed=5)
        part = part_of(trainer, metrics, [])
        with trainer.averaged():
            scored = compute_logprobs(trainer.rank_model, job.batch, temperature=1.0, top_k=3)
        after = part_of(trainer, metrics, [])
        is_same = all(
            torch.equal(one, getattr(part, held)[name])
            for held in ("weights", "average")
            for name, one in getattr(after, held).items()
        )
        return part, {name: one.values for name, one in scored.columns.items()}, is_same


@pytest.mark.parametrize(
    ("layout", "model"),
    # FSDP of adapted models: the test of layouts below.
    [(TP2, ADAPTER), (PP2, {}), (FSDP2, {})],
    ids=["tp2, adapted", "pp2", "fsdp2"],
)
def test_many_ranks_keep_the_average_of_one(
    rank_pool: RankPool, job: Job, layout: TrainLayout, model: dict[str, Any]
) -> None:
    job = replace(job, model=model)
    ((part, expected, _),) = rank_pool.run(_teach, 1, job)
    alone = joined([part], TrainLayout())
    found = rank_pool.run(_teach, 2, replace(job, layout=layout))
    assert all(is_same for _, _, is_same in found)
    spread = joined([part for part, _, _ in found], layout)
    assert spread.average.keys() == alone.average.keys() == alone.weights.keys()
    for name, one in alone.average.items():
        torch.testing.assert_close(spread.average[name], one, rtol=0, atol=STEP_TOLERANCE)
    # The last stage has them.
    _, scores, _ = found[-1]
    for name in ("logprobs", "top"):
        torch.testing.assert_close(scores[name], expected[name], rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("layout", [TrainLayout(), FSDP2], ids=["one", "fsdp2"])
def test_a_cut_brings_the_average_back(
    rank_pool: RankPool, job: Job, directory: Path, layout: TrainLayout
) -> None:
    job = replace(job, layout=layout)
    saved = rank_pool.run(save_and_go_on, layout.world_size, job, directory)
    restored = rank_pool.run(restore_and_go_on, layout.world_size, job, directory)
    for (then, after), (now, later) in zip(saved, restored, strict=True):
        assert now.average == then.average != now.weights
        assert later.average == after.average != now.average
        assert later.weights == after.weights
    without = replace(job, average=None)
    for kind, text, is_same in rank_pool.run(
        refused_restore, layout.world_size, without, directory
    ):
        assert (kind, is_same) == ("CutMismatchError", True)
        assert "has an average of the weights, and this service keeps none" in text


@WHOLE_OR_ADAPTED
def test_any_layout_loads_the_average_that_any_other_saved(
    rank_pool: RankPool, job: Job, tmp_path: Path, model: dict[str, Any]
) -> None:
    folder = tmp_path / "checkpoint"
    job = replace(job, layout=FSDP2, model=model)
    saved = joined([one.part for one in rank_pool.run(save, 2, job, folder)], FSDP2)
    for layout in (TP2, TrainLayout()):
        moved = replace(job, layout=layout)
        loaded = rank_pool.run(load, layout.world_size, moved, folder)
        found = joined([one.part for one in loaded], layout)
        assert found.average.keys() == saved.average.keys() == saved.weights.keys()
        for name, one in saved.average.items():
            assert torch.equal(found.average[name], one), name
            assert not torch.equal(one, saved.weights[name]) or not one.numel()
    # Not needed, not read; and needed, but not there.
    rank_pool.run(load, 1, replace(job, layout=TrainLayout(), average=None), folder)
    plain = replace(job, layout=TrainLayout(), average=None)
    rank_pool.run(save, 1, plain, tmp_path / "plain")
    (((kind, text, is_same),),) = rank_pool.run(
        refused_load, 1, replace(plain, average=DECAY), tmp_path / "plain"
    )
    assert (kind, is_same) == ("CheckpointMismatchError", True)
    assert "has no average of the weights, which teacher.average asks for" in text


def test_a_checkpoint_that_is_written_from_a_cut_has_the_average(
    rank_pool: RankPool, job: Job, directory: Path, tmp_path: Path
) -> None:
    rank_pool.run(write_beside_training, 2, replace(job, layout=FSDP2), directory, tmp_path)
    live, cut = (open_checkpoint(tmp_path / name) for name in ("live", "cut"))
    names = list(live.parameters("average"))
    assert names == list(live.parameters("weights"))
    pairs = zip(live.whole("average", names), cut.whole("average", names), strict=True)
    assert all(torch.equal(here, there) for (_, here), (_, there) in pairs)


def test_rows_may_be_scored_behind_other_prompts(job: Job) -> None:
    """The completions stay, with their places; rows of a replica are prepared with all others."""
    model = RankModel(CausalLm(_spec(job)))
    told = job.batch.select(torch.arange(job.batch.num_rows))

    def retold(batch: Experience) -> Experience:
        rows = [torch.cat([torch.tensor([7, 8, 9]), row]) for row in batch["tokens"].rows()]
        return Experience(
            {
                "tokens": type(batch["tokens"]).ragged(batch["tokens"].kind, rows, torch.int64),
                "prompt_lengths": type(batch["tokens"])(
                    batch["prompt_lengths"].kind, batch["prompt_lengths"].values + 3
                ),
            }
        )

    found = compute_logprobs(model, told, temperature=1.0, top_k=2, retold=retold)
    expected = compute_logprobs(model, retold(told), temperature=1.0, top_k=2)
    plain = compute_logprobs(model, told, temperature=1.0, top_k=2)
    for name in ("logprobs", "top"):
        assert torch.equal(found[name].values, expected[name].values)
        offsets = found[name].offsets, plain[name].offsets
        assert offsets[0] is not None
        assert offsets[1] is not None
        assert torch.equal(*offsets)
        assert not torch.equal(found[name].values, plain[name].values)
