"""Routes of sessions: they are opened, read, given their reward and ended here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from rolemesh.engine.sessions.store import OpenSession, SessionRules, Sessions
from rolemesh.engine.specs import SamplingSpec

router = APIRouter(prefix="/sessions")

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Drawing(_Message):
    """How the tokens of a session are drawn, whatever its calls ask for."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; 0 takes the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens with this probability together."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Draw from so many likeliest tokens; None: from all."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 1 << 20
    """Longest completion of one call."""

    def sampling(self) -> SamplingSpec:
        """The same as the sampler knows it."""
        return SamplingSpec(
            temperature=self.temperature or 1.0,
            greedy=self.temperature == 0,
            top_p=self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            max_new_tokens=self.max_new_tokens,
        )


class OpenRequest(_Message):
    """What a session is opened with."""

    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """Its name; left out: a random one."""
    max_calls: Annotated[int, Field(ge=1)] | None = None
    """Calls, at most."""
    max_sampled_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that are sampled in all calls together, at most."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Its calls have seeds derived from this one, unless they bring their own and there is no
    `drawing`."""
    drawing: Drawing | None = None
    """How its tokens are drawn; left out: as each call asks."""


class OpenedSession(_Message):
    """A new session."""

    session_id: str
    base_url: str
    """What a client of OpenAI's protocol is given."""
    key: str
    """Opens this session alone."""


class EndRequest(_Message):
    """What a session ends with."""

    reward: Finite | None = None
    """Of the session as a whole."""
    call_rewards: dict[int, Finite] = Field(default_factory=dict)
    """Of single calls, by number, in the order in which they ended."""


class CallView(_Message):
    """A call, as it was sampled."""

    number: int
    parent: int | None
    """The call whose prompt and sampled tokens this one's prompt begins with."""
    num_prompt_tokens: int
    added_tokens: list[int]
    """Of the prompt, behind those of the parent."""
    sampled_tokens: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    """Of the weights that sampled each token."""
    finish_reason: str
    is_trained: bool
    reward: float | None


class BranchView(_Message):
    """A row: a path through the session's tree."""

    calls: list[int]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: str
    reward: float | None
    """Sum of its calls' rewards and the session's; None where there are none."""


class SessionView(_Message):
    """A session."""

    session_id: str
    state: Literal["open", "ended"]
    reward: float | None
    num_running: int
    """Calls that have not ended."""
    calls: list[CallView]
    branches: list[BranchView]


@router.post("", status_code=201)
async def open_session(given: OpenRequest, request: Request) -> OpenedSession:
    """Opens a session. Asks for the endpoint's key."""
    _check_owner(request)
    rules = SessionRules(
        sampling=None if given.drawing is None else given.drawing.sampling(),
        seed=given.seed,
        max_calls=given.max_calls,
        max_sampled_tokens=given.max_sampled_tokens,
    )
    opened = _sessions(request).open(rules, session_id=given.session_id)
    base_url = f"{request.app.state.url}/sessions/{opened.session_id}/v1"
    return OpenedSession(session_id=opened.session_id, base_url=base_url, key=opened.key)


@router.get("/{session_id}")
async def read_session(session_id: str, request: Request) -> SessionView:
    """All calls of a session, and the rows that they make."""
    opened = _of(session_id, request)
    session = opened.session
    return SessionView(
        session_id=session_id,
        state=opened.state,
        reward=opened.reward,
        num_running=opened.num_running,
        calls=[
            CallView(
                number=call.number,
                parent=call.parent,
                num_prompt_tokens=call.num_prompt_tokens,
                added_tokens=list(call.added_tokens),
                sampled_tokens=list(call.sampled_tokens),
                logprobs=list(call.logprobs),
                policy_versions=call.policy_versions(),
                finish_reason=call.finish_reason,
                is_trained=call.is_trained,
                reward=session.rewards.get(call.number),
            )
            for call in session.calls
        ],
        branches=[
            BranchView(
                calls=list(branch.calls),
                prompt_tokens=branch.prompt_tokens,
                completion_tokens=branch.completion_tokens,
                loss_mask=branch.loss_mask,
                logprobs=branch.logprobs,
                policy_versions=branch.policy_versions,
                finish_reason=branch.finish_reason,
                reward=_total(opened.reward, session.reward_of(branch)),
            )
            for branch in session.branches()
        ],
    )


@router.post("/{session_id}/end")
async def end_session(session_id: str, given: EndRequest, request: Request) -> dict[str, Any]:
    """Ends a session, and gives it its reward."""
    opened = _of(session_id, request)
    if opened.num_running:
        raise HTTPException(
            409,
            f"session {session_id} has {opened.num_running} calls that have not ended: wait for "
            "their answers, or end their connections",
        )
    _sessions(request).end(opened, reward=given.reward, call_rewards=given.call_rewards)
    return {"session_id": session_id, "state": opened.state}


@router.delete("/{session_id}", status_code=204)
async def forget_session(session_id: str, request: Request) -> None:
    """Drops a session with all its calls. Asks for the endpoint's key."""
    _check_owner(request)
    _sessions(request).forget(_of(session_id, request))


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def _check_owner(request: Request) -> None:
    if not request.state.is_owner:
        raise HTTPException(403, "a session's key opens that session alone: give the endpoint's")


def _of(session_id: str, request: Request) -> OpenSession:
    opened = _sessions(request).of_id(session_id)
    if not request.state.is_owner and request.state.opened is not opened:
        raise HTTPException(403, f"the key given is not that of session {session_id}")
    if opened is None:
        raise HTTPException(404, f"there is no session {session_id}, or none any more")
    return opened


def _total(*rewards: float | None) -> float | None:
    given = [reward for reward in rewards if reward is not None]
    return math.fsum(given) if given else None
