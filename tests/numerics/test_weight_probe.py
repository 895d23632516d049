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
from rolemesh.engine.rollout.agreement.probe import (
    ProbeScores,
    SamplerCheck,
    SamplerStaleError,
    WeightsNotFiniteError,
    check_sampler,
)
from rolemesh.engine.rollout.agreement.trainer_probe import TrainerProbe
from rolemesh.engine.rollout.hf.sampler import HfBackend
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


def test_weights_that_are_not_finite_are_told_and_no_sampler_is_blamed() -> None:
    scores = ProbeScores(TOKENS, (-1.0, float("nan"), -2.0, -3.0, -4.0))
    with pytest.raises(WeightsNotFiniteError, match="take a smaller learning rate"):
        SamplerCheck().compare(scores, scores.logprobs, rounds_to="float32")


def test_a_sampler_with_the_weights_passes_and_any_other_is_refused(
    pair: tuple[Trainer, HfBackend],
) -> None:
    trainer, sampler = pair
    probe, check = TrainerProbe(TOKENS), SamplerCheck()
    versions = [_weights(trainer)]
    for version in range(3):
        scores = probe.scores(trainer.rank_model, version=version)
        sampler.update_weights(versions[-1], version)
        check_sampler(sampler, check, scores, ALONE, CPU)
        found = sampler.score(scores.tokens)
        torch.testing.assert_close(found, list(scores.logprobs), rtol=0, atol=1e-5)
        _train(trainer)
        versions.append(_weights(trainer))
    scores = probe.scores(trainer.rank_model, version=3)
    # Those of the update before: the sampler stands still.
    with pytest.raises(SamplerStaleError, match=r"have moved by .* did not take"):
        check_sampler(sampler, check, scores, ALONE, CPU)
    # Of a first check nothing is known but that both round alike.
    with pytest.raises(SamplerStaleError, match=r"where at most 0\.001 is rounding"):
        check_sampler(sampler, SamplerCheck(), scores, ALONE, CPU)
    # And those that it began with, which of an adapter are the base's.
    sampler.update_weights(versions[0], 3)
    with pytest.raises(SamplerStaleError):
        check_sampler(sampler, check, scores, ALONE, CPU)
    sampler.update_weights(versions[3], 3)
    check_sampler(sampler, check, scores, ALONE, CPU)


def test_a_sampler_that_rounds_in_its_own_way_is_never_refused() -> None:
    """Policies that go far, step by step, beside samplers with an offset of their own.

    A rule that asked whether the sampler is nearer to earlier weights refused one in 17 of these:
    where few tokens make up the distance, a policy that moves against the offset passes by it.
    """
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(15, generator=generator)

    for _ in range(300):
        # Few tokens count, as in text: most are certain.
        scale = torch.rand(15, generator=generator) ** 6
        offset, drift = 0.05 * noise() * scale, 0.004 * noise() * scale
        check, now = SamplerCheck(), -5 * scale
        for _ in range(100):
            scores = ProbeScores(tuple(range(16)), tuple(now.tolist()))
            check.compare(scores, (now + offset + 0.002 * noise() * scale).tolist(), rounds_to="")
            now = now + drift + 0.004 * noise() * scale


@pytest.mark.parametrize("rounding", [1e-6, 0.03])
def test_a_sampler_that_stands_still_is_refused_once_the_policy_has_moved(rounding: float) -> None:
    generator = torch.Generator().manual_seed(1)
    now = -3 + torch.randn(15, generator=generator)
    found = (now + rounding * torch.randn(15, generator=generator)).tolist()
    check = SamplerCheck()
    for step in range(20):
        scores = ProbeScores(tuple(range(16)), tuple(now.tolist()))
        if step == 0:
            check.compare(scores, found, rounds_to="")
        else:
            with pytest.raises(SamplerStaleError, match="did not take"):
                check.compare(scores, found, rounds_to="")
        now = now + 1e-3 * torch.randn(15, generator=generator)
    near = [one + 0.6 for one in scores.logprobs]
    for nonsense in ([0.0] * 15, [float("nan")] * 15, near):
        with pytest.raises(SamplerStaleError, match=r"where at most 0\.5 is rounding"):
            SamplerCheck().compare(scores, nonsense, rounds_to="")


def test_scores_are_made_once_a_version_and_forgotten_with_a_lineage(folder: Path) -> None:
    spec = ModelSpec(path=folder, compute_dtype="float32")
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-2))
    probe = TrainerProbe(TOKENS * 20)
    first = probe.scores(trainer.rank_model, version=0)
    assert first.tokens == (TOKENS * 20)[:64]
    _train(trainer)
    assert probe.scores(trainer.rank_model, version=0) is first
    later = probe.scores(trainer.rank_model, version=1)
    assert later.tokens == first.tokens[:16]
    assert later.logprobs != first.logprobs[:15]
    lengths = [
        len(probe.scores(trainer.rank_model, version=version).tokens) for version in range(2, 22)
    ]
    assert lengths == 2 * [*([16] * 8), 64, 16]
    _train(trainer)
    probe.start_over()
    assert probe.scores(trainer.rank_model, version=1).logprobs != later.logprobs


def test_weights_that_differ_are_named_and_those_that_are_equal_counted(
    pair: tuple[Trainer, HfBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sampler = pair
    # A row that is longer than what the sampler takes, which has its beginning to compare.
    probe = TrainerProbe(TOKENS * 20)
    scores = probe.scores(trainer.rank_model, version=0)
    monkeypatch.setattr(sampler, "_spec", HfSpec(max_model_len=33))

    def check() -> None:
        check_sampler(
            sampler, SamplerCheck(), scores, ALONE, CPU, weights=lambda: iter(_weights(trainer))
        )

    sampler.update_weights(_weights(trainer), 0)
    assert sampler.differing_weights(_weights(trainer)) == ([], len(_weights(trainer)))
    check()
    # Of an adapter the factor B: what A is multiplied with is 0.
    name = [name for name in sampler._parameters if "mlp.down_proj" in name][-1]
    sampler._parameters[name].data += 0.3
    with pytest.raises(SamplerStaleError, match=rf"of 32 tokens .* 1 of \d+ weights .*: '{name}'$"):
        check()
    sampler.update_weights(_weights(trainer), 0)
    monkeypatch.setattr(sampler, "score", lambda tokens: [-9.0] * (len(tokens) - 1))
    with pytest.raises(SamplerStaleError, match=r"; all \d+ weights that can be compared are as"):
        check()


def test_rounded_weights_are_compared_with_rounded_ones(folder: Path) -> None:
    trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec(learning_rate=1e-2))
    sampler = HfBackend(HfSpec(max_model_len=64, dtype="bfloat16"), folder)
    sampler.update_weights(_weights(trainer), 0)
    assert sampler.differing_weights(_weights(trainer))[0] == []
    sampler.close()


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
        with pytest.raises(SamplerStaleError, match="did not take"):
            deliveries.check()
    deliver(1, _weights(trainer))
    deliveries.check()
    # Checked once a version: later generations do not pay for it.
    sampler.score = None  # type: ignore[method-assign, assignment]
    deliveries.check()
