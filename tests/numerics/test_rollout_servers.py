"""Sampling at vLLM servers with an adapter, against fakes of them on real sockets."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_vllm import (
    STOP,
    FakeVllm,
    fake_vllm,
    toy_logprob,
    toy_tokens,
    wait_until,
)
from support.in_flight_checks import at_steps
from support.tiny_models import write_tiny_llama

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.base import generated
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.probe import (
    ProbeScores,
    SamplerCheck,
    SamplerStaleError,
    check_sampler,
)
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.servers.admission import ServerUnfitError
from rolemesh.engine.rollout.servers.client import (
    AnswerInvalidError,
    SamplersUnavailableError,
    ServerRefusedError,
)
from rolemesh.engine.rollout.vllm_server import VllmServerBackend
from rolemesh.engine.specs import AdapterSpec, SamplingSpec, VllmServerSpec

ADAPTER = AdapterSpec(rank=4, alpha=8.0)
SAMPLING = SamplingSpec(max_new_tokens=12)
ALONE = RankGroup((0,), 0, None)
PROBE = (5, 9, 30, 7, 100, 41)

Make = Callable[..., VllmServerBackend]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    with fake_vllm() as first, fake_vllm() as second:
        yield [first, second]


@pytest.fixture
def make(folder: Path, servers: list[FakeVllm], tmp_path: Path) -> Iterator[Make]:
    """Makes back ends, which are closed with the test."""
    made: list[VllmServerBackend] = []

    def make(*, updates_between_steps: bool = False, mesh: Any = None, **fields: Any) -> Any:
        spec = VllmServerSpec.model_validate(
            {
                "urls": [one.url for one in servers],
                "shared_folder": tmp_path / "shared",
                "max_model_len": 64,
                "dtype": "float32",
                "timeout_s": 5,
                "deadline_s": 10,
                "breaker_pause_s": 0.2,
                **fields,
            }
        )
        backend = make_backend(
            spec, folder, mesh, adapter=ADAPTER, updates_between_steps=updates_between_steps
        )
        assert isinstance(backend, VllmServerBackend)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def factors(backend: VllmServerBackend, scale: float) -> list[tuple[str, torch.Tensor]]:
    """Factors whose B is a constant."""
    return [
        (name, torch.full(shape, scale if "lora_B" in name else 0.5))
        for name, shape in backend._expected.shapes.items()
    ]


def toy_scale(backend: VllmServerBackend, scale: float) -> float:
    """What the toy makes of them."""
    return scale * sum("lora_B" in name for name in backend._expected.shapes)


def requests(count: int, **fields: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(row=row, prompt_tokens=[5, 9, 30 + row], seed=1000 + row, **fields)
        for row in range(count)
    ]


def sampled(
    backend: VllmServerBackend, asked: Sequence[RolloutRequest], sampling: SamplingSpec = SAMPLING
) -> dict[int, RolloutTrajectory]:
    found = list(backend.generate(asked, sampling))
    assert sorted(one.row for one in found) == [one.row for one in asked]
    return {one.row: one for one in found}


def check_logprobs(
    asked: Sequence[RolloutRequest],
    found: dict[int, RolloutTrajectory],
    scale_of: Callable[[int], float],
) -> None:
    """Each token's log-prob is that of its own version."""
    for request in asked:
        one = found[request.row]
        row = [*request.prompt_tokens, *one.completion_tokens]
        for index, logprob in enumerate(one.logprobs):
            place = len(request.prompt_tokens) + index
            expected = toy_logprob(row[place - 1], row[place], scale_of(one.policy_versions[index]))
            assert logprob == pytest.approx(expected, abs=1e-6)


def test_rows_come_from_both_servers_with_the_adapter_and_their_log_probs(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 3)
    asked = requests(24)
    found = sampled(backend, asked)
    check_logprobs(asked, found, lambda version: toy_scale(backend, 0.01))
    assert {version for one in found.values() for version in one.policy_versions} == {3}
    assert {one.finish_reason for one in found.values()} == {"stop", "length"}
    for server in servers:
        bodies = server.drawn()
        assert 8 <= len(bodies) <= 16  # the least busy one is asked
        (name,) = {body["model"] for body in bodies}
        assert name in server.adapters
        # Nothing is left to the model's generation_config.json.
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            assert key in bodies[0]
        assert not bodies[0]["stream"]
    assert {body["seed"] for one in servers for body in one.drawn()} == set(range(1000, 1024))


def test_no_server_has_more_in_flight_than_max_num_seqs(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make(max_num_seqs=3)
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.002
    sampled(backend, requests(20))
    assert [one.most_in_flight for one in servers] == [3, 3]


def test_rows_are_yielded_as_they_finish(make: Make, servers: list[FakeVllm]) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.02
    long = next(
        RolloutRequest(row=0, prompt_tokens=[5], seed=seed)
        for seed in range(100)
        if STOP not in toy_tokens(seed, 5, 12, 512)
    )
    short = RolloutRequest(row=1, prompt_tokens=[5], seed=1, max_new_tokens=1)
    with generated(backend, [long, short], SAMPLING) as trajectories:
        assert next(trajectories).row == 1


def test_each_update_has_a_name_of_its_own_and_the_one_before_last_goes(
    make: Make, servers: list[FakeVllm], tmp_path: Path
) -> None:
    backend = make()
    names = []
    for version, scale in enumerate((0.01, 0.02, 0.03, 0.02)):
        backend.update_weights(factors(backend, scale), version)
        asked = requests(4)
        check_logprobs(asked, sampled(backend, asked), lambda _, s=scale: toy_scale(backend, s))
        names.append(servers[0].drawn()[-1]["model"])
        held = sorted(one.name for one in (tmp_path / "shared").iterdir())
        assert held == sorted(names[-2:])
        for server in servers:
            assert sorted(server.adapters) == held
    assert len(set(names)) == 4
    # The same version with other values, as after a run went back, is another name, too.
    backend.update_weights(factors(backend, 0.05), 3)
    asked = requests(4)
    check_logprobs(asked, sampled(backend, asked), lambda _: toy_scale(backend, 0.05))
    config = json.loads(
        (tmp_path / "shared" / servers[0].drawn()[-1]["model"] / "adapter_config.json").read_text()
    )
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    backend.close()
    assert not list((tmp_path / "shared").iterdir())
    assert not any(server.adapters for server in servers)


def test_weights_in_the_middle_give_each_token_the_version_that_drew_it(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make(updates_between_steps=True)
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.05
    begun = threading.Event()

    def update() -> None:
        backend.update_weights(factors(backend, 0.02), 1)
        begun.set()

    backend.between_steps = at_steps({5: update})
    asked = requests(8)
    found = sampled(backend, asked, SamplingSpec(max_new_tokens=20))
    assert begun.is_set()
    scales = {0: toy_scale(backend, 0.01), 1: toy_scale(backend, 0.02)}
    check_logprobs(asked, found, scales.__getitem__)
    mixed = [one for one in found.values() if set(one.policy_versions) == {0, 1}]
    assert len(mixed) >= 4
    for one in found.values():
        assert list(one.policy_versions) == sorted(one.policy_versions)
    # What goes on is asked for with all tokens so far, and draws by another seed.
    later = [body for one in servers for body in one.drawn() if len(body["prompt"]) > 3]
    assert len(later) >= len(mixed)
    assert not {body["seed"] for body in later} & set(range(1000, 1008))
    for server in servers:
        wait_until(lambda one=server: one.in_flight == 0)
    assert sum(one.num_aborted for one in servers) >= 1


def test_an_update_that_fails_in_the_middle_ends_the_generation(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make(updates_between_steps=True)
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.02
        server.max_rank = 1

    def update() -> None:
        with pytest.raises(ServerRefusedError, match="greater than max_lora_rank"):
            backend.update_weights(factors(backend, 0.02), 1)

    backend.between_steps = at_steps({3: update})
    with pytest.raises(WeightsStaleError, match="update in the middle"):
        sampled(backend, requests(4))
    with pytest.raises(WeightsStaleError, match="max_lora_rank"):
        backend.generate(requests(1), SAMPLING)
    for server in servers:
        server.max_rank = 16
    backend.between_steps = None
    backend.update_weights(factors(backend, 0.02), 1)
    sampled(backend, requests(2))


def test_the_caller_ends_a_completion(make: Make, servers: list[FakeVllm]) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.005
    asked = requests(6, is_complete=lambda tokens: len(tokens) == 3)
    found = sampled(backend, asked, SamplingSpec(max_new_tokens=40))
    plain = sampled(backend, requests(6), SamplingSpec(max_new_tokens=40))
    for row, one in found.items():
        assert one.finish_reason == "stop"
        assert list(one.completion_tokens) == list(plain[row].completion_tokens)[:3]
    for server in servers:
        wait_until(lambda one=server: one.in_flight == 0)


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
        ("short_logprobs", "one a token"),
        ("too_many", "at most 12 tokens"),
        ("outside", "token ids below 512"),
        ("other_prompt", "the prompt's own tokens"),
        ("abort", "a stop token or at 12 tokens"),
        ("huge", "more than"),
        ("no_json", "no JSON"),
        (400, "a fault of the test"),
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


def test_servers_may_see_the_folder_elsewhere(
    make: Make, servers: list[FakeVllm], tmp_path: Path
) -> None:
    seen = tmp_path / "as-servers-see-it"
    seen.symlink_to(tmp_path / "shared")
    backend = make(server_folder=str(seen))
    backend.update_weights(factors(backend, 0.01), 0)
    sampled(backend, requests(2))
    assert all(path.startswith(str(seen)) for path in servers[0].adapters.values())
    backend = make(server_folder="/nowhere")
    with pytest.raises(ServerRefusedError, match=r"rollout\.server_folder"):
        backend.update_weights(factors(backend, 0.01), 0)


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


def test_a_generation_that_is_left_is_over(make: Make, servers: list[FakeVllm]) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    for server in servers:
        server.token_s = 0.02
    with generated(backend, requests(8), SAMPLING) as trajectories:
        next(trajectories)
    for server in servers:
        wait_until(lambda one=server: one.in_flight == 0)
    sampled(backend, requests(3))


def test_generation_is_not_cut_over_ranks(make: Make) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(pp=1, tp=2))
    mesh = RankMesh(
        layout=layout,
        rank=0,
        **dict.fromkeys(
            ("world", "tp", "pp", "dp", "fsdp", "replicate", "model", "generate_tp", "micro_dp"),
            ALONE,
        ),
    )
    with pytest.raises(LayoutError, match="leaves that to its servers"):
        make(mesh=mesh)


def test_without_a_folder_or_a_gpu_there_is_no_way_for_weights(
    make: Make, folder: Path, servers: list[FakeVllm]
) -> None:
    with pytest.raises(ValueError, match=r"rollout\.shared_folder is not given"):
        make(shared_folder=None)
    spec = VllmServerSpec(urls=(servers[0].url,))
    with pytest.raises(ValueError, match=r"actor\.model\.adapter"):
        make_backend(spec, folder)
