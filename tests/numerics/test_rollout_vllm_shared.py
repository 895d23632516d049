"""Tests of a vLLM engine that several back ends use in turn, each with an adapter of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.adapted_samplers import ALL, SOME, Case, Sampler, factors, made_sampler
from support.rollout_checks import make_requests

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

SAMPLING = SamplingSpec(max_new_tokens=12)
REQUESTS = make_requests(4)
CASES = [Case("merged", "float32", "qwen2", SOME), Case("slots", "float32", "llama", ALL)]

Drawn = dict[int, tuple[list[int], list[float]]]


def drawn(sampler: Sampler) -> Drawn:
    """Tokens and log-probs of all rows."""
    return {
        one.row: (list(one.completion_tokens), list(one.logprobs))
        for one in sampler.backend.generate(REQUESTS, SAMPLING)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.way)
def test_back_ends_that_share_an_engine_sample_what_each_samples_alone(
    case: Case, tmp_path: Path
) -> None:
    folder = case.folder(tmp_path / "model")
    tokens = [5, 6, 7, 8, 9]
    alone: dict[int, tuple[Drawn, list[float]]] = {}
    with made_sampler(case, folder) as sampler:
        for seed in (1, 2, 3):
            sampler.backend.update_weights(factors(sampler.trainer(seed)).items(), seed)
            alone[seed] = drawn(sampler), sampler.backend.score(tokens)
    assert len({repr(found) for found in alone.values()}) == 3

    with (
        made_sampler(case, folder, shares_engine=True) as one,
        made_sampler(case, folder, shares_engine=True) as two,
    ):
        assert one.backend.engine is two.backend.engine
        one.backend.update_weights(factors(one.trainer(1)).items(), 1)
        two.backend.update_weights(factors(two.trainer(2)).items(), 2)
        # Each finds the engine with the other's adapter, and keys of the same prompts.
        assert drawn(one) == alone[1][0]
        assert drawn(two) == alone[2][0]
        assert one.backend.score(tokens) == alone[1][1]
        assert two.backend.score(tokens) == alone[2][1]
        one.backend.update_weights(factors(one.trainer(3)).items(), 3)
        assert drawn(two) == alone[2][0]
        assert drawn(one) == alone[3][0]
        assert (one.backend.policy_version, two.backend.policy_version) == (3, 2)

        # A run that ends leaves the other one its engine.
        two.backend.close()
        assert drawn(one) == alone[3][0]
        again = make_backend(one.backend._spec, folder, adapter=case.adapter, shares_engine=True)
        assert isinstance(again, VllmBackend)
        two.backend = again
        two.backend.update_weights(factors(two.trainer(2)).items(), 2)
        assert drawn(two) == alone[2][0]


def test_a_run_with_other_settings_cannot_join_the_engine(tmp_path: Path) -> None:
    case = replace(CASES[0], family="llama", adapter=ALL)
    folder = case.folder(tmp_path / "model")
    with made_sampler(case, folder, shares_engine=True) as first:
        spec = first.backend._spec
        longer = spec.model_copy(update={"max_model_len": 64})
        with pytest.raises(ValueError, match=r"rollout.max_model_len is 64, but the vLLM engine"):
            make_backend(longer, folder, adapter=ALL, shares_engine=True)
        with pytest.raises(ValueError, match=r"adapter_matrices is .*runs of this service share"):
            make_backend(spec, folder, adapter=SOME, shares_engine=True)
        with pytest.raises(ValueError, match=r"without model.adapter, but several runs share"):
            make_backend(VllmSpec(), folder, shares_engine=True)
        # What was refused has not taken a share of it.
        assert first.backend._held.num_backends == 1
