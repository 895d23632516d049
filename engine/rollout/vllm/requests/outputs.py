"""Translation of a vLLM engine's output into a trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rolemesh.engine.rollout.requests import RolloutTrajectory


@dataclass(slots=True)
class Drawn:
    """What a request has drawn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Literal["stop", "length"] | None = None
    """Why it ended."""


def drawn_from(output: Any, row: int, so_far: Drawn | None) -> Drawn:
    """Adds what vLLM says of a request, all of it or what is new, to what was drawn before.

    Args:
        output: VLLM's RequestOutput.
        row: Of the batch.
        so_far: Extended in place; None when the output has everything.

    Raises:
        RuntimeError: Log-probs are not those of the tokens, or not finite.
    """
    (completion,) = output.outputs
    tokens, logprobs = list(completion.token_ids), completion.logprobs
    if logprobs.token_ids != tokens or not all(map(math.isfinite, logprobs.logprobs)):
        raise RuntimeError(
            f"vLLM's log-probs of row {row} do not fit its tokens or are not finite: "
            "look for NaN in the weights"
        )
    drawn = Drawn() if so_far is None else so_far
    drawn.tokens += tokens
    drawn.logprobs += logprobs.logprobs
    drawn.reason = completion.finish_reason
    return drawn


def trajectory_of(
    drawn: Drawn,
    row: int,
    versions: Sequence[tuple[int, int]],
    routes: np.ndarray | None = None,
) -> RolloutTrajectory:
    """What a finished request brought.

    Args:
        drawn: All of it.
        row: Of the batch.
        versions: (first token, policy_version from there on), ascending, from token 0.
        routes: See `RolloutTrajectory.routes`.

    Raises:
        RuntimeError: It was not finished.
    """
    if drawn.reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended the completion of row {row} with {drawn.reason!r}")
    return RolloutTrajectory(
        row=row,
        completion_tokens=drawn.tokens,
        logprobs=drawn.logprobs,
        finish_reason=drawn.reason,
        policy_versions=[
            version
            for (start, version), stop in zip(
                versions, [*(start for start, _ in versions[1:]), len(drawn.tokens)], strict=True
            )
            for _ in range(start, stop)
        ],
        routes=routes,
    )
