"""The transformers sampler on the trainer's ranks: no weight is held twice, and none goes stale.

Every figure is of storages, counted once each however many tensors view them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.parallel_training import near_policy
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import make_requests
from support.slow_cases import mostly_slow
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward, update_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutTrajectory
from rolemesh.engine.specs import (
    ComputeDtype,
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.resharding import Resharder
from rolemesh.engine.weights.reuse import LentWeights

WHOLE = GenerateLayout(tp=1, pp=1)
LAYOUTS = {
    "1-2-1": HybridLayout(TrainLayout(tp=2), WHOLE),
    "2-1-1": HybridLayout(TrainLayout(pp=2), WHOLE),
    "1-2-2": HybridLayout(TrainLayout(tp=2, dp=2, fsdp=1), WHOLE),
}
CUT = HybridLayout(TrainLayout(dp=2, fsdp=2), WHOLE)
"""FSDP: parameters are DTensors, which cannot be parts of another tensor."""
REPLICAS = HybridLayout(TrainLayout(tp=2, dp=2, fsdp=1), WHOLE)
SAMPLING = SamplingSpec(max_new_tokens=12)
LOSS = PpoPolicyLossSpec()


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("sharing") / "model", tied=True)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def all_tensors() -> list[torch.Tensor]:
    """Those that this process has, save the ones that were there when gc was frozen."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]


def make_policy(folder: Path, mesh: RankMesh | None = None) -> tuple[Trainer, CausalLm]:
    torch.manual_seed(0)
    spec = ModelSpec(path=folder, compute_dtype="float32", micro_batch_tokens=24)
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3), mesh=mesh)
    assert isinstance(trainer.model, CausalLm)
    return trainer, trainer.model


def make_sampler(folder: Path, mesh: RankMesh, dtype: ComputeDtype = "float32") -> HfBackend:
    return HfBackend(HfSpec(max_model_len=48, dtype=dtype), folder, mesh)


def bring(resharder: Resharder, trainer: Trainer, backend: HfBackend) -> None:
    """What the actor does."""
    version = trainer.policy_version
    shards = resharder.run(dict(trainer.named_weights()), policy_version=version)
    backend.update_shard(shards, version)


def sampled(backend: HfBackend) -> list[RolloutTrajectory]:
    return sorted(backend.generate(make_requests(6), SAMPLING), key=lambda each: each.row)


def ppo_batch() -> Experience:
    batch = token_batch()
    zeros = batch["advantages"].values * 0 - 6.0
    return near_policy(
        batch,
        type(batch["advantages"])(batch["advantages"].kind, zeros, batch["advantages"].offsets),
    )


def step(trainer: Trainer) -> None:
    update_whole(trainer, ppo_batch(), LOSS, epochs=1, mini_batch_rows=4, seed=5)


@dataclass
class Shared:
    """What a rank saw of a transition, a pass, and a further transition."""

    received_bytes: int
    extra_bytes: int
    """Of all storages of the process, by which the transition made it grow."""
    parameters_extra_bytes: int
    """The same, of the storages of trainer and sampler alone."""
    after_pass_bytes: int
    """As parameters_extra_bytes, after the next pass."""
    whole_bytes: int
    shard_bytes: int
    refusal: str
    trajectories: list[list[RolloutTrajectory]] = field(default_factory=list)
    """Before the steps, and after."""
    are_weights_those_of_no_sampler: bool = False


def share(at: RankContext, folder: Path, layout: HybridLayout) -> Shared:
    with at.connect(layout) as mesh:
        alone, _ = make_policy(folder, mesh)
        step(alone)
        expected = {name: weight.clone() for name, weight in alone.named_weights()}
        del alone
        trainer, model = make_policy(folder, mesh)
        backend = make_sampler(folder, mesh)
        with Resharder(model, "float32", keeper=backend) as resharder:
            assert resharder.shares
            gc.collect()
            # What is alive now is looked at no more, but for the parameters.
            own = [*trainer.model.parameters(), *backend._model.parameters()]
            shard = storage_bytes(own)
            gc.freeze()
            try:
                before = storage_bytes([*all_tensors(), *own])
                bring(resharder, trainer, backend)
                extra = storage_bytes([*all_tensors(), *own]) - before
                result = Shared(
                    received_bytes=resharder.received_bytes,
                    extra_bytes=extra,
                    parameters_extra_bytes=storage_bytes(own) - shard,
                    after_pass_bytes=0,
                    whole_bytes=storage_bytes(backend._model.parameters()),
                    shard_bytes=shard,
                    refusal="",
                )
                assert resharder.received_bytes == planned_received(resharder.plan, at.rank)
                result.trajectories.append(sampled(backend))
                trainer.compute_logprobs(token_batch(), temperature=1.0)
                result.after_pass_bytes = storage_bytes(own) - shard
            finally:
                gc.unfreeze()
            assert all(parameter.is_contiguous() for parameter in trainer.model.parameters())
            with pytest.raises(WeightsStaleError) as refused:
                backend.generate(make_requests(1), SAMPLING)
            result.refusal = str(refused.value)
            # From shared weights straight into a step: the optimizer must find them compact.
            bring(resharder, trainer, backend)
            step(trainer)
            result.are_weights_those_of_no_sampler = all(
                torch.equal(weight, expected[name]) for name, weight in trainer.named_weights()
            )
            bring(resharder, trainer, backend)
            result.trajectories.append(sampled(backend))
        return result


def sample_alone(at: RankContext, folder: Path, export: Path | None) -> list[RolloutTrajectory]:
    """One rank, whose sampler copies."""
    trainer, _ = make_policy(export or folder)
    trainer.policy_version = 2 if export else 0
    backend = make_sampler(folder, RankMesh.single())
    backend.update_weights(trainer.named_weights(), trainer.policy_version)
    return sampled(backend)


@pytest.mark.parametrize(
    ("name", "tied"),
    mostly_slow(
        # Stages of a tied model, and replicas of slices of one that is not.
        (0, 5),
        [(name, tied) for tied in (True, False) for name in ("2-1-1", "1-2-1", "1-2-2")],
    ),
)
def test_the_transition_takes_the_received_bytes_and_a_pass_gives_them_back(
    name: str, tied: bool, tmp_path: Path, rank_pool: RankPool
) -> None:
    layout, folder = LAYOUTS[name], write_tiny_llama(tmp_path / "model", tied=tied)
    ranks = rank_pool.run(share, layout.world_size, folder, layout)
    for rank in ranks:
        assert rank.extra_bytes == rank.received_bytes > 0
        assert rank.parameters_extra_bytes == rank.received_bytes
        assert rank.whole_bytes == rank.shard_bytes + rank.received_bytes
        assert rank.after_pass_bytes == 0
        assert "the trainer went on to compute" in rank.refusal
        assert rank.are_weights_those_of_no_sampler
        # Each rank samples every request, and with the same weights.
        assert rank.trajectories == ranks[0].trajectories
    (alone,) = rank_pool.run(sample_alone, 1, folder, None)
    assert ranks[0].trajectories[0] == alone
    assert ranks[0].trajectories[1] != alone


# --- where type or place do not allow it --------------------------------------------------


@dataclass
class Apart:
    """What a rank saw of a delivery beside the training shard."""

    shares: bool
    extra_bytes: int
    """Of the sampler's storages."""
    checksums: dict[str, str]
    trajectories: list[RolloutTrajectory]
    is_kept: bool
    """Whether a pass left the sampler's weights alone."""


def deliver(
    at: RankContext, folder: Path, layout: HybridLayout, dtype: ComputeDtype, pending: bool
) -> Apart:
    with at.connect(layout) as mesh:
        trainer, model = make_policy(folder, mesh)
        backend = make_sampler(folder, mesh, dtype)
        with Resharder(model, dtype, keeper=backend) as resharder:
            if pending:
                forward_backward(trainer, ppo_batch(), LOSS)
            parts = [weight for _, weight in trainer.named_weights()]
            before = storage_bytes(parts)
            bring(resharder, trainer, backend)
            own = [*(weight for _, weight in trainer.named_weights()), *backend._model.parameters()]
            extra = storage_bytes(own) - before
            trajectories = sampled(backend)
            if pending:
                trainer.optim_step()
            else:
                trainer.compute_logprobs(token_batch(), temperature=1.0)
            return Apart(
                resharder.shares,
                extra,
                dict(backend.weight_checksums()),
                trajectories,
                sampled(backend) == trajectories,
            )


def copy_alone(at: RankContext, folder: Path, dtype: ComputeDtype) -> Apart:
    trainer, _ = make_policy(folder)
    backend = make_sampler(folder, RankMesh.single(), dtype)
    backend.update_weights(trainer.named_weights(), 0)
    extra = storage_bytes(backend._model.parameters())
    return Apart(False, extra, dict(backend.weight_checksums()), sampled(backend), True)


@pytest.mark.parametrize(
    ("layout", "dtype", "pending"),
    [
        (LAYOUTS["1-2-1"], "bfloat16", False),
        (CUT, "float32", False),
        (LAYOUTS["1-2-1"], "float32", True),
    ],
    ids=["bfloat16", "fsdp", "a gradient waits"],
)
def test_elsewhere_weights_lie_beside_the_shard_and_are_the_same(
    layout: HybridLayout,
    dtype: ComputeDtype,
    pending: bool,
    tied_folder: Path,
    rank_pool: RankPool,
) -> None:
    ranks = rank_pool.run(deliver, 2, tied_folder, layout, dtype, pending)
    (alone,) = rank_pool.run(copy_alone, 1, tied_folder, dtype)
    for rank in ranks:
        # A waiting gradient is a matter of the moment, not of type or place.
        assert rank.shares == pending
        # The whole model in the sampler's type, and not once more for a copy of its own.
        assert rank.extra_bytes == alone.extra_bytes
        assert rank.checksums == alone.checksums
        assert rank.trajectories == alone.trajectories
        assert rank.is_kept


# --- what else may happen in between ------------------------------------------------------


def score_one_row(at: RankContext, folder: Path) -> int:
    """Version that this rank's sampler holds after a score of one row."""
    with at.connect(REPLICAS) as mesh:
        trainer, model = make_policy(folder, mesh)
        backend = make_sampler(folder, mesh)
        with Resharder(model, "float32", keeper=backend) as resharder:
            bring(resharder, trainer, backend)
            rows = token_batch().select(torch.tensor([0] if mesh.dp.is_first else []).long())
            trainer.compute_logprobs(rows, temperature=1.0)
            version = backend.policy_version
            bring(resharder, trainer, backend)
            assert len(sampled(backend)) == 6
        return version


def test_a_replica_without_rows_gives_its_weights_back_with_the_others(
    tied_folder: Path, rank_pool: RankPool
) -> None:
    # Or some ranks would bring weights before the next generation, and wait for the rest.
    assert rank_pool.run(score_one_row, 4, tied_folder) == [-1] * 4


def load_while_shared(at: RankContext, folder: Path, checkpoint: Path) -> list[bool]:
    with at.connect(LAYOUTS["1-2-1"]) as mesh:
        trainer, model = make_policy(folder, mesh)
        backend = make_sampler(folder, mesh)
        with Resharder(model, "float32", keeper=backend) as resharder:
            bring(resharder, trainer, backend)
            saved = {name: weight.clone() for name, weight in trainer.named_weights()}
            first = sampled(backend)
            trainer.save(checkpoint)
            step(trainer)
            bring(resharder, trainer, backend)
            changed = sampled(backend)
            trainer.load(checkpoint)
            same = all(torch.equal(weight, saved[name]) for name, weight in trainer.named_weights())
            bring(resharder, trainer, backend)
            return [same, sampled(backend) == first, changed != first]


def test_a_checkpoint_is_written_and_read_while_weights_are_shared(
    tied_folder: Path, tmp_path: Path, rank_pool: RankPool
) -> None:
    seen = rank_pool.run(load_while_shared, 2, tied_folder, tmp_path / "checkpoint")
    assert seen == [[True, True, True]] * 2


# --- a rank that is alone -----------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_that_is_alone_lends_all_and_takes_it_back_to_train(
    tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path / "model", tied=tied)
    trainer, model = make_policy(folder)
    backend = make_sampler(folder, RankMesh.single())
    lent = LentWeights(model, backend)
    own = [*trainer.model.parameters(), *backend._model.parameters()]
    before = storage_bytes(own)
    lent.lend(dict(trainer.named_weights()), policy_version=0)
    assert storage_bytes(own) == before == storage_bytes(backend._model.parameters())
    first = sampled(backend)
    trainer.compute_logprobs(token_batch(), temperature=1.0)
    assert sampled(backend) == first
    forward_backward(trainer, ppo_batch(), LOSS)
    with pytest.raises(WeightsStaleError, match="the trainer went on to train"):
        sampled(backend)
    # Copies: the step that is to come would change lent ones without a pass.
    lent.lend(dict(trainer.named_weights()), policy_version=0)
    assert storage_bytes(own) == 2 * before
    trainer.optim_step()
    assert sampled(backend) == first
    lent.lend(dict(trainer.named_weights()), policy_version=1)
    assert storage_bytes(own) == before
    assert sampled(backend) != first
    lent.close()


def test_kept_tensors_are_not_written_to_by_a_later_copy(tied_folder: Path) -> None:
    trainer, _ = make_policy(tied_folder)
    backend = make_sampler(tied_folder, RankMesh.single())
    weights = dict(trainer.named_weights())
    backend.update_shard(weights.items(), 0)
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    kept = {name: weight.clone() for name, weight in weights.items()}
    backend.update_weights(zeros.items(), 1)
    assert all(torch.equal(weights[name], kept[name]) for name in weights)
    with pytest.raises(WeightsStaleError, match=r"lacks .* \(1 of"):
        backend.update_shard(list(weights.items())[1:], 2)
    assert storage_bytes(backend._model.parameters()) == 0
    with pytest.raises(WeightsStaleError, match="update to policy_version 2 failed"):
        backend.weight_checksums()
