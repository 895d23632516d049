"""Checks of every rollout back end against a full forward pass of the trainer's model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory


def load_trainer_model(folder: Path) -> PreTrainedModel:
    """The folder's model in float32, as a trainer holds it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def rounded_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The float32 model whose weights are the nearest bfloat16 values."""
    copied = copy.deepcopy(model)
    # Not model.bfloat16(), which rounds the rotary frequencies too.
    for weight in copied.parameters():
        weight.copy_(weight.bfloat16())
    return copied


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int, scale: float = 0.05) -> None:
    """Moves every weight, as an optimizer step would, only further."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def trained_copy(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> PreTrainedModel:
    """The model with other weights."""
    copied = copy.deepcopy(model)
    for name, weight in weights:
        copied.get_parameter(name).copy_(weight)
    return copied


def set_stop_tokens(folder: Path, stop_tokens: Sequence[int]) -> None:
    """Names the tokens that end a completion in the folder's generation config."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    config["eos_token_id"] = list(stop_tokens)
    path.write_text(json.dumps(config))


def make_requests(num_rows: int, seed: int = 0) -> list[RolloutRequest]:
    """Prompts of 2 to 9 tokens, so that rows are padded or scheduled unevenly."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for row in range(num_rows):
        length = 2 + row % 8
        tokens = torch.randint(4, 512, (length,), generator=generator).tolist()
        requests.append(
            RolloutRequest(row=row, prompt_tokens=tokens, seed=1_000_003 * (seed + 1) + row)
        )
    return requests


def short_requests(vocab_size: int) -> list[RolloutRequest]:
    """Six prompts of 2 to 7 tokens, for models of small vocabularies."""
    generator = torch.Generator().manual_seed(5)
    return [
        RolloutRequest(
            row=row,
            prompt_tokens=torch.randint(4, vocab_size, (2 + row,), generator=generator).tolist(),
            seed=row,
        )
        for row in range(6)
    ]


@torch.no_grad()
def score(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    trajectories: Iterable[RolloutTrajectory],
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-prob of each completion token, one row at a time and without padding."""
    prompts = {request.row: list(request.prompt_tokens) for request in requests}
    scores = []
    for trajectory in trajectories:
        prompt, completion = prompts[trajectory.row], list(trajectory.completion_tokens)
        logits_TV = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
        logprobs_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        scores.append(logprobs_TV.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(scores)


def logprob_differences(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    trajectories: Iterable[RolloutTrajectory],
    temperature: float = 1.0,
) -> torch.Tensor:
    """abs(sampler - trainer) of each completion token."""
    trajectories = list(trajectories)
    sampled = torch.tensor([value for t in trajectories for value in t.logprobs])
    return (sampled.double() - score(model, requests, trajectories, temperature)).abs()


def trainer_checksums(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Checksums that a sampler of this type must report after a whole update."""
    return {name: tensor_checksum(tensor.to(dtype)) for name, tensor in model.state_dict().items()}


def tokens_by_row(trajectories: Iterable[RolloutTrajectory]) -> dict[int, list[int]]:
    """Completions by row, whatever order they arrived in."""
    return {trajectory.row: list(trajectory.completion_tokens) for trajectory in trajectories}


def versions_of(trajectories: Iterable[RolloutTrajectory]) -> set[int]:
    """Versions that sampled any token of them."""
    trajectories = list(trajectories)
    for trajectory in trajectories:
        assert len(trajectory.policy_versions) == len(trajectory.completion_tokens)
    return {version for trajectory in trajectories for version in trajectory.policy_versions}
