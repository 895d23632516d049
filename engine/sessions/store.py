"""The sessions of an endpoint: who may use them, what they may do, and how many are remembered."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.sessions.session import FinishReason, Session, SessionCall, SessionError
from rolemesh.engine.specs import SamplingSpec

SESSION_BYTES = 3000
"""What a session takes without calls."""


class SessionLimitError(SessionError):
    """A session, or the store of them, has reached a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """What holds for all calls of a session, whatever they ask."""

    sampling: SamplingSpec | None = None
    """How tokens are drawn, so that a trainer can recompute their log-probs, and the longest
    completion of one call. None: as each call asks."""
    seed: int | None = None
    """Call n has derive_seed(seed, n): where there is `sampling`, whatever seed it asks for, or all
    samples of an agent that asks for one and the same would be alike; else unless it brings one.
    None: as each call asks."""
    max_calls: int | None = None
    """Calls, at most."""
    max_sampled_tokens: int | None = None
    """Tokens that are sampled in all calls together, at most."""
    may_show_images: bool = True
    """Whether prompts may show images. False: what becomes of the session has no place for them."""


@dataclass(slots=True, kw_only=True)
class OpenSession:
    """A session with what belongs to it. Owner: its store, whose lock is held for all changes."""

    session: Session
    key: str
    """Opens this session alone."""
    rules: SessionRules
    state: Literal["open", "ended"] = "open"
    reward: float | None = None
    """Of the session as a whole; None: it was given none."""
    num_begun: int = 0
    """Calls that have begun."""
    num_running: int = 0
    """Calls that have begun and not ended."""
    num_sampled: int = 0
    """Tokens that were sampled."""

    @property
    def session_id(self) -> str:
        """Its name."""
        return self.session.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What one call of a session may do."""

    sampling: SamplingSpec | None
    seed: int | None
    max_new_tokens: int | None
    """Tokens that it may sample, at most; None: as it asks."""


class Sessions:
    """Sessions by id and by key. Thread-safe.

    Invariant: it holds at most max_sessions and about max_bytes. Sessions that have ended make room
    for new ones, the oldest first; open ones are never forgotten.

    Example::

        opened = sessions.open()
        rules = sessions.begin(opened)
        call = sessions.end_call(opened, prompt, sampled, logprobs, [(0, 3)], finish_reason="stop")
        sessions.end(opened, reward=1.0)
    """

    def __init__(self, *, max_sessions: int, max_bytes: int) -> None:
        """Begins empty."""
        self._lock = threading.RLock()
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Memory that sessions take, about."""
        return self._num_bytes

    def open(
        self, rules: SessionRules | None = None, *, session_id: str | None = None
    ) -> OpenSession:
        """A new session.

        Args:
            rules: Of its calls; None: there are none.
            session_id: Its name; None: a random one.

        Raises:
            SessionLimitError: There is no room.
            SessionError: There is one of that name.
        """
        with self._lock:
            name = secrets.token_urlsafe(12) if session_id is None else session_id
            if name in self._by_id:
                raise SessionError(f"session_id is {name!r}, which is taken: give another one")
            self._make_room(self._max_sessions - 1)
            opened = OpenSession(
                session=Session(name), key=secrets.token_urlsafe(24), rules=rules or SessionRules()
            )
            self._by_id[name] = self._by_key[opened.key] = opened
            self._num_bytes += SESSION_BYTES
            return opened

    def of_id(self, session_id: str) -> OpenSession | None:
        """The session of that name; None: there is none, or none any more."""
        return self._by_id.get(session_id)

    def of_key(self, key: str) -> OpenSession | None:
        """The session that a key opens."""
        return self._by_key.get(key)

    def check(self, opened: OpenSession, number: int = 1) -> None:
        """Refuses what `begin` would refuse, before anything of a call is answered.

        A streamed answer says so with its status only as long as it has not begun.

        Raises:
            SessionError: As `begin`.
        """
        with self._lock:
            self._left(opened, number)

    def begin(self, opened: OpenSession, number: int = 1) -> CallRules:
        """Counts a call that begins, and says what it may do.

        Args:
            opened: The session.
            number: Completions that the call asks for.

        Raises:
            SessionLimitError: The session may make no more calls, has no tokens left, or there is
                no memory for more.
            SessionError: It has ended.
        """
        with self._lock:
            rules, left = opened.rules, self._left(opened, number)
            sampling = rules.sampling
            if sampling is not None:
                left = min(sampling.max_new_tokens, left or sampling.max_new_tokens)
            seed = None if rules.seed is None else derive_seed(rules.seed, opened.num_begun)
            opened.num_begun += number
            opened.num_running += number
            return CallRules(sampling=sampling, seed=seed, max_new_tokens=left)

    def _left(self, opened: OpenSession, number: int) -> int | None:
        """Tokens for each completion of a call by the session's bound; None: it has none.

        Raises what `begin` does.
        """
        self._make_room(self._max_sessions)
        rules = opened.rules
        if opened.state != "open":
            raise SessionError(
                f"session {opened.session_id} has ended: open a new one for further calls"
            )
        if rules.max_calls is not None and opened.num_begun + number > rules.max_calls:
            raise SessionLimitError(
                f"session {opened.session_id} has made {opened.num_begun} calls, and may make "
                f"{rules.max_calls}: end it (max_turns)"
            )
        if rules.max_sampled_tokens is None:
            return None
        left = (rules.max_sampled_tokens - opened.num_sampled) // number
        if left < 1:
            raise SessionLimitError(
                f"session {opened.session_id} has sampled {opened.num_sampled} tokens, and "
                f"may sample {rules.max_sampled_tokens}: end it (max_tokens)"
            )
        return left

    def end_call(
        self,
        opened: OpenSession,
        prompt_tokens: Sequence[int],
        sampled_tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[tuple[int, int]],
        *,
        finish_reason: FinishReason,
        is_trained: bool = True,
        images: Sequence[PromptImage] = (),
    ) -> SessionCall:
        """Keeps a call that has ended; see `Session.add`."""
        with self._lock:
            before = opened.session.num_bytes
            call = opened.session.add(
                prompt_tokens,
                sampled_tokens,
                logprobs,
                versions,
                finish_reason=finish_reason,
                is_trained=is_trained,
                images=images,
            )
            opened.num_running -= 1
            opened.num_sampled += len(sampled_tokens)
            if opened.session_id in self._by_id:
                self._num_bytes += opened.session.num_bytes - before
            return call

    def drop_call(self, opened: OpenSession, number: int = 1) -> None:
        """Forgets calls that came to nothing: their client has gone, or they failed."""
        with self._lock:
            opened.num_running -= number

    def end(
        self,
        opened: OpenSession,
        *,
        reward: float | None = None,
        call_rewards: dict[int, float] | None = None,
    ) -> None:
        """Ends a session: it makes no more calls, and its branches are what they are.

        Raises:
            SessionError: It has ended already, or a reward is of no call of it.
        """
        with self._lock:
            if opened.state != "open":
                raise SessionError(
                    f"session {opened.session_id} has ended already: a reward is given once"
                )
            opened.session.set_rewards(call_rewards or {})
            opened.reward = reward
            opened.state = "ended"

    def forget(self, opened: OpenSession) -> None:
        """Drops a session, whatever its state; no call of it is kept any more."""
        with self._lock:
            if self._by_id.pop(opened.session_id, None) is None:
                return
            del self._by_key[opened.key]
            self._num_bytes -= SESSION_BYTES + opened.session.num_bytes
            opened.state = "ended"

    def _make_room(self, most_sessions: int) -> None:
        while len(self._by_id) > most_sessions or self._num_bytes >= self._max_bytes:
            oldest = next((one for one in self._by_id.values() if one.state == "ended"), None)
            if oldest is None:
                raise SessionLimitError(
                    f"{len(self._by_id)} sessions are open and take {self._num_bytes >> 20} MiB; "
                    f"endpoint.max_sessions is {self._max_sessions} and endpoint.max_memory_mib "
                    f"{self._max_bytes >> 20}: end sessions, or raise them"
                )
            self.forget(oldest)
