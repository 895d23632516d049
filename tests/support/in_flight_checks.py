"""Weights in the middle of a generation: hooks, and scores by the version of each token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from rolemesh.engine.experience import Experience
from rolemesh.services.rollout.servicers import RolloutRole


def at_steps(actions: Mapping[int, Callable[[], None]]) -> Callable[[], None]:
    """A hook that acts before the given decoding steps, counted from 0."""
    steps = iter(range(10_000))

    def between_steps() -> None:
        action = actions.get(next(steps))
        if action is not None:
            action()

    return between_steps


def halt_at(role: RolloutRole, step: int) -> asyncio.Event:
    """Stops the role's next generation before a decoding step until weights are delivered.

    So a test does not depend on the clock. Call it on the loop; it is told when the step is near.
    """
    look = role.backend.between_steps
    assert look is not None
    arrived, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        loop.call_soon_threadsafe(arrived.set)
        while role.deliveries.is_empty:
            time.sleep(0.001)

    halts = at_steps({step: wait})

    def between_steps() -> None:
        halts()
        look()

    role.backend.between_steps = between_steps
    return arrived


@torch.no_grad()
def scores_by_version(
    models: Mapping[int, PreTrainedModel],
    prompt: Sequence[int],
    completion: Sequence[int],
    versions: Sequence[int],
) -> torch.Tensor:
    """float64 [len(completion)]: log-prob of each token under its own version alone.

    A full forward pass of each version over all tokens: nothing of another version enters.
    """
    tokens = torch.tensor([[*prompt, *completion]])
    scores = torch.empty(len(completion), dtype=torch.float64)
    for version in set(versions):
        logprobs_TV = models[version](tokens).logits[0, len(prompt) - 1 : -1].double()
        logprobs_T = logprobs_TV.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        mine = torch.tensor([other == version for other in versions])
        scores[mine] = logprobs_T[mine]
    return scores


def rows_with_versions(rows: Experience) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Prompt, completion and versions of each row of a sampled batch."""
    lengths = rows["tokens"].lengths().tolist()
    counts = rows["policy_versions"].lengths().tolist()
    for tokens, versions, prompt in zip(
        rows["tokens"].values.split(lengths),
        rows["policy_versions"].values.split(counts),
        rows["prompt_lengths"].values.tolist(),
        strict=True,
    ):
        yield tokens[:prompt].tolist(), tokens[prompt:].tolist(), versions.tolist()


def largest_difference(models: Mapping[int, PreTrainedModel], rows: Experience) -> float:
    """Largest abs(sampler - full forward of the token's version) of a sampled batch."""
    scores = torch.cat([scores_by_version(models, *row) for row in rows_with_versions(rows)])
    return float((rows["logprobs"].values.double() - scores).abs().max())
