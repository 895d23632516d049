"""What goes wrong with vLLM servers that sample, against fakes of them on real sockets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_vllm import FakeVllm, fake_vllm
from support.server_backends import (
    PROBE,
    SAMPLING,
    Make,
    check_logprobs,
    factors,
    making,
    requests,
    sampled,
    toy_scale,
)
from support.tiny_models import write_tiny_llama
from support.toy_sampling import toy_logprob

from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.agreement.probe import (
    ProbeScores,
    SamplerCheck,
    SamplerStaleError,
    check_sampler,
)
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.servers.admission import ServerUnfitError
from rolemesh.engine.rollout.servers.client import (
    AnswerInvalidError,
    SamplersUnavailableError,
    ServerRefusedError,
)
from rolemesh.engine.specs import SamplingSpec

ALONE = RankGroup((0,), 0, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    with fake_vllm() as first, fake_vllm() as second:
        yield [first, second]


@pytest.fixture
def make(folder: Path, servers: list[FakeVllm], tmp_path: Path) -> Iterator[Make]:
    with making(folder, servers, tmp_path / "shared") as make:
        yield make


def test_rows_do_not_depend_on_the_servers_that_drew_them(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend, asked = make(), requests(12)
    backend.update_weights(factors(backend, 0.01), 0)
    calm = sampled(backend, asked)
    servers[0].faults = [503, "cut", None, 500, 429]
    assert sampled(backend, asked) == calm


@pytest.mark.parametrize("between", [False, True], ids=["whole answers", "streams"])
def test_a_server_that_dies_in_the_middle_loses_no_row(
    make: Make, servers: list[FakeVllm], between: bool
) -> None:
    backend, asked = make(updates_between_steps=between), requests(16)
    backend.update_weights(factors(backend, 0.01), 0)
    calm = sampled(backend, asked)
    if between:
        backend.between_steps = lambda: None
    for server in servers:
        server.token_s = 0.03
    threading.Timer(0.1, servers[0].kill).start()
    assert sampled(backend, asked) == calm
    # And none is asked of it in vain for long.
    servers[1].token_s = 0.0
    started = time.monotonic()
    assert sampled(backend, asked) == calm
    assert time.monotonic() - started < 3


def test_a_server_that_was_started_anew_gets_the_newest_adapter_before_it_is_asked(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend, asked = make(), requests(16)
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, asked)
    servers[0].kill()
    backend.update_weights(factors(backend, 0.02), 1)
    check_logprobs(asked, sampled(backend, asked), lambda _: toy_scale(backend, 0.02))
    servers[0].start()
    servers[0].calls.clear()
    time.sleep(0.3)
    for server in servers:
        server.token_s = 0.01
    check_logprobs(asked, sampled(backend, asked), lambda _: toy_scale(backend, 0.02))
    routes = servers[0].routes()
    assert routes.index("/v1/load_lora_adapter") < routes.index("draw")
    assert routes[0] == "/health"
    # Also where nobody noticed that it was gone.
    servers[1].kill()
    servers[1].start()
    for _ in range(2):
        check_logprobs(asked, sampled(backend, asked), lambda _: toy_scale(backend, 0.02))
    assert servers[1].adapters


def test_a_server_that_forgets_an_adapter_gets_it_again(
    make: Make, servers: list[FakeVllm], tmp_path: Path
) -> None:
    backend, asked = make(), requests(8)
    backend.update_weights(factors(backend, 0.01), 0)
    calm = sampled(backend, asked)
    for server in servers:
        server.adapters.clear()
    for one in (tmp_path / "shared").iterdir():
        for file in one.iterdir():
            file.unlink()
        one.rmdir()
    assert sampled(backend, asked) == calm


def test_where_all_servers_are_gone_the_error_names_them(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make(deadline_s=1.5)
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.kill()
    with pytest.raises(SamplersUnavailableError) as caught:
        sampled(backend, requests(8))
    for server in servers:
        assert server.url in str(caught.value)
    assert "start them again" in str(caught.value)
    with pytest.raises(SamplersUnavailableError):
        backend.update_weights(factors(backend, 0.02), 1)
    servers[0].start()
    backend.update_weights(factors(backend, 0.02), 1)
    sampled(backend, requests(4))


def test_a_server_that_is_silent_is_left_for_another(make: Make, servers: list[FakeVllm]) -> None:
    backend, asked = make(timeout_s=0.4), requests(6)
    backend.update_weights(factors(backend, 0.01), 0)
    calm = sampled(backend, asked)
    servers[0].always = "hang"
    assert sampled(backend, asked) == calm


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan", "NaN in its weights"),
        ("floor", "NaN in its weights"),
        ("not_finite", "NaN or infinite.*start it anew"),
        ("short_logprobs", "one a token"),
        ("too_many", "at most 12 tokens"),
        ("outside", "token ids below 512"),
        ("other_prompt", "the prompt's own tokens"),
        ("abort", "a stop token or at 12 tokens"),
        ("huge", "more than"),
        ("no_json", "no JSON"),
        (400, "a fault of the test"),
        (500, "3 times: look into the server's log"),
        (302, "redirects are not followed"),
    ],
)
def test_a_bad_answer_fails_the_generation_with_its_words(
    make: Make, servers: list[FakeVllm], fault: Any, told: str
) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    servers[0].always = servers[1].always = fault
    with pytest.raises((AnswerInvalidError, ServerRefusedError), match=told):
        sampled(backend, requests(3))
    servers[0].always = servers[1].always = None
    sampled(backend, requests(3))


def test_the_probe_is_asked_of_each_server_and_finds_the_one_that_serves_the_base(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend, check = make(), SamplerCheck()
    servers[1].serves_base = True

    def trainer(scale: float) -> ProbeScores:
        pairs = itertools.pairwise(PROBE)
        return ProbeScores(
            PROBE, tuple(toy_logprob(*pair, toy_scale(backend, scale)) for pair in pairs), "float32"
        )

    def brings(scale: float, version: int) -> None:
        backend.update_weights(factors(backend, scale), version)
        check_sampler(backend, check, trainer(scale), ALONE, torch.device("cpu"))

    brings(0.0, 0)  # as at the start of a run: the adapter is the base
    with pytest.raises(SamplerStaleError, match=f"the server {servers[1].url}'s log-probs"):
        brings(1e-4, 1)
    servers[1].serves_base = False
    brings(1e-4, 1)


def test_a_server_that_comes_back_with_other_weights_is_refused(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    backend.score(PROBE)
    servers[0].kill()
    sampled(backend, requests(6))
    servers[0].serves_base = True
    servers[0].start()
    time.sleep(0.3)
    for server in servers:
        server.token_s = 0.01
    with pytest.raises(ServerUnfitError, match="from the other servers'"):
        sampled(backend, requests(16))


def test_log_probs_of_the_model_are_refused_where_they_differ_from_the_distributions(
    make: Make, servers: list[FakeVllm]
) -> None:
    servers[1].logprobs_mode = "raw_logprobs"
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(8))  # temperature 1, all tokens: they are the same
    sampled(backend, requests(8), SamplingSpec(max_new_tokens=4, greedy=True))
    for fields in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(ServerUnfitError, match="--logprobs-mode processed_logprobs"):
            sampled(backend, requests(8), SamplingSpec(max_new_tokens=4, **fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"logprobs_mode": "raw_logits"}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 32}, "--max-model-len 64"),
        ({"is_name_checked": False}, "VLLM_SKIP_MODEL_NAME_VALIDATION"),
        ({"key": "secret"}, "token_variable"),
    ],
    ids=["logits", "short rows", "unknown names", "no key"],
)
def test_a_server_that_is_unfit_is_refused_before_anything_is_sampled(
    make: Make, servers: list[FakeVllm], fields: dict[str, Any], told: str
) -> None:
    for name, value in fields.items():
        setattr(servers[1], name, value)
    with pytest.raises((ServerUnfitError, ServerRefusedError), match=told):
        make()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"has_lora_routes": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"max_rank": 2}, "rank 4 is greater than max_lora_rank 2.*--max-lora-rank"),
    ],
    ids=["no routes", "rank"],
)
def test_a_server_that_takes_no_such_adapter_says_how_to_start_it(
    make: Make, servers: list[FakeVllm], fields: dict[str, Any], told: str
) -> None:
    for name, value in fields.items():
        setattr(servers[1], name, value)
    backend = make()
    with pytest.raises(ServerRefusedError, match=told):
        backend.update_weights(factors(backend, 0.01), 0)
    with pytest.raises(WeightsStaleError):
        backend.generate(requests(1), SAMPLING)


def test_the_key_goes_along_and_is_shown_nowhere(
    make: Make, servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_KEY", "sesame")
    servers[0].key = servers[1].key = "sesame"
    backend = make(token_variable="FLEET_KEY")
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(2))
    servers[0].key = servers[1].key = "another"
    with pytest.raises(ServerRefusedError) as caught:
        sampled(backend, requests(2))
    assert "sesame" not in str(caught.value)
    monkeypatch.delenv("FLEET_KEY")
    with pytest.raises(ValueError, match="not set in the environment"):
        make(token_variable="FLEET_KEY")


def test_a_start_goes_on_without_a_server_that_is_absent(
    make: Make, servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolemesh.engine.rollout.servers.fleet.LISTENING_S", 0.0)
    servers[1].kill()
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(4))
    servers[0].kill()
    with pytest.raises(SamplersUnavailableError):
        make(deadline_s=0.5)


def test_a_server_that_was_started_anew_between_two_updates_is_checked_anew(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend, sampling = make(), SamplingSpec(max_new_tokens=4, temperature=0.7)
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(8), sampling)
    # Nobody asks it anything meanwhile, and it has other flags now.
    servers[1].kill()
    servers[1].logprobs_mode = "raw_logprobs"
    servers[1].start()
    backend.update_weights(factors(backend, 0.02), 1)
    with pytest.raises(ServerUnfitError, match="--logprobs-mode processed_logprobs"):
        sampled(backend, requests(8), sampling)
    # Both at once: an update waits until they have been admitted.
    for server in servers:
        server.kill()
        server.logprobs_mode = "processed_logprobs"
        server.start()
    backend.update_weights(factors(backend, 0.03), 2)
    sampled(backend, requests(8), sampling)


def test_factors_that_are_not_finite_do_not_reach_the_servers(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make()
    with pytest.raises(WeightsStaleError, match="NaN or infinite values"):
        backend.update_weights(factors(backend, float("nan")), 0)
    with pytest.raises(WeightsStaleError):
        backend.generate(requests(1), SAMPLING)
    assert not any(server.adapters for server in servers)
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(2))
