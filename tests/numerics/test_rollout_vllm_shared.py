"""Tests of a vLLM engine that several back ends use in turn, each with an adapter of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.adapted_samplers import (
    ALL,
    LOGPROB,
    SOME,
    Case,
    Sampler,
    differences,
    factors,
    made_sampler,
)
from support.rollout_checks import make_requests

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

SAMPLING = SamplingSpec(max_new_tokens=12)
REQUESTS = make_requests(4)
CASES = [Case("merged", "float32", "qwen2", SOME), Case("slots", "float32", "llama", ALL)]

Drawn = dict[int, tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.way)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A back end whose engine others may use: one engine serves both tests of a case."""
    directory = tmp_path_factory.mktemp("base") / "model"
    with made_sampler(request.param, directory, shares_engine=True) as made:
        yield made


def drawn(sampler: Sampler, seed: int | None = None) -> Drawn:
    """Tokens and log-probs of all rows; where a seed is given, they are near its trainer's."""
    found = list(sampler.backend.generate(REQUESTS, SAMPLING))
    if seed is not None:
        assert differences(sampler.trainer(seed), REQUESTS, found).max() < LOGPROB
    return {row.row: (list(row.completion_tokens), list(row.logprobs)) for row in found}


def test_back_ends_that_share_an_engine_sample_what_each_samples_alone(one: Sampler) -> None:
    case, folder, tokens = one.case, one.folder, [5, 6, 7, 8, 9]
    alone: dict[int, tuple[Drawn, list[float]]] = {}
    for seed in (1, 2, 3):
        one.backend.update_weights(factors(one.trainer(seed)).items(), seed)
        alone[seed] = drawn(one, seed), one.backend.score(tokens)
    assert len({repr(found) for found in alone.values()}) == 3

    with made_sampler(case, folder, shares_engine=True) as two:
        assert one.backend.engine is two.backend.engine
        one.backend.update_weights(factors(one.trainer(1)).items(), 4)
        two.backend.update_weights(factors(two.trainer(2)).items(), 2)
        # Each finds the engine with the other's adapter, and keys of the same prompts.
        assert drawn(one) == alone[1][0]
        assert drawn(two) == alone[2][0]
        assert one.backend.score(tokens) == alone[1][1]
        assert two.backend.score(tokens) == alone[2][1]
        one.backend.update_weights(factors(one.trainer(3)).items(), 5)
        assert drawn(two) == alone[2][0]
        assert drawn(one) == alone[3][0]
        assert (one.backend.policy_version, two.backend.policy_version) == (5, 2)

        # A run that ends leaves the other one its engine.
        two.backend.close()
        assert drawn(one) == alone[3][0]
        again = make_backend(one.backend._spec, folder, adapter=case.adapter, shares_engine=True)
        assert isinstance(again, VllmBackend)
        two.backend = again
        two.backend.update_weights(factors(two.trainer(2)).items(), 2)
        assert drawn(two) == alone[2][0]


def test_a_run_with_other_settings_cannot_join_the_engine(one: Sampler) -> None:
    spec, folder, adapter = one.backend._spec, one.folder, one.case.adapter
    other = ALL if adapter is SOME else SOME
    named = {"merged": "adapter_matrices", "slots": "adapter_slots"}[one.case.way]
    longer = spec.model_copy(update={"max_model_len": 64})
    with pytest.raises(ValueError, match=r"rollout.max_model_len is 64, but the vLLM engine"):
        make_backend(longer, folder, adapter=adapter, shares_engine=True)
    with pytest.raises(ValueError, match=rf"{named} is .*runs of this service share"):
        make_backend(spec, folder, adapter=other, shares_engine=True)
    with pytest.raises(ValueError, match=r"without model.adapter, but several runs share"):
        make_backend(VllmSpec(), folder, shares_engine=True)
    # What was refused has not taken a share of it.
    assert one.backend._held.num_backends == 1
