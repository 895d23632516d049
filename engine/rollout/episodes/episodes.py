"""Episodes: a policy and an environment take turns until the environment, or the budget, ends it.

Tokens in, tokens out: what was sampled is never encoded again. What the environment says is encoded
alone (text as it is, messages as the chat template renders them), put behind the turn, and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.environments.base import (
    EnvironmentFailedError,
    observation_of,
    opening_of,
    raised,
)
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.base import RolloutBackend, generated
from rolemesh.engine.rollout.episodes.environment_calls import EnvironmentCalls
from rolemesh.engine.rollout.episodes.episode import (
    Episode,
    RunningEpisode,
    failure_at,
    failure_of,
    routes_so_far,
)
from rolemesh.engine.rollout.episodes.texts import EpisodeTexts
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec, TurnEnvironmentSpec
from rolemesh.engine.specs.sampling.environments import TurnLimits

_CPU = torch.device("cpu")

_USER_ERRORS = (Exception, SystemExit)
"""What an environment, a user's code, may raise. SystemExit would end the service without a word.
"""


class EpisodeRunner:
    """Plays episodes over a rollout back end, each going on by itself.

    Environments are asked beside the sampler: while one computes, waits or is slow, the turns of
    the others are sampled.

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

    An environment that fails ends the generation: of a batch to learn from no row may be missing.
    With `fails_alone` its episode ends instead, says why, and the others go on.
    """

    def __init__(
        self,
        spec: TurnEnvironmentSpec,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        *,
        sandbox: Sandbox | None = None,
        group: RankGroup | None = None,
        device: torch.device = _CPU,
        fails_alone: bool = False,
    ) -> None:
        """Loads the environment's class.

        Args:
            spec: Which environment, and its bounds.
            tokenizer: Of the policy.
            max_model_len: Longest sequence of the sampler, in tokens.
            sandbox: Where a user's class runs; None: in this process.
            group: Ranks of this generation replica; None where the rank is alone.
            device: Where the group's messages lie.
            fails_alone: Whether an environment that fails ends its own episode alone.

        Raises:
            UserCodeError: A user's class cannot be loaded.
        """
        self.group = group if group is not None and group.size > 1 else None
        """Ranks that sample the same rows; None where there is one."""
        self.device = device
        self.fails_alone = fails_alone
        """Whether an episode may end with `Episode.failure`."""
        self.texts = EpisodeTexts(tokenizer, spec.max_observation_tokens)
        self.answers_at_once = not isinstance(spec, PythonEnvironmentSpec)
        """Whether environments answer without waiting for anything, and so where they are asked."""
        is_confined = sandbox is not None and sandbox.is_there
        # A process of their own keeps to the bound by itself.
        self.call_timeout_s: float | None = None
        if isinstance(spec, PythonEnvironmentSpec) and not is_confined:
            self.call_timeout_s = spec.timeout_s
        self._spec = spec
        self._turn_limit = spec.max_turn_tokens if isinstance(spec, TurnLimits) else None
        self._make = environment_maker(spec, sandbox)
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
            EnvironmentFailedError: Names prompt and turn; not with `fails_alone`.
            PromptTooLongError: As the back end raises it, before anything is sampled.
        """
        turns = _Turns(self, backend)
        for request, prompt in zip(requests, prompts, strict=True):
            try:
                one = self._opened(request, prompt, sampling)
            except EnvironmentFailedError as error:
                if not self.fails_alone:
                    raise
                yield Episode(row=request.row, failure=str(error))
            else:
                turns.begin(one)
        first = turns.take(is_idle=True)
        while first is not None and not first:
            first = turns.take(is_idle=True)
        with generated(backend, first or (), sampling, turns) as trajectories:
            for trajectory in trajectories:
                turns.end(trajectory)
                yield from turns.ended()
        yield from turns.ended()
        if turns.num_open:
            raise RuntimeError(
                f"the rollout back end left {turns.num_open} of {len(requests)} episodes unfinished"
            )

    def _opened(
        self, request: RolloutRequest, prompt: Prompt, sampling: SamplingSpec
    ) -> RunningEpisode:
        try:
            # On the thread of the sampler, with which a process of environments ends.
            environment = self._make()
        except _USER_ERRORS as error:
            raise failure_at("the environment", prompt, request.row, 0, raised(error)) from error
        stop: Any = environment.stop
        is_one = isinstance(stop, str) or not isinstance(stop, Iterable)
        if is_one or not all(isinstance(text, str) and text for text in stop):
            kind = type(environment).__name__
            what = f"stop is {stop!r}: give a tuple of texts that are not empty"
            raise failure_at(kind, prompt, request.row, 0, what)
        return RunningEpisode(
            request=request,
            prompt=prompt,
            environment=environment,
            stop=tuple(stop),
            # A prompt that is too long itself is the back end's to refuse.
            budget=max(1, min(sampling.max_new_tokens, self._max_model_len - len(prompt.tokens))),
            episode=Episode(row=request.row),
        )

    def turn(self, one: RunningEpisode) -> RolloutRequest:
        """The next turn of an episode, to be sampled."""
        seed, number = one.request.seed, one.episode.num_turns
        return RolloutRequest(
            row=one.request.row,
            prompt_tokens=[*one.prompt.tokens, *one.episode.completion_tokens],
            seed=derive_seed(seed, number) if number else seed,
            max_new_tokens=one.room
            if self._turn_limit is None
            else min(one.room, self._turn_limit),
            is_complete=self.texts.stop_check(one.stop),
        )

    def opens(self, one: RunningEpisode, text: str | None, version: int) -> None:
        """Puts in what reset has said.

        Raises:
            EnvironmentFailedError: It leaves no room.
        """
        if text and not one.put_in(self.texts.encoded(text), version):
            raise failure_of(
                one,
                f"the text of reset leaves no room for a turn within {one.budget} tokens: raise "
                "max_new_tokens and rollout.max_model_len, or lower "
                "environment.max_observation_tokens",
            )

    def adds(self, one: RunningEpisode, trajectory: RolloutTrajectory) -> None:
        """Adds a turn, of which the environment has not heard yet."""
        episode, tokens = one.episode, list(trajectory.completion_tokens)
        cut_at = self.texts.turn_end(tokens, one.stop)
        one.end = "length" if trajectory.finish_reason == "length" else "end_token"
        if cut_at is not None:
            one.end, tokens = "stop_text", tokens[:cut_at]
        one.turn = tokens
        episode.completion_tokens += tokens
        episode.loss_mask += [True] * len(tokens)
        episode.logprobs += trajectory.logprobs[: len(tokens)]
        episode.policy_versions += trajectory.policy_versions[: len(tokens)]
        turn = trajectory.routes
        cut = len(trajectory.completion_tokens) - len(tokens)
        episode.routes = routes_so_far(
            episode.routes, turn if turn is None or not cut else turn[:-cut]
        )

    def goes_on(self, one: RunningEpisode, said: Sequence[Any], version: int) -> bool:
        """Adds what the environment has said to a turn; False when that was the last one."""
        text, messages, reward, is_done = said
        episode = one.episode
        episode.num_turns += 1
        episode.reward += reward
        is_cut = one.end == "length"
        # A turn that its own limit cut is answered; if there is no more room, that shows below.
        is_over = is_cut and (self._turn_limit is None or len(one.turn) < self._turn_limit)
        if is_over or is_done or episode.num_turns == self._spec.max_turns:
            episode.finish_reason = "length" if is_cut else "stop"
            return False
        tokens = self.texts.encoded(text)
        if messages:
            closed_by = one.turn[-1] if one.end == "end_token" else None
            try:
                tokens = self.texts.rendered(messages, closed_by)
            except DataInvalidError as error:
                raise failure_of(one, str(error)) from error
        if not one.put_in(tokens, version):
            episode.finish_reason = "length"
            return False
        return True


class _Turns:
    """The episodes of one generation, whose environments are asked beside it.

    Its next turns are the back end's later requests. All ranks of a replica have the same; the
    first alone asks the environments, and tells the others what has come.
    """

    def __init__(self, runner: EpisodeRunner, backend: RolloutBackend) -> None:
        self._runner = runner
        self._backend = backend
        self._open: dict[int, RunningEpisode] = {}
        self._asked: set[int] = set()
        """Rows whose environment has not answered yet."""
        self._calls = EnvironmentCalls(
            are_at_once=runner.answers_at_once, timeout_s=runner.call_timeout_s
        )
        self._next: list[RolloutRequest] = []
        self._ended: list[Episode] = []

    @property
    def num_open(self) -> int:
        """Episodes that have not ended."""
        return len(self._open)

    def begin(self, one: RunningEpisode) -> None:
        """Has the environment of an episode begin."""
        self._open[one.request.row] = one
        self._ask(one, lambda: opening_of(one.environment, one.prompt))

    def end(self, trajectory: RolloutTrajectory) -> None:
        """Takes a turn, and has its environment answer."""
        one = self._open[trajectory.row]
        runner = self._runner
        runner.adds(one, trajectory)

        def step() -> tuple[str, list[dict[str, Any]], float, bool]:
            said = observation_of(one.environment, runner.texts.text(one.turn), one.end)
            messages = [dict(message) for message in said.messages]
            return said.text, messages, float(said.reward), bool(said.done)

        self._ask(one, step)
        if runner.answers_at_once and runner.group is None:
            # What ends here is given before the next step.
            self._next += self._heard(is_idle=False)

    def ended(self) -> Iterator[Episode]:
        """The episodes that have ended since."""
        ended, self._ended = self._ended, []
        yield from ended

    def take(self, *, is_idle: bool) -> Sequence[RolloutRequest] | None:
        """See `LaterRequests`."""
        ready, self._next = self._next, []
        if self._asked:
            ready += self._heard(is_idle=is_idle and not ready)
        elif is_idle and self._open and not ready:
            raise RuntimeError(
                f"the rollout back end has left {self.num_open} turns unfinished: rows "
                f"{sorted(self._open)[:8]}"
            )
        # What a turn is asked with must not depend on the order in which others ended.
        ready.sort(key=lambda request: request.row)
        return ready if ready or self._open else None

    def _ask(self, one: RunningEpisode, ask: Callable[[], Any]) -> None:
        row = one.request.row
        self._asked.add(row)
        group = self._runner.group
        if group is None or group.index == 0:
            self._calls.begin(row, ask)

    def _heard(self, *, is_idle: bool) -> list[RolloutRequest]:
        """The next turns of episodes whose environments have answered."""
        version, runner, ready = self._backend.policy_version, self._runner, []
        for fact in self._facts(is_idle=is_idle):
            one = self._open[fact["row"]]
            self._asked.remove(fact["row"])
            try:
                goes_on = self._takes(one, fact, version)
            except EnvironmentFailedError as error:
                if not runner.fails_alone:
                    raise
                goes_on, one.episode.failure = False, str(error)
            if goes_on:
                ready.append(runner.turn(one))
            else:
                del self._open[one.request.row]
                self._ended.append(one.episode)
        return ready

    def _takes(self, one: RunningEpisode, fact: Mapping[str, Any], version: int) -> bool:
        """Adds what an environment has answered; False when the episode is over."""
        if "error" in fact:
            raise EnvironmentFailedError(fact["error"])
        if one.has_begun:
            return self._runner.goes_on(one, fact["said"], version)
        one.has_begun = True
        self._runner.opens(one, fact["said"], version)
        return True

    def _facts(self, *, is_idle: bool) -> Sequence[Mapping[str, Any]]:
        """What has come, the same on all ranks. JSON-able."""
        group = self._runner.group
        if group is not None and group.index > 0:
            told: Sequence[Mapping[str, Any]] = gather_facts([], group, self._runner.device)[0]
            return told
        answers = self._calls.answers(is_idle=is_idle)
        facts = []
        failure: EnvironmentFailedError | None = None
        for answer in answers:
            if answer.error is None:
                facts.append({"row": answer.row, "said": answer.said})
                continue
            # Whatever it raises is told with the row that it happened to.
            failed = failure_of(self._open[answer.row], raised(answer.error))
            failed.__cause__ = answer.error
            failure = failure or failed
            facts.append({"row": answer.row, "error": str(failed)})
        if group is not None:
            gather_facts(facts, group, self._runner.device)
        if failure is not None and not self._runner.fails_alone:
            raise failure
        return facts
