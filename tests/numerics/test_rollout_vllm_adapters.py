"""vLLM serves the adapter of a trainer, in its slots or merged: against the trainer itself.

Loading vLLM takes many seconds: one engine serves all tests of a case, and the tests of one case
follow each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapted_samplers import (
    ALL,
    FAR,
    LOGPROB,
    MAX_MODEL_LEN,
    SOME,
    Case,
    Sampler,
    Trained,
    differences,
    factors,
    made_sampler,
    scores,
)
from support.in_flight_checks import at_steps
from support.rank_processes import RankContext, run_ranks
from support.rollout_checks import make_requests, tokens_by_row, versions_of
from support.tiny_models import write_tiny_llama

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import HfSpec, SamplingSpec, VllmSpec

NUM_BLOCK_TOKENS = 32
LOAD_TIMEOUT_S = 300.0
"""For two loads of vLLM at once on a machine that does other work."""
SAMPLING = SamplingSpec(max_new_tokens=20)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)

CASES = [
    Case("slots", "bfloat16", "qwen2", SOME),
    Case("merged", "float32", "llama", ALL),
    # Each way with the other's type, model and factors, as the two files on merging and sharing do.
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("slots", "float32", "llama", ALL),
            Case("merged", "bfloat16", "qwen2", SOME),
        )
    ),
]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case.way}-{case.dtype}-{case.family}"
)
def sampler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sampler]:
    with made_sampler(request.param, tmp_path_factory.mktemp("base") / "model") as made:
        yield made


def long_requests(num_rows: int) -> list[RolloutRequest]:
    """Rows that begin alike for more than two blocks of keys."""
    shared = [4 + 7 * index % 500 for index in range(2 * NUM_BLOCK_TOKENS + 9)]
    return [
        dataclasses.replace(one, prompt_tokens=[*shared, *one.prompt_tokens])
        for one in make_requests(num_rows)
    ]


def test_nothing_is_sampled_before_the_first_adapter(sampler: Sampler) -> None:
    # First in the file: the engine holds the base, and no version of the policy.
    assert sampler.backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="no weights were sent yet"):
        sampler.backend.generate(make_requests(1), SAMPLING)
    with pytest.raises(WeightsStaleError, match="no weights were sent yet"):
        sampler.backend.weight_checksums()


def test_logprobs_are_the_trainers(sampler: Sampler) -> None:
    model, requests = sampler.trainer(1), make_requests(16)
    sampler.backend.update_weights(factors(model).items(), 3)
    trajectories = list(sampler.backend.generate(requests, SAMPLING))
    assert len(trajectories) == 16
    assert versions_of(trajectories) == {3}
    assert differences(model, requests, trajectories).max() < LOGPROB
    # The base alone, and a base that is not rounded, would show.
    base = sampler.trainer(1, scale=0.0)
    assert differences(base, requests, trajectories).mean() > FAR
    if sampler.case.dtype == "bfloat16":
        unrounded = sampler.trainer(1, compute_dtype="float32")
        assert differences(unrounded, requests, trajectories).mean() > 50 * LOGPROB


def test_tokens_are_those_of_the_hf_sampler(sampler: Sampler) -> None:
    if sampler.case.dtype != "float32":
        pytest.skip("in bfloat16 the hf sampler rounds its activations too")
    model, requests = sampler.trainer(2), make_requests(8)
    oracle = make_backend(
        HfSpec(max_model_len=MAX_MODEL_LEN), sampler.folder, adapter=sampler.case.adapter
    )
    found = []
    for backend in (sampler.backend, oracle):
        backend.update_weights(factors(model).items(), 4)
        greedy = SamplingSpec(greedy=True, max_new_tokens=20)
        found.append(tokens_by_row(backend.generate(requests, greedy)))
    assert found[0] == found[1]
    assert sampler.backend.weight_checksums() == oracle.weight_checksums()


def test_a_later_adapter_takes_effect_on_prompts_that_were_sampled_before(
    sampler: Sampler,
) -> None:
    requests = long_requests(6)
    models = [sampler.trainer(seed) for seed in (3, 4, 3)]
    for version, model in enumerate(models, 5):
        sampler.backend.update_weights(factors(model).items(), version)
        for _ in range(2):
            trajectories = list(sampler.backend.generate(requests, SAMPLING))
            assert versions_of(trajectories) == {version}
            assert differences(model, requests, trajectories).max() < LOGPROB
            other = models[version % 2]
            assert differences(other, requests, trajectories).mean() > FAR


def test_keys_of_an_older_adapter_would_show(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, older, newer = long_requests(6), sampler.trainer(3), sampler.trainer(4)
    sampler.backend.update_weights(factors(older).items(), 5)
    list(sampler.backend.generate(requests, SAMPLING))
    with monkeypatch.context() as patch:
        patch.setattr(sampler.backend, "_forget_keys", lambda *_, **__: None)
        sampler.backend.update_weights(factors(newer).items(), 6)
        trajectories = list(sampler.backend.generate(requests, SAMPLING))
    found = differences(newer, requests, trajectories).mean()
    if sampler.case.way == "slots":
        # Keys belong to an adapter's name, and each version has one of its own.
        assert found < LOGPROB
    else:
        assert found > 100 * LOGPROB


@pytest.mark.parametrize("by_shard", [False, True], ids=["whole", "shard"])
def test_checksums_are_those_of_the_factors_as_they_were_sent(
    sampler: Sampler, by_shard: bool
) -> None:
    model = sampler.trainer(5)
    before = {name: factor.detach().clone() for name, factor in factors(model).items()}
    backend = sampler.backend
    # Tensor slices are each given the whole factors, too.
    update = backend.update_shard if by_shard else backend.update_weights
    random = torch.get_rng_state()
    update(factors(model).items(), 7)
    assert torch.equal(torch.get_rng_state(), random)
    expected = {name: tensor_checksum(factor) for name, factor in before.items()}
    assert backend.weight_checksums() == expected
    # Neither by an update nor by a generation are the trainer's factors multiplied by the scale.
    requests = make_requests(4)
    trajectories = list(backend.generate(requests, SAMPLING))
    assert differences(model, requests, trajectories).max() < LOGPROB
    assert torch.equal(torch.get_rng_state(), random)
    for name, factor in factors(model).items():
        assert torch.equal(factor, before[name]), name
    # Nor does the sampler follow what the trainer does to them next.
    with torch.no_grad():
        for factor in factors(model).values():
            factor.zero_()
    assert backend.weight_checksums() == expected
    again = list(backend.generate(requests, SAMPLING))
    assert tokens_by_row(again) == tokens_by_row(trajectories)


def test_a_set_of_factors_that_is_not_whole_poisons_the_engine_until_a_whole_one(
    sampler: Sampler,
) -> None:
    backend, model = sampler.backend, sampler.trainer(6)
    whole = factors(model)
    lost = next(name for name in whole if "layers.1" in name)

    def refused(sent: Mapping[str, torch.Tensor], complaint: str) -> None:
        with pytest.raises(WeightsStaleError, match=complaint):
            backend.update_weights(sent.items(), 8)
        assert backend.policy_version == -1
        with pytest.raises(WeightsStaleError, match="update to policy_version 8 failed"):
            backend.generate(make_requests(1), SAMPLING)

    refused({name: one for name, one in whole.items() if name != lost}, f"lacks '{lost}'")
    refused({**whole, lost: whole[lost][:-1]}, f"'{lost}' with shape")
    # The base is not sent.
    refused({"model.norm.weight": torch.ones(64), **whole}, "'model.norm.weight'")
    backend.update_weights(whole.items(), 9)
    requests = make_requests(4)
    trajectories = list(backend.generate(requests, SAMPLING))
    assert differences(model, requests, trajectories).max() < LOGPROB


def test_adapters_in_flight_take_effect_from_their_token_on(sampler: Sampler) -> None:
    backend, requests = sampler.backend, long_requests(20)
    models = {version: sampler.trainer(version) for version in (10, 11, 12)}

    def bring(version: int) -> None:
        backend.update_weights(factors(models[version]).items(), version)

    bring(10)
    backend.between_steps = at_steps({4: lambda: bring(11), 9: lambda: bring(12)})
    try:
        # More rows than are decoded together: some begin under the last version.
        trajectories = list(backend.generate(requests, SAMPLING))
    finally:
        backend.between_steps = None
    assert versions_of(trajectories) == {10, 11, 12}
    assert any(set(t.policy_versions) == {10, 11, 12} for t in trajectories)
    assert any(set(t.policy_versions) == {12} for t in trajectories)
    by_version = {
        version: scores(model, requests, trajectories) for version, model in models.items()
    }
    for index, trajectory in enumerate(trajectories):
        for at, (version, logprob) in enumerate(
            zip(trajectory.policy_versions, trajectory.logprobs, strict=True)
        ):
            assert abs(logprob - float(by_version[version][index][at])) < LOGPROB
    # The engine is left as it was found.
    after = list(backend.generate(requests, SAMPLING))
    assert differences(models[12], requests, after).max() < LOGPROB


def test_half_an_adapter_in_flight_ends_the_generation(sampler: Sampler) -> None:
    backend, model = sampler.backend, sampler.trainer(13)
    backend.update_weights(factors(model).items(), 13)

    def half() -> None:
        with pytest.raises(WeightsStaleError, match="lacks"):
            backend.update_weights(list(factors(model).items())[:3], 14)

    backend.between_steps = at_steps({3: half})
    try:
        with pytest.raises(WeightsStaleError, match="in the middle of the generation"):
            list(backend.generate(make_requests(4), SAMPLING))
    finally:
        backend.between_steps = None
    assert backend.policy_version == -1


def test_slots_hold_the_newest_adapter_alone_and_under_a_new_id(sampler: Sampler) -> None:
    if sampler.case.way != "slots":
        pytest.skip("a merged engine has no slots")
    engine, model, seen = sampler.backend.engine, sampler.trainer(15), []
    for version in (15, 16):
        sampler.backend.update_weights(factors(model).items(), version)
        list(sampler.backend.generate(make_requests(2), SAMPLING))
        (number,) = engine.engine_core.list_loras()
        seen.append(number)
    assert seen[0] < seen[1]


def test_merging_again_and_again_leaves_no_error_behind(sampler: Sampler) -> None:
    backend, requests = sampler.backend, make_requests(4)
    model, large = sampler.trainer(17), sampler.trainer(18, scale=1000.0)
    found = []
    for version in (17, 19):
        backend.update_weights(factors(model).items(), version)
        found.append({t.row: list(t.logprobs) for t in backend.generate(requests, SAMPLING)})
        backend.update_weights(factors(large).items(), version + 1)
    assert found[0] == found[1]


def test_merging_is_refused_where_activations_are_rounded(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    spec = VllmSpec(adapters="merged", activations="bfloat16")
    with pytest.raises(ValueError, match=r"computes in bfloat16 .* lose small updates: give slots"):
        make_backend(spec, folder, adapter=ALL)


def sliced_samples(
    at: RankContext, folder: Path, sent: Mapping[str, torch.Tensor]
) -> list[list[RolloutTrajectory]]:
    """What two slices sample with the same factors, in each of the two ways."""
    found = []
    with at.connect(HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))) as mesh:
        for way in ("slots", "merged"):
            spec = VllmSpec.model_validate(
                {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "adapters": way}
            )
            backend = VllmBackend(spec, folder, mesh, adapter=ALL)
            backend.update_shard(sent.items(), 3)
            found.append(list(backend.generate(make_requests(6), SAMPLING)))
            backend.close()
    return found


@pytest.mark.slow
def test_slices_are_each_given_the_whole_factors_and_cut_them(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    case = Case("slots", "float32", "llama", ALL)
    model, requests = Trained(case, folder).trainer(20), make_requests(6)
    sent = {name: factor.detach().clone() for name, factor in factors(model).items()}
    first, second = run_ranks(sliced_samples, 2, folder, sent, timeout_s=LOAD_TIMEOUT_S)
    for ours, theirs in zip(first, second, strict=True):
        assert tokens_by_row(ours) == tokens_by_row(theirs)
        assert differences(model, requests, ours).max() < LOGPROB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_of_one_slot_are_vllms_and_gather_nothing(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    if sampler.case.way != "slots":
        pytest.skip("a merged engine has no slots")
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper import punica_cpu

    from rolemesh.engine.rollout.vllm.weights.one_slot import OneSlot

    (wrappers,) = sampler.backend.engine.apply_model(
        lambda model: list(model.lora_manager.punica_wrapper_mapping.values())
    )
    assert [type(one) for one in wrappers] == [OneSlot]
    generator = torch.Generator().manual_seed(3)
    x, sizes = torch.randn(5, 16, generator=generator).to(dtype), (8, 24)
    a = tuple(torch.randn(1, 1, 4, 16, generator=generator).to(dtype) for _ in sizes)
    b = tuple(torch.randn(1, 1, size, 4, generator=generator).to(dtype) for size in sizes)
    before = torch.randn(5, sum(sizes), generator=generator).to(dtype)
    products = [
        x.double() @ one[0, 0].double().t() @ two[0, 0].double().t()
        for one, two in zip(a, b, strict=True)
    ]
    added = 0.5 * torch.cat(products, dim=1)
    gathered: list[str] = []
    for name in ("bgmv_shrink", "sgmv_shrink"):
        own = getattr(punica_cpu, name)

        def watched(*args: Any, name: str = name, own: Any = own) -> None:
            gathered.append(name)
            own(*args)

        monkeypatch.setattr(punica_cpu, name, watched)
    for is_prefill in (False, True):
        for ids in ((1,) * 5, (1, 0, 1, 1, 0)):
            made = OneSlot(64, 8, "cpu")
            made.update_metadata(LoRAMapping(ids, ids, is_prefill), [1], 1, 512)
            y = before.clone()
            made.add_lora_linear(y, x, a, b, 0.5, sizes)
            # Steps in which some have none are vLLM's; here there is no such step.
            has_it = torch.tensor(ids) == 1
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            expected = (before.double() + added)[has_it]
            torch.testing.assert_close(y.double()[has_it], expected, atol=tolerance, rtol=0.02)
    assert gathered == ["bgmv_shrink"] * 2 + ["sgmv_shrink"] * 2
