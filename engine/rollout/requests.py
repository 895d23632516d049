"""Requests to a back end, checks of them, and the trajectories that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rolemesh.engine.data.rows import PromptTooLongError
from rolemesh.engine.images.places import image_starts
from rolemesh.engine.images.processing import ImageTokens
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.specs import SamplingSpec

MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One completion to sample."""

    row: int
    """Row of the batch that the trajectory will fill."""
    prompt_tokens: Sequence[int]
    """Token ids of the prompt, at least one; an image has all of its places."""
    seed: int
    """Seed of this completion alone, 0 <= seed < 2**63."""
    max_new_tokens: int | None = None
    """Longest completion of this request, where that is less than what sampling allows; >= 1."""
    is_complete: Callable[[Sequence[int]], bool] | None = None
    """Asked after each sampled token with all of them so far; True ends the completion, like a stop
    token. It must depend on the tokens alone: ranks that sample together ask each for itself."""
    images: Sequence[PromptImage] = ()
    """Of the prompt, in the order of their places among its tokens."""


class LaterRequests(Protocol):
    """Requests that come while others are sampled: next turns, after what an environment said.

    All ranks of a generation replica ask at the same moments, and get the same.
    """

    def take(self, *, is_idle: bool) -> Sequence[RolloutRequest] | None:
        """Those that have come since the last call; a row may come again once it has ended.

        Args:
            is_idle: Whether nothing is being sampled, so that there is time to wait for a moment.

        Returns:
            The requests, maybe none; None where no more will come.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrajectory:
    """One finished completion."""

    row: int
    """Row of the batch, as requested."""
    completion_tokens: Sequence[int]
    """Token ids as sampled, the stop token included."""
    logprobs: Sequence[float]
    """Natural log-prob of each completion token under the distribution it was drawn from."""
    finish_reason: Literal["stop", "length"]
    """"stop": a stop token, or the request's is_complete, ended it. "length": it was cut."""
    policy_versions: Sequence[int]
    """Version of the weights that sampled each completion token."""
    routes: np.ndarray | None = None
    """uint8 [prompt and completion tokens, W], the experts of each; None: they are not kept."""


def check_requests(
    requests: Sequence[RolloutRequest],
    *,
    max_model_len: int,
    vocab_size: int,
    image_tokens: ImageTokens | None,
) -> None:
    """Refuses requests that cannot be sampled.

    Args:
        requests: All that are asked for together.
        max_model_len: Longest prompt and completion together, in tokens.
        vocab_size: Of the model.
        image_tokens: How images stand among its tokens; None: it takes none.

    Raises:
        PromptTooLongError: A prompt leaves no room for one token.
        ImageInvalidError: Images do not fit the places that a prompt has for them.
        ValueError: A prompt is empty or holds a token outside the vocabulary, a seed or
            max_new_tokens is out of range, two requests name one row, or one has images that the
            model does not take.
    """
    rows: set[int] = set()
    for request in requests:
        length = len(request.prompt_tokens)
        if length == 0:
            raise ValueError(f"prompt of row {request.row} is empty: give at least one token")
        if length >= max_model_len:
            raise PromptTooLongError(
                f"prompt of row {request.row} has {length} tokens, but rollout.max_model_len is "
                f"{max_model_len} and a completion needs at least one: shorten the prompt to "
                f"{max_model_len - 1} tokens or raise rollout.max_model_len"
            )
        low, high = min(request.prompt_tokens), max(request.prompt_tokens)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"prompt of row {request.row} has token {low if low < 0 else high}, outside the "
                f"vocabulary of {vocab_size}: use the tokenizer of the model folder"
            )
        if not 0 <= request.seed < MAX_SEED:
            raise ValueError(
                f"seed of row {request.row} is {request.seed}: give one of 0 to 2**63 - 1"
            )
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens of row {request.row} is {request.max_new_tokens}: give 1 at least"
            )
        if request.images:
            if image_tokens is None:
                raise ValueError(
                    f"prompt of row {request.row} has images, but this model takes none: take a "
                    "model of images and text, or data without images"
                )
            grids = [image.grid for image in request.images]
            image_starts(request.prompt_tokens, grids, image_tokens, row=request.row)
        if request.row in rows:
            raise ValueError(f"row {request.row} is asked for twice: number the rows apart")
        rows.add(request.row)


def drawing_arguments(sampling: SamplingSpec) -> dict[str, float]:
    """How vLLM calls what tokens are drawn by, in its own process and at its servers."""
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


def completion_budget(
    request: RolloutRequest, sampling: SamplingSpec, *, max_model_len: int
) -> int:
    """Most tokens that the request's completion may have, at least one."""
    budget = min(sampling.max_new_tokens, max_model_len - len(request.prompt_tokens))
    return budget if request.max_new_tokens is None else min(budget, request.max_new_tokens)
