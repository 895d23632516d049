"""Episodes: one as it becomes a row of a batch, and one in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, EnvironmentFailedError, TurnEnd
from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory


@dataclass(slots=True, kw_only=True)
class Episode:
    """One trajectory, as it becomes a row of a batch."""

    row: int
    """Row of the batch, as requested."""
    prompt_tokens: Sequence[int] | None = None
    """Token ids of the prompt, where that is not the data's; None: it is."""
    images: Sequence[PromptImage] | None = None
    """Of that prompt, where it is not the data's; None: it is."""
    completion_tokens: list[int] = field(default_factory=list)
    """Token ids: what was sampled, and what the environment said between."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for a token that was sampled, False for one of the environment."""
    logprobs: list[float] = field(default_factory=list)
    """Natural log-prob of each under the distribution it was drawn from; 0 where it was not."""
    policy_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each; of the environment's tokens, that of the sampler
    when they came."""
    finish_reason: Literal["stop", "length"] = "stop"
    """"stop": the policy ended its last turn by itself. "length": it was cut, or nothing more had
    room."""
    reward: float = 0.0
    """Sum of the environment's rewards."""
    num_turns: int = 0
    """Turns of the policy."""
    routes: np.ndarray | None = None
    """uint8 [tokens, W], the experts of each token of prompt and completion up to the last that was
    sampled; None: they are not kept."""
    failure: str = ""
    """Why its environment failed, where that ends the episode alone (`EpisodeRunner`); then it is
    no row."""
    session: str = ""
    """Of agents: what people are told of the session beside this row (`engine.sessions.rows`)."""


def as_episode(trajectory: RolloutTrajectory) -> Episode:
    """An episode of one turn and no environment."""
    return Episode(
        row=trajectory.row,
        completion_tokens=list(trajectory.completion_tokens),
        loss_mask=[True] * len(trajectory.completion_tokens),
        logprobs=list(trajectory.logprobs),
        policy_versions=list(trajectory.policy_versions),
        finish_reason=trajectory.finish_reason,
        num_turns=1,
        routes=trajectory.routes,
    )


def routes_so_far(earlier: np.ndarray | None, turn: np.ndarray | None) -> np.ndarray | None:
    """Those of an episode after a turn, which was given all tokens before it.

    Tokens go on having the routes by which they were sampled, or first read: those before the turn
    were computed anew for it. The last token of a turn is read by the next one alone.

    Args:
        earlier: uint8 [tokens, W] after the turn before; None: there is none.
        turn: uint8 [tokens, W] of the turn.
    """
    if earlier is None or turn is None:
        return turn
    routes = turn.copy()
    routes[: len(earlier) - 1] = earlier[:-1]
    return routes


@dataclass(slots=True, kw_only=True)
class RunningEpisode:
    """An episode in the making."""

    request: RolloutRequest
    prompt: Prompt
    environment: Environment
    stop: tuple[str, ...]
    """Texts that end a turn."""
    budget: int
    """Tokens that the whole completion may have."""
    episode: Episode
    has_begun: bool = False
    """Whether reset has answered."""
    turn: list[int] = field(default_factory=list)
    """Tokens of the last turn."""
    end: TurnEnd = "end_token"
    """Why it ended."""

    @property
    def room(self) -> int:
        """Tokens that the completion may still have."""
        return self.budget - len(self.episode.completion_tokens)

    def put_in(self, tokens: Sequence[int], version: int) -> bool:
        """Appends what the environment says, masked; False when no token could follow it."""
        if len(tokens) >= self.room:
            return False
        episode = self.episode
        episode.completion_tokens += tokens
        episode.loss_mask += [False] * len(tokens)
        episode.logprobs += [0.0] * len(tokens)
        episode.policy_versions += [version] * len(tokens)
        return True


def failure_of(one: RunningEpisode, what: str) -> EnvironmentFailedError:
    """The error where the environment of an episode failed, or asks for what cannot be."""
    kind, turn = type(one.environment).__name__, one.episode.num_turns
    return failure_at(kind, one.prompt, one.request.row, turn, what)


def failure_at(kind: str, prompt: Prompt, row: int, turn: int, what: str) -> EnvironmentFailedError:
    """The same where there is no episode yet; names prompt, row and turn."""
    return EnvironmentFailedError(
        f"{kind} failed for prompt {prompt.prompt_id}, row {row}, turn {turn}: {what}"
    )
