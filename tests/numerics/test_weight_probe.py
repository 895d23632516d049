"""A sampler that does not compute with the weights that it was given is found out at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import ALPHA, RANK
from support.parallel_training import near_policy
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.hf import HfBackend
from rolemesh.engine.rollout.probe import (
    LEAST,
    ProbeScores,
    SamplerStaleError,
    check_sampler,
)
from rolemesh.engine.rollout.trainer_probe import TrainerProbe
from rolemesh.engine.specs import HfSpec, ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.services.rollout.deliveries import Deliveries, Delivery

ALONE = RankGroup((0,), 0, None)
CPU = torch.device("cpu")
TOKENS = (5, 9, 30, 7, 100, 41)
ADAPTER = {"rank": RANK, "alpha": ALPHA}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@pytest.fixture(params=[None, ADAPTER], ids=["whole", "adapter"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Trainer, HfBackend]]:
    """A trainer and its sampler."""
    spec = ModelSpec.model_validate(
        {"path": folder, "compute_dtype": "float32", "adapter": request.param}
    )
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-2))
    sampler = HfBackend(HfSpec(max_model_len=64), folder, adapter=spec.adapter)
    yield trainer, sampler
    sampler.close()


def _train(trainer: Trainer) -> None:
    batch = token_batch()
    scored = near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])
    update_whole(trainer, scored, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=3, seed=5)


def _weights(trainer: Trainer) -> list[Any]:
    return [(name, weight.clone()) for name, weight in trainer.named_weights()]


def test_a_sampler_with_the_weights_passes_and_any_other_is_refused(
    pair: tuple[Trainer, HfBackend],
) -> None:
    trainer, sampler = pair
    probe = TrainerProbe(TOKENS)
    versions = [_weights(trainer)]
    for version in range(3):
        scores = probe.scores(trainer.rank_model, version=version)
        sampler.update_weights(versions[-1], version)
        check_sampler(sampler, scores, ALONE, CPU)
        found = sampler.score(scores.tokens)
        torch.testing.assert_close(found, list(scores.logprobs), rtol=0, atol=LEAST / 10)
        _train(trainer)
        versions.append(_weights(trainer))
    scores = probe.scores(trainer.rank_model, version=3)
    # Of the update before, and of the first one: which a run with an adapter calls its base.
    with pytest.raises(SamplerStaleError, match="from those of the weights before, but"):
        check_sampler(sampler, scores, ALONE, CPU)
    sampler.update_weights(versions[0], 3)
    is_adapter = trainer.model.spec.adapter is not None
    first = "the base without its adapter" if is_adapter else "the weights at first"
    with pytest.raises(SamplerStaleError, match=f"from those of {first}, but"):
        check_sampler(sampler, scores, ALONE, CPU)
    sampler.update_weights(versions[3], 3)
    check_sampler(sampler, scores, ALONE, CPU)


def test_rounding_passes_and_nonsense_does_not() -> None:
    generator = torch.Generator().manual_seed(1)

    def moved(row: list[float], by: float) -> list[float]:
        noise = by * torch.randn(len(row), generator=generator)
        return [value + float(one) for value, one in zip(row, noise, strict=True)]

    before = [-3.0 + 0.1 * place for place in range(15)]
    for update in (1e-5, 1e-3, 0.02, 0.3):
        now = moved(before, update)
        scores = ProbeScores(tuple(range(16)), tuple(now), {"the weights before": tuple(before)})
        # Rounding of float32, and of bfloat16, which hides a small update from either side.
        for rounding in (1e-6, 0.03):
            for _ in range(20):
                scores.check(moved(now, rounding))
            if update > 4 * rounding and update > LEAST:
                with pytest.raises(SamplerStaleError, match="did not take them"):
                    scores.check(moved(before, rounding))
        with pytest.raises(SamplerStaleError, match="where at most 1 is rounding"):
            scores.check(moved(now, 3.0))
        with pytest.raises(SamplerStaleError):
            scores.check([float("nan")] * 15)


def test_scores_are_made_once_a_version_and_forgotten_with_a_lineage(folder: Path) -> None:
    spec = ModelSpec(path=folder, compute_dtype="float32")
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-2))
    probe = TrainerProbe(TOKENS * 5)
    first = probe.scores(trainer.rank_model, version=0)
    assert len(first.tokens) == 16
    assert first.earlier == {}
    _train(trainer)
    assert probe.scores(trainer.rank_model, version=0) == first
    later = probe.scores(trainer.rank_model, version=1)
    assert later.logprobs != first.logprobs
    assert set(later.earlier.values()) == {first.logprobs}
    probe.start_over()
    assert probe.scores(trainer.rank_model, version=1).earlier == {}


def test_a_rollout_service_samples_no_more_until_its_sampler_has_the_weights(
    pair: tuple[Trainer, HfBackend],
) -> None:
    """Weights may come in the middle of a generation; the next one looks whether they did."""
    trainer, sampler = pair
    probe = TrainerProbe(TOKENS)
    deliveries = Deliveries(sampler, RankMesh.single(), are_shards=False)

    def deliver(version: int, weights: list[Any]) -> None:
        scores = probe.scores(trainer.rank_model, version=version)
        deliveries.load(Delivery(version, received=list(weights), probe=scores))

    first = _weights(trainer)
    deliver(0, first)
    deliveries.check()
    _train(trainer)
    # What arrives is not what was published.
    deliver(1, first)
    for _ in range(2):
        with pytest.raises(SamplerStaleError, match="it did not take them"):
            deliveries.check()
    deliver(1, _weights(trainer))
    deliveries.check()
    # Checked once a version: later generations do not pay for it.
    sampler.score = None  # type: ignore[method-assign, assignment]
    deliveries.check()
