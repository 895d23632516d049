"""Trajectories of agents: each has a session of the endpoint, and its branches become rows."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.messages import harmless, on_one_line
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.agents import Agent, make_agent
from rolemesh.engine.sessions.logs import MAX_LOG_BYTES, AgentLog, last_of
from rolemesh.engine.sessions.results import AgentFailedError, AgentResult, AgentWork
from rolemesh.engine.sessions.rows import told_rows
from rolemesh.engine.sessions.session import Branch, SessionError
from rolemesh.engine.sessions.store import OpenSession, SessionRules, Sessions
from rolemesh.engine.specs import AgentSpec, SamplingSpec

logger = logging.getLogger(__name__)

_BEFORE_BYTES = MAX_LOG_BYTES // 4
"""So much of a log, at most, is of attempts that failed: the one that counts keeps the rest."""

_LAST_CHARACTERS = 2048
"""Of a log stand in an error that ends the generation."""

_NOTE_CHARACTERS = 400
"""Of a failure and of a log in a note, which may have 1,000 with what stands around them."""


class SessionDoor(Protocol):
    """Where sessions are opened: an endpoint."""

    @property
    def sessions(self) -> Sessions:
        """The store of them."""

    @property
    def url(self) -> str:
        """Where it answers."""

    @property
    def model_name(self) -> str:
        """What it calls the policy."""


@dataclass(slots=True, kw_only=True)
class _Trajectory:
    """One trajectory that an agent plays."""

    request: RolloutRequest
    prompt: Prompt
    attempt: int = 0
    log: AgentLog = field(default_factory=AgentLog)
    """What its agent writes."""
    before: str = ""
    """What became of earlier attempts, with the ends of their logs."""
    opened: OpenSession | None = None
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _End:
    """What became of a trajectory's attempt."""

    trajectory: _Trajectory
    result: AgentResult | BaseException


class SessionRunner:
    """Plays trajectories with an agent, which asks the policy through an endpoint.

    Each trajectory has a session: its calls are drawn as the run's sampling says, with seeds that
    derive from the row's, so that an agent that depends on nothing else gets the same tokens again.
    Agents run on threads beside the sampler, `spec.at_once` of them. A session's branches become
    rows of the batch: so many that a trajectory may have several, or, where it is dropped, none.

    A trajectory that fails begins again in a new session where the spec says so; nothing of the
    failed one is trained on.
    """

    def __init__(
        self,
        spec: AgentSpec,
        sandbox: Sandbox | None,
        door: SessionDoor,
        *,
        may_show_images: bool = False,
    ) -> None:
        """Loads the agent.

        Args:
            spec: Which agent, and its bounds.
            sandbox: Where a user's code runs.
            door: Of the sampler that will be given to `run`.
            may_show_images: Whether rows have a place for images.

        Raises:
            UserCodeError: The agent's code cannot be loaded.
        """
        self.gives_reward = spec.gives_reward
        """Whether trajectories come with rewards."""
        self.metrics: dict[str, float] = {}
        """Of the last generation; explained with all others."""
        self.notes: list[str] = []
        """Of the last generation: which trajectories failed, why, and the ends of their logs. Those
        that are left out come first."""
        self._spec = spec
        self._door = door
        self._may_show_images = may_show_images
        self._agent: Agent = make_agent(spec, sandbox, door.url)

    def run(
        self,
        backend: RolloutBackend,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        alive: Callable[[int], None],
    ) -> Generator[Sequence[Episode], None, None]:
        """Plays one trajectory a request, and yields the rows of each, by request.

        Args:
            backend: Draws the tokens; its endpoint is the door.
            prompts: Of the requests, in their order.
            requests: Row and seed of each trajectory.
            sampling: How to draw; max_new_tokens bounds one call.
            alive: Called again and again with the number of trajectories that have ended; what it
                raises ends the generation.

        Raises:
            EnvironmentFailedError: A trajectory failed, and may not; names prompt and row. Or all
                were dropped.
        """
        playing = _Playing(self, backend, sampling, alive)
        for request, prompt in zip(requests, prompts, strict=True):
            playing.add(_Trajectory(request=request, prompt=prompt))
        try:
            backend.serve(playing.go_on, anew=True)
        finally:
            playing.close()
        kept = list(playing.rows(self._spec.on_failure == "drop_group"))
        self.metrics = {
            "agents/rows": float(sum(map(len, kept))),
            "agents/calls/mean": sum(playing.num_calls.values()) / len(playing.num_calls),
            "agents/again": float(playing.num_again),
            "agents/left_out": float(len(requests) - len(kept)),
        }
        self.notes = [*playing.notes_left_out, *playing.notes_again]
        yield from kept

    def close(self) -> None:
        """Ends what the agent keeps."""
        self._agent.close()

    # --- of one trajectory, on a thread of its own ------------------------------------------

    def play(self, one: _Trajectory, sampling: SamplingSpec) -> AgentResult:
        """Plays one attempt of a trajectory; its session stays as it ended."""
        spec, sessions = self._spec, self._door.sessions
        rules = SessionRules(
            sampling=sampling,
            seed=one.request.seed,
            max_calls=spec.max_turns,
            max_sampled_tokens=spec.max_tokens,
            may_show_images=self._may_show_images,
        )
        opened = one.opened = sessions.open(rules)
        session_url = f"{self._door.url}/sessions/{opened.session_id}"
        result = self._agent.run(
            AgentWork(
                prompt=one.prompt,
                base_url=f"{session_url}/v1",
                session_url=session_url,
                api_key=opened.key,
                model=self._door.model_name,
                log=one.log,
            ),
            one.stopped,
        )
        if opened.state == "open":
            sessions.end(opened, reward=result.reward, call_rewards=dict(result.call_rewards))
        elif result.reward is not None or result.call_rewards:
            raise AgentFailedError(
                "the agent gave its reward twice, to the session and at its end: give it once"
            )
        if opened.session.calls == []:
            raise AgentFailedError(
                "the agent has made no call: let it ask the policy at its base URL (as "
                "OPENAI_BASE_URL, base_url or its client say)"
            )
        if spec.gives_reward and opened.reward is None and not opened.session.rewards:
            raise AgentFailedError(
                "the agent has given no reward: let it give one, or set environment.gives_reward "
                "to false and let the reward role judge"
            )
        return result

    def episodes(self, one: _Trajectory) -> list[Episode]:
        """The rows of a trajectory that has ended well."""
        assert one.opened is not None
        session = one.opened.session
        branches = session.branches()
        if not branches:
            raise AgentFailedError(
                "no call of the agent is to be trained on: one at least must ask the policy by its "
                "own model name, without metadata train"
            )
        told = told_rows(session, branches, attempts=one.attempt + 1, log=_whole_log(one))
        return [
            _episode(one.request.row, branch, one.opened.reward, session.reward_of(branch), row)
            for branch, row in zip(branches, told, strict=True)
        ]


class _Playing:
    """The trajectories of one generation, whose calls come through the endpoint.

    Owned by the compute thread, but for the agents' threads, which put what became of a trajectory
    into a queue.
    """

    def __init__(
        self,
        runner: SessionRunner,
        backend: RolloutBackend,
        sampling: SamplingSpec,
        alive: Callable[[int], None],
    ) -> None:
        self._runner = runner
        self._spec = runner._spec
        self._sampling = sampling
        self._alive = alive
        calls = backend.endpoint_calls
        if calls is None:
            raise RuntimeError(f"{type(backend).__name__} has no endpoint for agents")
        self._calls = calls
        self._waiting: deque[_Trajectory] = deque()
        self._running: dict[int, _Trajectory] = {}
        self._ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._rows: dict[int, list[Episode]] = {}
        self._prompts: dict[int, int] = {}
        """Prompt of each row."""
        self._dropped: dict[int, str] = {}
        """Why, by row."""
        self.num_calls: dict[int, int] = {}
        """Of trajectories that ended well, by row."""
        self.num_again = 0
        """Attempts that failed and were followed by another one."""
        self.notes_again: list[str] = []
        """Of each of them."""
        self.notes_left_out: list[str] = []

    def add(self, one: _Trajectory) -> None:
        """Has a trajectory played when its turn has come."""
        self._waiting.append(one)
        self._prompts[one.request.row] = one.prompt.prompt_id

    def go_on(self) -> bool:
        """Hears what has ended, and begins what waits; False when all trajectories have ended."""
        self._start()
        if self._ends.empty():
            self._calls.wait()
        while True:
            try:
                end = self._ends.get_nowait()
            except queue.Empty:
                break
            self._hear(end)
        self._start()
        self._alive(len(self._rows) + len(self._dropped))
        return bool(self._running or self._waiting)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._spec.at_once:
            one = self._waiting.popleft()
            self._running[one.request.row] = one
            threading.Thread(
                target=self._play, args=(one,), name=f"agent-{one.request.row}", daemon=True
            ).start()

    def _play(self, one: _Trajectory) -> None:
        try:
            self._ends.put(_End(one, self._runner.play(one, self._sampling)))
        except BaseException as error:  # a user's code raises what it likes
            self._ends.put(_End(one, error))
        self._calls.has_come.set()

    def _hear(self, end: _End) -> None:
        one, row = end.trajectory, end.trajectory.request.row
        # One of a generation that was given up is none of these.
        if self._running.pop(row, None) is None:
            return
        failure: BaseException | None = None
        if isinstance(end.result, BaseException):
            failure = end.result
        else:
            try:
                self._rows[row] = self._runner.episodes(one)
                assert one.opened is not None
                self.num_calls[row] = len(one.opened.session.calls)
            except AgentFailedError as error:
                failure = error
        self._forget(one)
        if failure is not None:
            self._failed(one, failure)

    def _failed(self, one: _Trajectory, failure: BaseException) -> None:
        spec, row = self._spec, one.request.row
        what = (
            str(failure) if isinstance(failure, AgentFailedError | SessionError) else repr(failure)
        )
        where = f"the {spec.type} agent failed for prompt {one.prompt.prompt_id}, row {row}"
        if spec.on_failure == "retry" and one.attempt < spec.retries:
            logger.warning("%s, and begins again: %s", where, what)
            self.num_again += 1
            self.notes_again.append(_note(f"{where}, and begins again", what, one))
            failed = f"[attempt {one.attempt + 1} failed: {what}]\n{one.log.text()}\n"
            self._waiting.append(
                _Trajectory(
                    request=one.request,
                    prompt=one.prompt,
                    attempt=one.attempt + 1,
                    before=last_of(harmless(one.before + failed), _BEFORE_BYTES),
                )
            )
            return
        if spec.on_failure in ("fail", "retry"):
            times = f" {one.attempt + 1} times" if one.attempt else ""
            log = one.log.text().rstrip()[-_LAST_CHARACTERS:]
            told = f". Its log ends:\n{log}" if log else ""
            raise EnvironmentFailedError(f"{where}{times}: {what}{told}") from failure
        logger.warning("%s, and is left out: %s", where, what)
        self.notes_left_out.append(_note(f"{where}, and is left out", what, one))
        self._dropped[row] = what

    def rows(self, drops_groups: bool) -> Generator[Sequence[Episode], None, None]:
        """The rows of all trajectories, by request."""
        gone = {self._prompts[row] for row in self._dropped} if drops_groups else set()
        kept = [row for row in sorted(self._rows) if self._prompts[row] not in gone]
        if self._prompts and not kept:
            reasons = Counter(self._dropped.values()).most_common(1)
            raise EnvironmentFailedError(
                f"all {len(self._prompts)} trajectories are left out (environment.on_failure is "
                f"{self._spec.on_failure!r}), most often since: {reasons[0][0]}"
            )
        for row in kept:
            yield self._rows[row]

    def close(self) -> None:
        """Ends all that still runs, and forgets its sessions."""
        self._waiting.clear()
        for one in self._running.values():
            one.stopped.set()
            self._forget(one)
        self._running.clear()

    def _forget(self, one: _Trajectory) -> None:
        if one.opened is not None:
            with contextlib.suppress(SessionError):
                self._runner._door.sessions.forget(one.opened)


def _whole_log(one: _Trajectory) -> str:
    """What the agent wrote, behind what became of its earlier attempts."""
    if not one.before:
        return one.log.text()
    before = f"{one.before}[attempt {one.attempt + 1}]\n"
    return before + last_of(one.log.text(), MAX_LOG_BYTES - len(before.encode()))


def _note(where: str, what: str, one: _Trajectory) -> str:
    """A failure for people, with the last line or so of the agent's log."""
    log = " ".join(one.log.text().split())
    told = f". Its log ends: {log[-_NOTE_CHARACTERS:]}" if log else ""
    return f"{where}: {on_one_line(what, _NOTE_CHARACTERS)}{told}"


def _episode(
    row: int, branch: Branch, reward: float | None, call_rewards: float | None, session: str
) -> Episode:
    return Episode(
        row=row,
        prompt_tokens=branch.prompt_tokens,
        images=branch.images,
        completion_tokens=branch.completion_tokens,
        loss_mask=branch.loss_mask,
        logprobs=branch.logprobs,
        policy_versions=branch.policy_versions,
        finish_reason=branch.finish_reason,
        reward=(reward or 0.0) + (call_rewards or 0.0),
        num_turns=branch.num_turns,
        session=session,
    )
