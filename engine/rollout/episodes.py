"""Episodes: a policy and an environment take turns until the environment, or the budget, ends it.

Tokens in, tokens out: what was sampled is never encoded again. What the environment says is encoded
alone (text as it is, messages as the chat template renders them), put behind the turn, and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.data.rendering import ChatTokenizer, Renderer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.environments.base import (
    Environment,
    EnvironmentFailedError,
    TurnEnd,
    observation_of,
    opening_of,
    raised,
)
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.base import RolloutBackend, generated
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import EnvironmentSpec, SamplingSpec
from rolemesh.engine.specs.environments import TurnLimits

STOP_WINDOW_TOKENS = 8
"""Tokens without text that may stand inside a stop text while it is looked for as tokens come."""

_CPU = torch.device("cpu")

_USER_ERRORS = (Exception, SystemExit)
"""What an environment, a user's code, may raise. SystemExit would end the service without a word.
"""


@dataclass(slots=True, kw_only=True)
class Episode:
    """One trajectory, as it becomes a row of a batch."""

    row: int
    """Row of the batch, as requested."""
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
    )


@dataclass(slots=True, kw_only=True)
class _Running:
    """An episode in the making."""

    request: RolloutRequest
    prompt: Prompt
    environment: Environment
    stop: tuple[str, ...]
    """Texts that end a turn."""
    budget: int
    """Tokens that the whole completion may have."""
    episode: Episode

    @property
    def room(self) -> int:
        """Tokens that the completion may still have."""
        return self.budget - len(self.episode.completion_tokens)


class EpisodeRunner:
    """Plays episodes over a rollout back end, all running ones turn by turn.

    The budget of a row, `sampling.max_new_tokens` and what the model's length leaves, counts all
    tokens of its completion, those of the environment included: it bounds what a trainer has to
    hold. A turn that it cuts is the last; one that `max_turn_tokens` cuts is not. An observation is
    put in if a token can follow it; otherwise the episode ends as one that was cut. What the
    environment says last is not put in, since nothing learns from it.

    Turn 0 of a row has the row's own seed, so that an environment of one turn changes no token;
    turn t after it has derive_seed(row seed, t).

    Example: with a calculator, prompt tokens P and the turns "<calc>2+2</calc>" and " 4.", the
    completion is the tokens of "<calc>2+2</calc>", "<result>4</result>" and " 4.", of which the
    second part has loss_mask 0 and log-probs 0; the second turn was sampled behind P and both.

    Ranks of one generation replica sample the same rows. The first of them asks the environment and
    tells the others, so that a tool is used once and its answer need not be the same twice.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        *,
        sandbox: Sandbox | None = None,
        group: RankGroup | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """Loads the environment's class.

        Args:
            spec: Which environment, and its bounds.
            tokenizer: Of the policy.
            max_model_len: Longest sequence of the sampler, in tokens.
            sandbox: Where a user's class runs; None: in this process.
            group: Ranks of this generation replica; None where the rank is alone.
            device: Where the group's messages lie.

        Raises:
            UserCodeError: A user's class cannot be loaded.
        """
        self._group = group if group is not None and group.size > 1 else None
        self._device = device
        self._spec = spec
        self._turn_limit = spec.max_turn_tokens if isinstance(spec, TurnLimits) else None
        self._renderer = Renderer(tokenizer)
        self._make = environment_maker(spec, sandbox)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def run(
        self,
        backend: RolloutBackend,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
    ) -> Generator[Episode, None, None]:
        """Plays one episode a request, yielding each as it ends.

        Args:
            backend: Draws the tokens.
            prompts: Of the requests, in their order.
            requests: First turns.
            sampling: How to draw.

        Raises:
            EnvironmentFailedError: Names prompt and turn.
            PromptTooLongError: As the back end raises it, before anything is sampled.
        """
        running = [
            self._begin(request, prompt, sampling, backend.policy_version)
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        while running:
            by_row = {one.request.row: one for one in running}
            turns = [self._turn(one) for one in running]
            going_on: list[_Running] = []
            with generated(backend, turns, sampling) as trajectories:
                for trajectory in trajectories:
                    one = by_row.pop(trajectory.row)
                    if self._take(one, trajectory, backend.policy_version):
                        yield one.episode
                    else:
                        going_on.append(one)
            if by_row:
                raise RuntimeError(
                    f"the rollout back end left {len(by_row)} of {len(turns)} turns unfinished"
                )
            # What a turn is asked with must not depend on the order in which others ended.
            running = sorted(going_on, key=lambda one: one.request.row)

    def _begin(
        self, request: RolloutRequest, prompt: Prompt, sampling: SamplingSpec, version: int
    ) -> _Running:
        try:
            environment = self._make()
        except _USER_ERRORS as error:
            raise _failure("the environment", prompt, request.row, 0, raised(error)) from error
        stop: Any = environment.stop
        is_one = isinstance(stop, str) or not isinstance(stop, Iterable)
        if is_one or not all(isinstance(text, str) and text for text in stop):
            kind = type(environment).__name__
            what = f"stop is {stop!r}: give a tuple of texts that are not empty"
            raise _failure(kind, prompt, request.row, 0, what)
        one = _Running(
            request=request,
            prompt=prompt,
            environment=environment,
            stop=tuple(stop),
            # A prompt that is too long itself is the back end's to refuse.
            budget=max(1, min(sampling.max_new_tokens, self._max_model_len - len(prompt.tokens))),
            episode=Episode(row=request.row),
        )

        text = self._heard(one, lambda: opening_of(environment, prompt))
        if text and not self._put_in(one, self._encoded(text), version):
            raise _failed(
                one,
                f"the text of reset leaves no room for a turn within {one.budget} tokens: raise "
                "max_new_tokens and rollout.max_model_len, or lower "
                "environment.max_observation_tokens",
            )
        return one

    def _turn(self, one: _Running) -> RolloutRequest:
        seed, number = one.request.seed, one.episode.num_turns
        return RolloutRequest(
            row=one.request.row,
            prompt_tokens=[*one.prompt.tokens, *one.episode.completion_tokens],
            seed=derive_seed(seed, number) if number else seed,
            max_new_tokens=one.room
            if self._turn_limit is None
            else min(one.room, self._turn_limit),
            is_complete=self._stop_check(one.stop),
        )

    def _take(self, one: _Running, trajectory: RolloutTrajectory, version: int) -> bool:
        """Adds a turn and what the environment says to it; True when that was the last one."""
        episode, tokens = one.episode, list(trajectory.completion_tokens)
        cut_at = self.turn_end(tokens, one.stop)
        end: TurnEnd = "length" if trajectory.finish_reason == "length" else "end_token"
        if cut_at is not None:
            end, tokens = "stop_text", tokens[:cut_at]
        episode.completion_tokens += tokens
        episode.loss_mask += [True] * len(tokens)
        episode.logprobs += trajectory.logprobs[: len(tokens)]
        episode.policy_versions += trajectory.policy_versions[: len(tokens)]

        def step() -> tuple[str, list[dict[str, Any]], float, bool]:
            said = observation_of(one.environment, self._text(tokens), end)
            messages = [dict(message) for message in said.messages]
            return said.text, messages, float(said.reward), bool(said.done)

        text, messages, reward, is_done = self._heard(one, step)
        episode.num_turns += 1
        episode.reward += reward
        is_cut = end == "length"
        # A turn that its own limit cut is answered; if there is no more room, that shows below.
        is_over = is_cut and (self._turn_limit is None or len(tokens) < self._turn_limit)
        if is_over or is_done or episode.num_turns == self._spec.max_turns:
            episode.finish_reason = "length" if is_cut else "stop"
            return True
        closed_by = tokens[-1] if end == "end_token" else None
        said = self._rendered(one, messages, closed_by) if messages else self._encoded(text)
        if not self._put_in(one, said, version):
            episode.finish_reason = "length"
            return True
        return False

    def _encoded(self, text: str) -> list[int]:
        """The first tokens of a text of the environment, as many as one observation may have."""
        return self._renderer.tokens(text)[: self._spec.max_observation_tokens] if text else []

    def _rendered(
        self, one: _Running, messages: Sequence[Mapping[str, Any]], closed_by: int | None
    ) -> list[int]:
        """Messages as the chat template continues the turn with them, their contents shortened."""
        left, shown = self._spec.max_observation_tokens, []
        for message in messages:
            tokens = self._renderer.tokens(message["content"])
            kept, content = tokens[:left], message["content"]
            if len(kept) < len(tokens):
                # The cut may go through a character.
                content = self._tokenizer.decode(kept).rstrip("\N{REPLACEMENT CHARACTER}")
            shown.append({**message, "content": content})
            left -= len(kept)
        try:
            return self._renderer.continuation(shown, end_token=closed_by)
        except DataInvalidError as error:
            raise _failed(one, str(error)) from error

    def _put_in(self, one: _Running, tokens: Sequence[int], version: int) -> bool:
        """Appends what the environment says, masked; False when no token could follow it."""
        if len(tokens) >= one.room:
            return False
        episode = one.episode
        episode.completion_tokens += tokens
        episode.loss_mask += [False] * len(tokens)
        episode.logprobs += [0.0] * len(tokens)
        episode.policy_versions += [version] * len(tokens)
        return True

    def turn_end(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """Number of the first tokens whose text holds a stop text; None when it never does.

        Text only grows at its end, so once it holds one it goes on holding it: halving finds it.
        """
        if not stop or not self._holds(tokens, stop):
            return None
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self._holds(tokens[:middle], stop):
                high = middle
            else:
                low = middle + 1
        return low

    def _stop_check(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Tells a back end when to stop, looking at the last tokens alone: it is asked often.

        Where it misses one, `turn_end` finds it.
        """
        if not stop:
            return None
        # A token that has text has a byte of it at least.
        window = max(len(text.encode()) for text in stop) + STOP_WINDOW_TOKENS

        def is_complete(tokens: Sequence[int]) -> bool:
            return self._holds(tokens[-window:], stop) and self._holds(tokens, stop)

        return is_complete

    def _holds(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        decoded = self._text(tokens)
        return any(text in decoded for text in texts)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _heard(self, one: _Running, ask: Callable[[], Any]) -> Any:
        """What the environment says, asked here or by the first rank of the replica. JSON-able."""
        if self._group is None:
            return _asked(one, ask)
        facts: dict[str, Any] = {}
        if self._group.index == 0:
            try:
                facts = {"said": _asked(one, ask)}
            except EnvironmentFailedError as error:
                gather_facts({"error": str(error)}, self._group, self._device)
                raise
        told = gather_facts(facts, self._group, self._device)[0]
        if "error" in told:
            raise EnvironmentFailedError(told["error"])
        return told["said"]


def _asked(one: _Running, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except _USER_ERRORS as error:
        # Whatever it raises is told with the row that it happened to.
        raise _failed(one, raised(error)) from error


def _failed(one: _Running, what: str) -> EnvironmentFailedError:
    kind, turn = type(one.environment).__name__, one.episode.num_turns
    return _failure(kind, one.prompt, one.request.row, turn, what)


def _failure(kind: str, prompt: Prompt, row: int, turn: int, what: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{kind} failed for prompt {prompt.prompt_id}, row {row}, turn {turn}: {what}"
    )
