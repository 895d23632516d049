"""vLLM in the trainer's process, float32, tied embeddings: against full forward passes and hf.

One engine serves the whole file: loading vLLM takes many seconds.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.episode_checks import (
    assert_episodes_score_as_a_full_forward,
    assert_requests_may_come_later,
    assert_turns_end_when_told,
)
from support.hostile_folders import plant
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    make_requests,
    perturb,
    set_stop_tokens,
    tokens_by_row,
    trainer_checksums,
    versions_of,
)
from support.sampler_shards import rank_shard, shard_tensors
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.data.rows import PromptTooLongError
from rolemesh.engine.hardware import cpu_threads
from rolemesh.engine.hardware.cpu_threads import largest_product
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm import sampler
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import HfSpec, SamplingSpec, VllmSpec

FLOAT32_LOGPROB = 5e-4
"""Mean abs difference promised between sampler and trainer. Measured: 1e-6 here, 5e-6 on
SmolLM2-135M; a missed update of this model's weights gives 1."""
STOP_TOKENS = (2, *range(300, 400))
"""A fifth of the vocabulary, so that most completions end before their budget."""
MAX_MODEL_LEN = 64


@dataclass
class ProcessState:
    """What vLLM's start must leave as it was."""

    set_num_threads: Any
    num_threads: int
    affinity: set[int]
    memory_mode: int
    torch_rng: list[int]
    python_rng: Any
    numpy_draw: float


def read_process_state() -> ProcessState:
    mode = ctypes.c_int(-1)
    try:
        ctypes.CDLL("libnuma.so.1").get_mempolicy(ctypes.byref(mode), None, 0, None, 0)
    except OSError:
        pytest.skip("libnuma is missing: vLLM's CPU build needs it")
    return ProcessState(
        set_num_threads=torch.set_num_threads,
        num_threads=torch.get_num_threads(),
        affinity=os.sched_getaffinity(0),
        memory_mode=mode.value,
        torch_rng=torch.get_rng_state().tolist(),
        python_rng=random.getstate(),
        numpy_draw=float(np.random.get_state()[1][0]),
    )


@dataclass
class Loaded:
    """A backend and the process around its load."""

    backend: VllmBackend
    before: ProcessState
    after: ProcessState


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("vllm") / "model", tied=True)
    set_stop_tokens(path, STOP_TOKENS)
    plant(path, path.parent / "ran")
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Loaded]:
    threads = torch.get_num_threads()
    # Two, so that vLLM's lowering to one would show.
    torch.set_num_threads(2)
    before = read_process_state()
    backend = make_backend(
        VllmSpec(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=16), folder
    )
    assert isinstance(backend, VllmBackend)
    yield Loaded(backend, before, read_process_state())
    backend.close()
    torch.set_num_threads(threads)


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return load_trainer_model(folder)


@pytest.fixture
def backend(loaded: Loaded, model: PreTrainedModel) -> VllmBackend:
    loaded.backend.update_weights(model.named_parameters(), 3)
    return loaded.backend


def test_nothing_is_sampled_before_the_first_weights(loaded: Loaded) -> None:
    # First in the file: the engine has its dummy weights only now.
    assert loaded.backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="no weights were sent yet"):
        loaded.backend.generate(make_requests(1), SamplingSpec())


def test_code_and_pickles_in_the_folder_are_left_alone(loaded: Loaded, folder: Path) -> None:
    engine = loaded.backend.engine
    assert not engine.model_config.trust_remote_code
    assert not (folder.parent / "ran").exists()


def test_the_start_leaves_threads_memory_and_generators_alone(loaded: Loaded) -> None:
    assert loaded.after == loaded.before
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


def test_a_generation_leaves_threads_and_generators_alone(backend: VllmBackend) -> None:
    before = read_process_state()
    list(backend.generate(make_requests(4), SamplingSpec(max_new_tokens=4)))
    assert read_process_state() == before


def test_prompts_take_more_threads_than_a_token_for_each_row(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def note(_: Any, arguments: Any) -> None:
        seen.append((len(arguments[0]), torch.get_num_threads()))

    (hook,) = backend.engine.apply_model(
        lambda model: model.model.norm.register_forward_pre_hook(note)
    )
    # As long as it takes for their product to be larger than that of four rows' vocabulary.
    requests = [
        replace(request, prompt_tokens=tuple(request.prompt_tokens) * 5)
        for request in make_requests(4)
    ]
    num_prompt_tokens = sum(len(request.prompt_tokens) for request in requests)
    longest = max(len(request.prompt_tokens) for request in requests)
    # Between the product of a token for each row and that of the prompts.
    least = largest_product(backend._folder.config, num_prompt_tokens, longest, num_predicted=4)
    monkeypatch.setattr(cpu_threads, "LEAST_SHARED_PRODUCT", least)
    list(backend.generate(requests, SamplingSpec(max_new_tokens=3)))
    hook.remove()
    assert seen[0] == (num_prompt_tokens, 2)
    assert len(seen) > 1
    assert set(seen[1:]) <= {(number, 1) for number in range(1, 5)}


def test_greedy_tokens_are_those_of_hf(
    backend: VllmBackend, folder: Path, model: PreTrainedModel
) -> None:
    oracle = make_backend(HfSpec(max_model_len=MAX_MODEL_LEN), folder)
    oracle.update_weights(model.named_parameters(), 3)
    sampling = SamplingSpec(greedy=True, max_new_tokens=40)
    requests = make_requests(16)
    ours = {t.row: t for t in backend.generate(requests, sampling)}
    theirs = {t.row: t for t in oracle.generate(requests, sampling)}
    assert len(ours) == 16
    for row, trajectory in theirs.items():
        assert ours[row].completion_tokens == trajectory.completion_tokens
        assert ours[row].finish_reason == trajectory.finish_reason
        assert ours[row].logprobs == pytest.approx(trajectory.logprobs, abs=FLOAT32_LOGPROB)
    assert backend.weight_checksums() == oracle.weight_checksums()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_a_full_forward(
    backend: VllmBackend, model: PreTrainedModel, temperature: float
) -> None:
    requests = make_requests(16)
    sampling = SamplingSpec(max_new_tokens=40, temperature=temperature)
    trajectories = list(backend.generate(requests, sampling))
    assert len(trajectories) == 16
    assert versions_of(trajectories) == {3}
    differences = logprob_differences(model, requests, trajectories, temperature)
    assert differences.mean() < FLOAT32_LOGPROB


def test_top_k_and_top_p_cut_the_logprobs_too(
    backend: VllmBackend, folder: Path, model: PreTrainedModel
) -> None:
    # The same tokens scored by hf's own distribution: replay them one at a time.
    from rolemesh.engine.rollout.distribution import sampling_logprobs

    sampling = SamplingSpec(max_new_tokens=12, top_k=20, top_p=0.8)
    requests = make_requests(6)
    for trajectory in backend.generate(requests, sampling):
        tokens = list(requests[trajectory.row].prompt_tokens)
        for token, logprob in zip(trajectory.completion_tokens, trajectory.logprobs, strict=True):
            with torch.no_grad():
                logits_BV = model(torch.tensor([tokens])).logits[:, -1]
            expected = float(sampling_logprobs(logits_BV, sampling)[0, token])
            assert logprob == pytest.approx(expected, abs=FLOAT32_LOGPROB)
            tokens.append(token)


def test_an_update_takes_effect_and_a_missed_one_shows(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    requests, sampling = make_requests(8), SamplingSpec(max_new_tokens=24)
    for version, seed in ((4, 1), (5, 2)):
        perturb(model, seed=seed)
        missed = logprob_differences(model, requests, backend.generate(requests, sampling))
        assert missed.mean() > 100 * FLOAT32_LOGPROB
        stale = backend.weight_checksums()
        expected = trainer_checksums(model, torch.float32)
        assert stale.keys() == expected.keys()
        assert not set(stale.values()) & set(expected.values())
        backend.update_weights(model.named_parameters(), version)
        trajectories = list(backend.generate(requests, sampling))
        assert logprob_differences(model, requests, trajectories).mean() < FLOAT32_LOGPROB
        assert versions_of(trajectories) == {version}
        assert backend.weight_checksums() == expected


def test_parts_placed_by_one_rank_are_whole_weights_loaded(
    backend: VllmBackend, model: PreTrainedModel, folder: Path
) -> None:
    requests, sampling = make_requests(8), SamplingSpec(max_new_tokens=24)
    for version, seed in ((4, 1), (5, 2)):
        perturb(model, seed=seed)
        backend.update_shard(shard_tensors(rank_shard(folder), dict(model.state_dict())), version)
        assert backend.weight_checksums() == trainer_checksums(model, torch.float32)
        trajectories = list(backend.generate(requests, sampling))
        assert logprob_differences(model, requests, trajectories).mean() < FLOAT32_LOGPROB
        assert versions_of(trajectories) == {version}
    # The two ways can follow each other.
    perturb(model, seed=3)
    backend.update_weights(model.named_parameters(), 6)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)


def test_whole_weights_are_written_in_any_order_without_vllms_loaders(
    backend: VllmBackend, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturb(model, seed=1)
    weights = list(model.named_parameters())
    random.Random(5).shuffle(weights)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "load_whole", lambda *_: pytest.fail("its loaders were asked"))
        backend.update_weights(weights, 4)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)
    # What they write, over it.
    perturb(model, seed=2)
    monkeypatch.setattr(backend, "_shard", None)
    backend.update_weights(model.named_parameters(), 5)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)


def test_a_single_missed_linear_layer_shows_in_its_checksum(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    # Half of a fused parameter, whose own tensor vLLM leaves empty after packing.
    stale_name = "model.layers.1.mlp.up_proj.weight"
    stale = model.get_parameter(stale_name).detach().clone()
    perturb(model, seed=1)
    backend.update_weights(
        ((n, stale if n == stale_name else p) for n, p in model.named_parameters()), 4
    )
    held, expected = backend.weight_checksums(), trainer_checksums(model, torch.float32)
    assert [name for name in expected if held[name] != expected[name]] == [stale_name]


def test_a_tied_head_left_packed_with_old_weights_would_show(
    backend: VllmBackend, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolemesh.engine.rollout.vllm.weights import weights as vllm_weights

    monkeypatch.setattr(vllm_weights, "_tied_heads", lambda model: [])
    perturb(model, seed=1)
    backend.update_weights(model.named_parameters(), 4)
    held, expected = backend.weight_checksums(), trainer_checksums(model, torch.float32)
    assert [name for name in expected if held[name] != expected[name]] == ["lm_head.weight"]
    requests = make_requests(8)
    trajectories = backend.generate(requests, SamplingSpec(max_new_tokens=24))
    assert logprob_differences(model, requests, trajectories).mean() > 100 * FLOAT32_LOGPROB


@pytest.mark.parametrize(
    "missing",
    ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"],
)
def test_a_partial_update_poisons_the_engine_until_a_whole_one(
    backend: VllmBackend, model: PreTrainedModel, missing: str
) -> None:
    partial = [(name, p) for name, p in model.named_parameters() if name != missing]
    with pytest.raises(WeightsStaleError, match=f"lacks '{missing}'"):
        backend.update_weights(partial, 4)
    assert backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="update to policy_version 4 failed"):
        backend.generate(make_requests(1), SamplingSpec())
    perturb(model, seed=1)
    backend.update_weights(model.named_parameters(), 5)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)


def test_a_trainer_that_fails_halfway_poisons_the_engine_too(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.named_parameters())[:7]
        raise OSError("the trainer went away")

    with pytest.raises(OSError, match="went away"):
        backend.update_weights(broken(), 4)
    with pytest.raises(WeightsStaleError):
        backend.generate(make_requests(1), SamplingSpec())
    backend.update_weights(model.named_parameters(), 5)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)


def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(backend: VllmBackend) -> None:
    # Rounding differs with the neighbours by about 1e-6 in a probability: some 400 draws differ
    # by luck with odds of less than 1 in 1,000.
    requests, sampling = make_requests(20), SamplingSpec(max_new_tokens=24)
    together = tokens_by_row(backend.generate(requests, sampling))
    assert tokens_by_row(backend.generate(requests[::-1], sampling)) == together
    assert tokens_by_row(backend.generate(requests[7:8], sampling))[7] == together[7]
    reseeded = [
        RolloutRequest(row=r.row, prompt_tokens=r.prompt_tokens, seed=r.seed + 99) for r in requests
    ]
    assert tokens_by_row(backend.generate(reseeded, sampling)) != together


def test_trajectories_arrive_as_they_finish_with_their_stop_token(backend: VllmBackend) -> None:
    # All 16 rows start in one step, so they finish in order of length.
    trajectories = list(backend.generate(make_requests(16), SamplingSpec(max_new_tokens=24)))
    lengths = [len(trajectory.completion_tokens) for trajectory in trajectories]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    for trajectory in trajectories:
        *inner, last = trajectory.completion_tokens
        assert not set(inner) & set(STOP_TOKENS)
        assert (last in STOP_TOKENS) == (trajectory.finish_reason == "stop")
        assert len(trajectory.logprobs) == len(trajectory.completion_tokens)


def test_a_completion_is_bounded_by_the_room_that_is_left(backend: VllmBackend) -> None:
    request = RolloutRequest(row=0, prompt_tokens=[9] * (MAX_MODEL_LEN - 1), seed=1)
    (trajectory,) = backend.generate([request], SamplingSpec(max_new_tokens=100))
    assert len(trajectory.completion_tokens) == 1


def test_closing_early_leaves_a_clean_engine(backend: VllmBackend, model: PreTrainedModel) -> None:
    requests, sampling = make_requests(20), SamplingSpec(max_new_tokens=24)
    whole = tokens_by_row(backend.generate(requests, sampling))
    trajectories = backend.generate(requests, sampling)
    next(trajectories)
    with pytest.raises(RuntimeError, match="finish or close it first"):
        backend.update_weights(model.named_parameters(), 4)
    with pytest.raises(RuntimeError, match="finish or close it first"):
        backend.generate(requests, sampling)
    trajectories.close()
    assert not backend.engine.has_unfinished_requests()
    assert tokens_by_row(backend.generate(requests, sampling)) == whole
    backend.update_weights(model.named_parameters(), 4)


def test_a_step_that_raises_leaves_a_clean_engine(backend: VllmBackend) -> None:
    requests, sampling = make_requests(20), SamplingSpec(max_new_tokens=24)
    whole = tokens_by_row(backend.generate(requests, sampling))
    calls = iter(range(100))

    def fail_at_third(*_: Any) -> None:
        if next(calls) == 2:
            raise ArithmeticError("the device failed")

    (handle,) = backend.engine.apply_model(
        lambda m: m.model.norm.register_forward_pre_hook(fail_at_third)
    )
    try:
        with pytest.raises(ArithmeticError, match="the device failed"):
            list(backend.generate(requests, sampling))
    finally:
        handle.remove()
    assert not backend.engine.has_unfinished_requests()
    assert tokens_by_row(backend.generate(requests, sampling)) == whole


@pytest.mark.parametrize(
    ("request_fields", "error", "complaint"),
    [
        (
            {"prompt_tokens": [5] * 64},
            PromptTooLongError,
            "row 7 has 64 tokens.*max_model_len is 64",
        ),
        ({"prompt_tokens": []}, ValueError, "row 7 is empty"),
        ({"prompt_tokens": [5, 512]}, ValueError, "token 512, outside the vocabulary of 512"),
    ],
    ids=["long", "empty", "vocabulary"],
)
def test_bad_requests_are_refused_before_anything_is_sampled(
    backend: VllmBackend, request_fields: dict, error: type[Exception], complaint: str
) -> None:
    fields = {"row": 7, "prompt_tokens": [5, 6], "seed": 0, **request_fields}
    with pytest.raises(error, match=complaint):
        backend.generate([make_requests(1)[0], RolloutRequest(**fields)], SamplingSpec())
    assert not backend.engine.has_unfinished_requests()


def test_a_temperature_that_vllm_would_change_is_refused(backend: VllmBackend) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0\.001, below vLLM's least"):
        backend.generate(make_requests(1), SamplingSpec(temperature=0.001))


def test_nothing_sleeps_on_a_cpu(backend: VllmBackend) -> None:
    if torch.cuda.is_available():
        pytest.skip("this device can sleep")
    assert backend.sleep() == 0
    assert backend.wake() == 0
    assert len(list(backend.generate(make_requests(1), SamplingSpec(max_new_tokens=2)))) == 1


def test_requests_may_come_while_others_are_sampled(backend: VllmBackend) -> None:
    assert_requests_may_come_later(backend, FLOAT32_LOGPROB)


def test_a_turn_ends_where_the_caller_says(backend: VllmBackend) -> None:
    assert_turns_end_when_told(backend)
    # The engine is left empty, and serves on.
    assert len(list(backend.generate(make_requests(3), SamplingSpec(max_new_tokens=4)))) == 3


def test_sampled_tokens_score_as_in_a_full_forward_with_tool_output_between(
    backend: VllmBackend, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert_episodes_score_as_a_full_forward(backend, model, tmp_path, FLOAT32_LOGPROB)
