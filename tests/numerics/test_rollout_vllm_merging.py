"""Updates of a vLLM sampler that merges the adapter: what they write, and what a failure leaves.

Loading vLLM takes many seconds: one engine serves all tests of a case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
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

from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.vllm import adapters as vllm_adapters
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec

SAMPLING = SamplingSpec(max_new_tokens=20)
CASES = [
    Case("merged", "bfloat16", "qwen2", SOME),
    pytest.param(Case("merged", "float32", "llama", ALL), marks=pytest.mark.slow),
]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU each update loads every weight"
)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case.way}-{case.dtype}-{case.family}"
)
def sampler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sampler]:
    with made_sampler(request.param, tmp_path_factory.mktemp("base") / "model") as made:
        yield made


def as_the_kernels_read(backend: VllmBackend) -> dict[str, str]:
    """Checksums of the merged model; those of the back end are of the factors."""
    from rolemesh.engine.rollout.vllm.weights.weights import model_checksums

    (checksums,) = backend.engine.apply_model(model_checksums)
    return dict(checksums)


def test_an_update_writes_the_bits_that_loading_every_weight_does(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, requests = sampler.backend, make_requests(4)
    models = [sampler.trainer(seed) for seed in (21, 22)]

    def bring(model: CausalLm) -> tuple[dict[str, str], dict[int, list[float]]]:
        backend.update_weights(factors(model).items(), 21)
        drawn = {t.row: list(t.logprobs) for t in backend.generate(requests, SAMPLING)}
        return as_the_kernels_read(backend), drawn

    whole = []
    for model in models:
        # What a new engine, or one after a failure, begins with.
        backend._held.holds_base = False
        whole.append(bring(model))
    assert whole[0][0] != whole[1][0]
    with monkeypatch.context() as patch:
        patch.setattr(vllm_adapters, "load_whole", lambda *_: pytest.fail("all was loaded"))
        assert [bring(model) for model in models] == whole


def test_an_update_packs_the_adapted_matrices_alone(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    backend = sampler.backend
    backend.update_weights(factors(sampler.trainer(23)).items(), 23)
    packed: list[str] = []
    pack = UnquantizedLinearMethod.process_weights_after_loading

    def noted(method: Any, layer: Any) -> None:
        packed.append(layer.prefix.rpartition(".")[2])
        pack(method, layer)

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", noted)
    backend.update_weights(factors(sampler.trainer(24)).items(), 24)
    some = {"qkv_proj", "gate_up_proj", "down_proj"}
    assert set(packed) == (some if sampler.case.adapter is SOME else {*some, "o_proj"})
    # Two layers, each matrix once; no head.
    assert len(packed) == 2 * len(set(packed))


def test_an_update_that_fails_between_two_matrices_poisons_the_engine_until_a_whole_one(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    backend, model, requests = sampler.backend, sampler.trainer(26), make_requests(4)
    backend.update_weights(factors(sampler.trainer(25)).items(), 25)
    pack, calls = UnquantizedLinearMethod.process_weights_after_loading, itertools.count(1)

    def failing(method: Any, layer: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("no memory")
        pack(method, layer)

    with monkeypatch.context() as patch:
        patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            backend.update_weights(factors(model).items(), 26)
    assert backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="update to policy_version 26 failed"):
        backend.generate(requests, SAMPLING)
    # Also where a kernel has dropped what was not packed, all is loaded again.
    loaded = []
    load_whole = vllm_adapters.load_whole
    monkeypatch.setattr(
        vllm_adapters, "load_whole", lambda *given: (loaded.append(1), load_whole(*given))
    )
    backend.update_weights(factors(model).items(), 27)
    assert loaded
    trajectories = list(backend.generate(requests, SAMPLING))
    assert differences(model, requests, trajectories).max() < LOGPROB
