"""Tests of what is shared in vLLM: an engine by back ends, a prompt by its completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
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
    scores,
)
from support.in_flight_checks import at_steps
from support.rollout_checks import make_requests, tokens_by_row, versions_of

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

SAMPLING = SamplingSpec(max_new_tokens=12)
REQUESTS = make_requests(4)
CASES = [Case("merged", "float32", "qwen2", SOME), Case("slots", "float32", "llama", ALL)]

LENGTHS = (1, 2, 31, 32, 33, 40, 64, 65)
"""Of prompts, in tokens: around blocks of 32."""

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


def siblings(lengths: Sequence[int], num_rows: int) -> list[RolloutRequest]:
    """Rows of prompts of these lengths, in turns."""
    prompts = [[7 + (3 * at + length) % 500 for at in range(length)] for length in lengths]
    return [
        RolloutRequest(row=row, prompt_tokens=prompts[row % len(prompts)], seed=row)
        for row in range(num_rows)
    ]


def sampled(
    backend: VllmBackend, requests: Sequence[RolloutRequest]
) -> tuple[list[RolloutTrajectory], dict[int, list[int]]]:
    """Trajectories, and of each length of prompt how many tokens its rows did not compute."""
    cached: dict[int, list[int]] = defaultdict(list)
    step = backend._step

    def watched() -> list[Any]:
        outputs = step()
        for output in outputs:
            cached[len(output.prompt_token_ids)].append(output.num_cached_tokens)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_step", watched)
        found = list(backend.generate(requests, SAMPLING))
    connector = backend.engine.engine_core.engine_core.scheduler.connector
    assert not connector._requests
    assert not connector._taken
    return found, {length: sorted(numbers) for length, numbers in cached.items()}


def test_completions_of_a_prompt_compute_it_once(one: Sampler) -> None:
    model = one.trainer(4)
    one.backend.update_weights(factors(model).items(), 6)
    # As many as are decoded together, and more.
    for num_rows in (2 * len(LENGTHS), 3 * len(LENGTHS)):
        requests = siblings(LENGTHS, num_rows)
        found, cached = sampled(one.backend, requests)
        for length in LENGTHS:
            first, *others = cached[length]
            assert first == 0
            # The last token is computed by each: its successor is drawn from it.
            assert others[-1] == length - 1
        assert differences(model, requests, found).max() < LOGPROB
    # Rows that came later find a sibling that runs, unless all have ended.
    assert sum(map(len, cached.values())) == len(requests)
    alone = [list(one.backend.generate([request], SAMPLING)) for request in requests[:8]]
    assert tokens_by_row(row for rows in alone for row in rows) == {
        row: tokens for row, tokens in tokens_by_row(found).items() if row < 8
    }


def test_new_weights_in_the_middle_leave_no_keys_of_old_ones_to_siblings(one: Sampler) -> None:
    models = {version: one.trainer(version) for version in (7, 8)}

    def bring(version: int) -> None:
        one.backend.update_weights(factors(models[version]).items(), version)

    bring(7)
    one.backend.between_steps = at_steps({4: lambda: bring(8)})
    try:
        requests = siblings((20, 40), 24)
        found, _ = sampled(one.backend, requests)
    finally:
        one.backend.between_steps = None
    assert versions_of(found) == {7, 8}
    by_version = {version: scores(model, requests, found) for version, model in models.items()}
    for index, row in enumerate(found):
        for at, (version, logprob) in enumerate(
            zip(row.policy_versions, row.logprobs, strict=True)
        ):
            assert abs(logprob - float(by_version[version][index][at])) < LOGPROB


def test_callers_with_a_salt_of_their_own_share_with_nobody(
    one: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.backend.update_weights(factors(one.trainer(4)).items(), 9)
    given = one.backend._prompts.given
    monkeypatch.setattr(
        one.backend._prompts,
        "given",
        lambda request: {**given(request), "cache_salt": "ab"[request.row % 2]},
    )
    _, cached = sampled(one.backend, siblings((40,), 4))
    assert cached == {40: [0, 0, 39, 39]}


def test_a_prompt_is_not_taken_over_from_one_that_takes_it_over_in_the_same_step() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import RequestStatus

    from rolemesh.engine.rollout.vllm.engine.shared_prompts import SharedPrompts, transfer_config

    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    layer = SimpleNamespace(kv_cache=torch.arange(5)[:, None].clone())
    connector = SharedPrompts(
        SimpleNamespace(
            kv_transfer_config=transfer_config(),
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        ),
        None,
        SimpleNamespace(kv_cache_groups=[group]),
    )
    blocks = {"a": [1, 2], "b": [1, 3], "c": [1, 4]}
    connector._kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: (blocks[name],))
    # "a" came first, and was put back to the queue: "b" has computed the prompt.
    a, b, c = (
        SimpleNamespace(
            request_id=name,
            prompt_token_ids=range(40),
            num_prompt_tokens=40,
            num_tokens=41,
            num_computed_tokens=0,
            status=RequestStatus.WAITING,
            mm_features=[],
            cache_salt=None,
        )
        for name in blocks
    )
    for request in (a, b, c):
        connector.on_new_request(request)
    b.status = RequestStatus.RUNNING
    assert connector.get_num_new_matched_tokens(a, 32) == (None, False)
    b.num_computed_tokens = 40
    for request in (a, c):
        assert connector.get_num_new_matched_tokens(request, 32) == (8, False)
        mine = blocks[request.request_id]
        connector.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda mine=mine: (mine,)), 8
        )
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, 40
    connector.build_connector_meta(None)
    assert layer.kv_cache.flatten().tolist() == [0, 1, 3, 3, 3]
