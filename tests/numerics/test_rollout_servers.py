"""Sampling at vLLM servers with an adapter, against fakes of them on real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.episode_checks import assert_requests_may_come_later
from support.fake_vllm import BASE, FakeVllm, fake_vllm, wait_until
from support.in_flight_checks import at_steps
from support.server_backends import (
    SAMPLING,
    Make,
    check_logprobs,
    factors,
    making,
    requests,
    sampled,
    toy_scale,
    when_rows_have_tokens,
)
from support.tiny_models import write_tiny_llama
from support.toy_sampling import STOP, toy_tokens

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.base import generated
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.servers.client import (
    ServerRefusedError,
)
from rolemesh.engine.rollout.servers.requests import Served
from rolemesh.engine.rollout.servers.sampler import VllmServerBackend
from rolemesh.engine.specs import SamplingSpec, VllmServerSpec

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


def test_servers_that_keep_their_own_weights_are_asked_for_them(
    folder: Path, servers: list[FakeVllm]
) -> None:
    for server in servers:
        # Nothing learns from these log-probs, so they may be those of another distribution.
        server.logprobs_mode = "raw_logprobs"
    spec = VllmServerSpec(urls=tuple(one.url for one in servers), max_model_len=64)
    backend = VllmServerBackend(spec, folder, own=Served(model=BASE))
    try:
        drawing = SamplingSpec(max_new_tokens=12, temperature=0.5)
        found = sampled(backend, requests(6), drawing)
        assert {version for one in found.values() for version in one.policy_versions} == {0}
        assert {body["model"] for one in servers for body in one.drawn()} == {BASE}
        for row, one in found.items():
            drawn = toy_tokens(1000 + row, 30 + row, 12, 512)
            assert one.completion_tokens == drawn[: len(one.completion_tokens)]
        with pytest.raises(RuntimeError, match="servers that keep their own"):
            backend.update_weights([], 1)
    finally:
        backend.close()


def test_requests_with_images_are_refused_by_name(make: Make, servers: list[FakeVllm]) -> None:
    backend = make()
    backend.update_weights(factors(backend, 0.01), 0)
    image = PromptImage.of(b"PNG", (1, 2, 2))
    with pytest.raises(ValueError, match=r"row 1 has images, and rollout\.type is 'vllm_server'"):
        backend.generate(
            [*requests(1), RolloutRequest(row=1, prompt_tokens=[5], seed=0, images=[image])],
            SAMPLING,
        )
    assert not [body for one in servers for body in one.drawn()]


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
    checksums = {name: tensor_checksum(one) for name, one in factors(backend, 0.05)}
    assert backend.weight_checksums() == checksums
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
    backend.between_steps = when_rows_have_tokens(
        backend, 4, lambda: backend.update_weights(factors(backend, 0.02), 1)
    )
    asked = requests(8)
    found = sampled(backend, asked, SamplingSpec(max_new_tokens=20))
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

    backend.between_steps = at_steps({1: update})
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
            (
                *("world", "tp", "pp", "dp", "fsdp", "replicate", "model", "stage"),
                *("generate_tp", "micro_dp", "experts", "expert_fsdp", "expert_replicate"),
                *("cp", "parts"),
            ),
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


@pytest.mark.parametrize("in_flight", [False, True], ids=["whole answers", "streams"])
def test_requests_may_come_while_others_are_sampled(make: Make, in_flight: bool) -> None:
    backend = make(updates_between_steps=in_flight)
    backend.update_weights(factors(backend, 0.01), 0)
    if in_flight:
        backend.between_steps = lambda: None
    assert_requests_may_come_later(backend, 1e-6)
