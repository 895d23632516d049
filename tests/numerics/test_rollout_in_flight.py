"""Weights that come in the middle of a generation: hf against full forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.in_flight_checks import at_steps
from support.rollout_checks import (
    load_trainer_model,
    make_requests,
    perturb,
    set_stop_tokens,
    versions_of,
)
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.rollout.distribution import sampling_logprobs
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs import HfSpec, SamplingSpec

FLOAT32_LOGPROB = 2e-5
"""Log-probs near -6 in float32, summed in another order over 2 layers: a few of its 5e-7 steps."""
SAMPLING = SamplingSpec(max_new_tokens=20, temperature=0.9)
SWITCHES = (6, 13)
"""Decoding steps before which versions 4 and 5 come."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PreTrainedModel]]:
    """A folder, and versions 3, 4, 5 of its weights."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("in-flight") / "model")
    set_stop_tokens(folder, range(300, 330))
    versions = [load_trainer_model(folder) for _ in range(3)]
    for seed, model in enumerate(versions[1:]):
        perturb(model, seed)
    return folder, versions


@pytest.fixture
def backend(models: tuple[Path, list[PreTrainedModel]]) -> Iterator[HfBackend]:
    folder, versions = models
    backend = HfBackend(HfSpec(max_model_len=48, max_num_seqs=16), folder)
    backend.update_weights(versions[0].named_parameters(), 3)
    yield backend
    backend.close()


@torch.no_grad()
def sampled_alone(
    versions: list[PreTrainedModel], request: RolloutRequest, stop_tokens: range
) -> tuple[list[int], list[float]]:
    """The oracle: one row, no cache, no padding, and at each token the version that is due."""
    generator = torch.Generator().manual_seed(request.seed)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < SAMPLING.max_new_tokens:
        model = versions[sum(len(tokens) >= switch for switch in SWITCHES)]
        inputs = torch.tensor([[*request.prompt_tokens, *tokens]])
        logprobs_V = sampling_logprobs(model(inputs).logits[:, -1], SAMPLING)[0]
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token in stop_tokens:
            break
    return tokens, logprobs


def test_completions_are_those_of_an_oracle_that_switches_at_the_same_token(
    backend: HfBackend, models: tuple[Path, list[PreTrainedModel]]
) -> None:
    _, versions = models
    backend.between_steps = at_steps(
        {
            step: lambda version=version: backend.update_weights(
                versions[version - 3].named_parameters(), version
            )
            for step, version in zip(SWITCHES, (4, 5), strict=True)
        }
    )
    requests = make_requests(12)
    # Of one prompt, with seeds of their own: they are one row until the first token.
    requests[1] = dataclasses.replace(requests[1], prompt_tokens=requests[0].prompt_tokens)
    trajectories = sorted(backend.generate(requests, SAMPLING), key=lambda one: one.row)
    assert versions_of(trajectories) == {3, 4, 5}
    for request, trajectory in zip(requests, trajectories, strict=True):
        # A draw differs by luck where rounding of 1e-6 crosses a border: 240 draws, odds below
        # 1 in 1,000.
        tokens, logprobs = sampled_alone(versions, request, range(300, 330))
        assert list(trajectory.completion_tokens) == tokens
        assert trajectory.logprobs == pytest.approx(logprobs, abs=FLOAT32_LOGPROB)
        assert list(trajectory.policy_versions) == [
            3 + sum(at >= switch for switch in SWITCHES) for at in range(len(tokens))
        ]


def test_a_hook_that_brings_nothing_changes_nothing(backend: HfBackend) -> None:
    requests = make_requests(6)
    without = {t.row: t for t in backend.generate(requests, SAMPLING)}
    backend.between_steps = at_steps({})
    assert {t.row: t for t in backend.generate(requests, SAMPLING)} == without


def test_a_failed_update_in_flight_ends_the_generation_and_poisons(
    backend: HfBackend, models: tuple[Path, list[PreTrainedModel]]
) -> None:
    _, versions = models

    def half_an_update() -> None:
        with pytest.raises(WeightsStaleError, match="lacks"):
            backend.update_weights(list(versions[1].named_parameters())[:3], 4)

    backend.between_steps = at_steps({4: half_an_update})
    with pytest.raises(WeightsStaleError, match="in the middle of the generation"):
        list(backend.generate(make_requests(4), SAMPLING))
    assert backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="policy_version 4 failed"):
        backend.generate(make_requests(1), SAMPLING)


def test_weights_from_elsewhere_are_refused_during_a_generation(
    backend: HfBackend, models: tuple[Path, list[PreTrainedModel]]
) -> None:
    _, versions = models
    # Prompts of several lengths and stop tokens: rows finish at several steps.
    running = backend.generate(make_requests(12), SAMPLING)
    next(running)
    with pytest.raises(RuntimeError, match="during a generation"):
        backend.update_weights(versions[1].named_parameters(), 4)
    assert backend.policy_version == 3
