"""The hf back end against full forward passes, and the distribution against its definition."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.device_reads import IMAGINED, DeviceReads
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
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.data.rows import PromptTooLongError
from rolemesh.engine.rollout.distribution import sampling_logprobs
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.hf import sampler as hf
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.sleep_memory import SleepMemory
from rolemesh.engine.specs import HfSpec, SamplingSpec

FLOAT32_LOGPROB = 2e-5
"""Log-probs near -6 in float32, summed in another order over 2 layers: a few of its 5e-7 steps."""
STOP_TOKENS = (2, *range(300, 400))
"""A fifth of the vocabulary, so that most completions end before their budget."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("hf") / "model")
    set_stop_tokens(path, STOP_TOKENS)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_trainer_model(folder)


@pytest.fixture
def device_draws(backend: HfBackend) -> HfBackend:
    """The back end, drawing as it does on a GPU."""
    assert not backend._draws_by_counter
    backend._draws_by_counter = True
    return backend


@pytest.fixture
def backend(folder: Path, model: PreTrainedModel) -> Iterator[HfBackend]:
    backend = HfBackend(HfSpec(max_model_len=48, max_num_seqs=5), folder)
    backend.update_weights(model.named_parameters(), 3)
    yield backend
    backend.close()


def test_logprobs_are_those_of_a_full_forward(backend: HfBackend, model: PreTrainedModel) -> None:
    requests = make_requests(12)
    sampling = SamplingSpec(max_new_tokens=40, temperature=0.8)
    trajectories = list(backend.generate(requests, sampling))
    assert len(trajectories) == 12
    assert logprob_differences(model, requests, trajectories, 0.8).max() < FLOAT32_LOGPROB
    assert versions_of(trajectories) == {3}


def test_samples_of_one_prompt_begin_as_one_row(folder: Path, model: PreTrainedModel) -> None:
    backend = HfBackend(HfSpec(max_model_len=48, max_num_seqs=12), folder)
    backend.update_weights(model.named_parameters(), 3)
    requests = [
        dataclasses.replace(request, prompt_tokens=make_requests(3)[request.row % 3].prompt_tokens)
        for request in make_requests(12)
    ]
    batch_sizes: list[int] = []
    hook = backend._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: batch_sizes.append(len(kwargs["input_ids"])),
        with_kwargs=True,
    )
    trajectories = list(backend.generate(requests, SamplingSpec(max_new_tokens=24)))
    hook.remove()
    assert batch_sizes[:2] == [3, sum(len(one.completion_tokens) > 1 for one in trajectories)]
    assert len({tuple(trajectory.completion_tokens) for trajectory in trajectories}) > 3
    assert logprob_differences(model, requests, trajectories, 1.0).max() < FLOAT32_LOGPROB
    # The same rows, each by itself: see the next test for the odds of a difference.
    alone = [
        next(backend.generate([request], SamplingSpec(max_new_tokens=24))) for request in requests
    ]
    assert tokens_by_row(alone) == tokens_by_row(trajectories)
    backend.close()


def test_weights_that_are_not_finite_end_the_generation(
    backend: HfBackend, model: PreTrainedModel
) -> None:
    backend.update_weights(
        ((name, torch.full_like(weight, torch.nan)) for name, weight in model.named_parameters()), 4
    )
    with pytest.raises(RuntimeError, match="not finite"):
        list(backend.generate(make_requests(2), SamplingSpec(max_new_tokens=2)))


@pytest.mark.parametrize("drawing", ["backend", "device_draws"])
def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(
    request: pytest.FixtureRequest, drawing: str
) -> None:
    backend: HfBackend = request.getfixturevalue(drawing)
    # Rounding differs with the neighbours by about 1e-6 in a probability: some 300 draws differ
    # by luck with odds of less than 1 in 1,000.
    requests = make_requests(12)
    sampling = SamplingSpec(max_new_tokens=24)
    together = tokens_by_row(backend.generate(requests, sampling))
    reverse = tokens_by_row(backend.generate(requests[::-1], sampling))
    alone = tokens_by_row(backend.generate(requests[7:8], sampling))
    assert together == reverse
    assert together[7] == alone[7]
    reseeded = [
        RolloutRequest(row=r.row, prompt_tokens=r.prompt_tokens, seed=r.seed + 99) for r in requests
    ]
    assert tokens_by_row(backend.generate(reseeded, sampling)) != together


def test_draws_of_a_device_leave_no_probability_out_and_report_nan(
    device_draws: HfBackend, model: PreTrainedModel
) -> None:
    requests, sampling = make_requests(12), SamplingSpec(max_new_tokens=40, temperature=0.8)
    trajectories = list(device_draws.generate(requests, sampling))
    assert logprob_differences(model, requests, trajectories, 0.8).max() < FLOAT32_LOGPROB
    # Each position of a row has numbers of its own: else a row would say one token for ever.
    longest = max(trajectories, key=lambda one: len(one.completion_tokens))
    assert len(set(longest.completion_tokens)) > len(longest.completion_tokens) // 2
    broken = ((name, torch.full_like(each, torch.nan)) for name, each in model.named_parameters())
    device_draws.update_weights(broken, 4)
    with pytest.raises(RuntimeError, match="not finite"):
        list(device_draws.generate(make_requests(2), SamplingSpec(max_new_tokens=2)))


def test_a_step_reads_tokens_and_logprobs_of_all_rows_in_one_copy(
    folder: Path, model: PreTrainedModel
) -> None:
    backend = HfBackend(HfSpec(max_model_len=48, max_num_seqs=5), folder, device=IMAGINED)
    backend.update_weights(model.named_parameters(), 3)
    backend._draws_by_counter = True
    sampling = SamplingSpec(max_new_tokens=6, temperature=0.8, top_k=50, top_p=0.9)
    with DeviceReads(backend._model) as device:
        trajectories = list(backend.generate(make_requests(5), sampling))
    backend.close()
    num_steps = max(len(one.completion_tokens) for one in trajectories)
    # What is sent comes after the read, when the device has nothing to do.
    reads = {
        place.split()[0]: count
        for place, count in device.places.items()
        if "/rollout/" in place and not place.startswith(("to ", "tensor "))
    }
    assert reads == {"tolist": num_steps}


def test_it_sleeps_in_memory_of_its_own_that_is_kept(
    backend: HfBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = []

    def move(module: torch.nn.Module, device: torch.device, memory: SleepMemory) -> int:
        assert module is backend._model
        moves.append((device, memory))
        return 7

    # What it does, to the bit and with a GPU's streams, is in test_sleep_memory.py.
    monkeypatch.setattr(hf, "move_module", move)
    assert [backend.sleep(), backend.wake(), backend.sleep()] == [7, 7, 7]
    cpu = torch.device("cpu")
    assert [device for device, _ in moves] == [cpu, backend._device, cpu]
    assert len({id(memory) for _, memory in moves}) == 1


def test_a_stop_token_ends_a_completion_and_belongs_to_it(backend: HfBackend) -> None:
    trajectories = list(backend.generate(make_requests(12), SamplingSpec(max_new_tokens=24)))
    reasons = {trajectory.finish_reason for trajectory in trajectories}
    assert "stop" in reasons
    for trajectory in trajectories:
        *inner, last = trajectory.completion_tokens
        assert not set(inner) & set(STOP_TOKENS)
        assert (last in STOP_TOKENS) == (trajectory.finish_reason == "stop")
        assert len(trajectory.logprobs) == len(trajectory.completion_tokens)


def test_rows_arrive_as_they_finish_within_a_wave(backend: HfBackend) -> None:
    rows = [t.row for t in backend.generate(make_requests(10), SamplingSpec(max_new_tokens=24))]
    assert sorted(rows[:5]) == [0, 1, 2, 3, 4]
    assert rows != sorted(rows)


def test_a_completion_is_bounded_by_the_room_that_is_left(folder: Path) -> None:
    path = folder.with_name("never-stops")
    shutil.copytree(folder, path)
    set_stop_tokens(path, [511])
    backend = HfBackend(HfSpec(max_model_len=12), path)
    backend.update_weights(load_trainer_model(path).named_parameters(), 0)
    requests = make_requests(8)
    for trajectory in backend.generate(requests, SamplingSpec(max_new_tokens=100, top_k=1)):
        room = 12 - len(requests[trajectory.row].prompt_tokens)
        assert len(trajectory.completion_tokens) == room
        assert trajectory.finish_reason == "length"


def test_greedy_takes_the_likeliest_token(backend: HfBackend, model: PreTrainedModel) -> None:
    (request,) = make_requests(1)
    (trajectory,) = backend.generate([request], SamplingSpec(greedy=True, max_new_tokens=6))
    tokens = list(request.prompt_tokens)
    for token in trajectory.completion_tokens:
        assert token == int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)


def test_an_update_takes_effect_and_a_missed_one_shows(
    backend: HfBackend, folder: Path, model: PreTrainedModel
) -> None:
    moved = load_trainer_model(folder)
    perturb(moved, seed=1)
    requests, sampling = make_requests(8), SamplingSpec(max_new_tokens=24)
    assert backend.weight_checksums() == trainer_checksums(model, torch.float32)
    missed = logprob_differences(moved, requests, backend.generate(requests, sampling))
    assert missed.mean() > 100 * FLOAT32_LOGPROB
    assert backend.weight_checksums() != trainer_checksums(moved, torch.float32)
    backend.update_weights(moved.named_parameters(), 4)
    fresh = logprob_differences(moved, requests, backend.generate(requests, sampling))
    assert fresh.max() < FLOAT32_LOGPROB
    assert backend.weight_checksums() == trainer_checksums(moved, torch.float32)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda w: w[:-1], "lacks 'model.norm.weight' \\(1 of 20"),
        (lambda w: [*w, w[0]], "embed_tokens.weight', which came before"),
        (lambda w: [*w, ("lm_head.weight", w[0][1])], "tied to 'model.embed_tokens.weight'"),
        (lambda w: [("model.nothing", w[0][1]), *w], "does not have"),
        (lambda w: [(w[0][0], w[0][1][1:]), *w[1:]], "shape \\[511, 64\\].*\\[512, 64\\]"),
    ],
    ids=["missing", "twice", "tied", "unknown", "shape"],
)
def test_a_partial_update_poisons_the_sampler_until_a_whole_one(
    backend: HfBackend, model: PreTrainedModel, damage, complaint: str
) -> None:
    with pytest.raises(WeightsStaleError, match=complaint):
        backend.update_weights(damage(list(model.named_parameters())), 4)
    assert backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="update to policy_version 4 failed"):
        backend.generate(make_requests(1), SamplingSpec())
    backend.update_weights(model.named_parameters(), 5)
    assert len(list(backend.generate(make_requests(1), SamplingSpec()))) == 1


def test_nothing_is_sampled_before_the_first_weights(folder: Path) -> None:
    backend = make_backend(HfSpec(max_model_len=48), folder)
    assert backend.policy_version == -1
    with pytest.raises(WeightsStaleError, match="no weights were sent yet"):
        backend.generate(make_requests(1), SamplingSpec())


def test_weights_are_refused_during_a_generation(
    backend: HfBackend, model: PreTrainedModel
) -> None:
    trajectories = backend.generate(make_requests(8), SamplingSpec(max_new_tokens=24))
    next(trajectories)
    with pytest.raises(RuntimeError, match="finish or close it first"):
        backend.update_weights(model.named_parameters(), 4)
    trajectories.close()
    backend.update_weights(model.named_parameters(), 4)


@pytest.mark.parametrize(
    ("request_fields", "error", "complaint"),
    [
        (
            {"prompt_tokens": [5] * 48},
            PromptTooLongError,
            "row 7 has 48 tokens.*max_model_len is 48",
        ),
        ({"prompt_tokens": []}, ValueError, "row 7 is empty"),
        ({"prompt_tokens": [5, 512]}, ValueError, "token 512, outside the vocabulary of 512"),
        ({"seed": -1}, ValueError, "seed of row 7 is -1"),
        ({"row": 0}, ValueError, "row 0 is asked for twice"),
    ],
    ids=["long", "empty", "vocabulary", "seed", "twice"],
)
def test_bad_requests_are_refused_before_anything_is_sampled(
    backend: HfBackend, request_fields: dict, error: type[Exception], complaint: str
) -> None:
    fields = {"row": 7, "prompt_tokens": [5, 6], "seed": 0, **request_fields}
    with pytest.raises(error, match=complaint):
        backend.generate([make_requests(1)[0], RolloutRequest(**fields)], SamplingSpec())


def test_bad_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: give a local Hugging Face model folder"):
        make_backend(HfSpec(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        make_backend(HfSpec(), tmp_path)
    with pytest.raises(ValueError, match=r"max_model_len is 513.*at most 512"):
        make_backend(HfSpec(max_model_len=513), folder)


@pytest.mark.slow
def test_making_a_back_end_imports_no_other(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import rolemesh.engine.rollout.vllm.sampler\n"
        "from rolemesh.engine.rollout.factory import make_backend\n"
        "from rolemesh.engine.specs import HfSpec\n"
        f"make_backend(HfSpec(max_model_len=16), Path({str(folder)!r}))\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def brute_force(logits: list[float], sampling: SamplingSpec) -> list[float]:
    """Probabilities by the definition: sort by likelihood, take while needed, share out."""
    scaled = [value / sampling.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda index: -scaled[index])
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = [float(torch.tensor(scaled[i], dtype=torch.float64).exp()) for i in order]
    kept, mass = [], 0.0
    for index, weight in zip(order, weights, strict=True):
        if mass >= sampling.top_p * sum(weights):
            break
        kept.append((index, weight))
        mass += weight
    probabilities = [0.0] * len(logits)
    for index, weight in kept:
        probabilities[index] = weight / mass
    return probabilities


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    list(itertools.product([0.5, 1.0, 2.0], [-1, 1, 7], [0.3, 0.9, 1.0])),
)
def test_the_distribution_is_its_definition(temperature: float, top_k: int, top_p: float) -> None:
    sampling = SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p)
    logits_BV = 2 * torch.randn(4, 33, generator=torch.Generator().manual_seed(5))
    probs_BV = sampling_logprobs(logits_BV, sampling).exp()
    for row, logits in zip(probs_BV, logits_BV.tolist(), strict=True):
        expected = torch.tensor(brute_force(logits, sampling))
        torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("drawing", ["backend", "device_draws"])
def test_draws_follow_the_distribution(
    request: pytest.FixtureRequest, model: PreTrainedModel, drawing: str
) -> None:
    # 400 draws over 4 tokens: a frequency has a standard error of at most 0.025, so that a right
    # sampler passes 5 of them with odds of 1 - 2e-6.
    backend: HfBackend = request.getfixturevalue(drawing)
    sampling = SamplingSpec(max_new_tokens=1, top_k=4)
    requests = [RolloutRequest(row=i, prompt_tokens=[7, 8], seed=i) for i in range(400)]
    counts = torch.zeros(512)
    for trajectory in backend.generate(requests, sampling):
        counts[trajectory.completion_tokens[0]] += 1
    logits_BV = model(torch.tensor([[7, 8]])).logits[:, -1]
    expected = sampling_logprobs(logits_BV, sampling)[0].exp()
    assert (counts / 400 - expected).abs().max() < 5 * 0.025
