"""What an agent says when its trajectory is over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.images.openai_parts import with_urls
from rolemesh.engine.images.prompt_images import data_url
from rolemesh.engine.sessions.logs import AgentLog


class AgentFailedError(RuntimeError):
    """A trajectory came to nothing; the text says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWork:
    """One trajectory, as its agent is told of it."""

    prompt: Prompt
    """The row of the data."""
    base_url: str
    """Of the session, for clients of OpenAI's protocol."""
    session_url: str
    """Of the session itself: /end takes its reward."""
    api_key: str
    """Opens this session alone."""
    model: str
    """What the policy is called."""
    log: AgentLog = field(default_factory=AgentLog)
    """Gets what the agent writes, also of a trajectory that fails."""

    def task(self) -> dict[str, Any]:
        """The row as JSON: prompt_id, text, messages, answer, and the columns in metadata.

        Images stand in the messages as data URLs, so that an agent passes these on as they are.
        """
        row = self.prompt
        return {
            "prompt_id": row.prompt_id,
            "text": row.text,
            "messages": with_urls(row.messages, [data_url(image.data) for image in row.images]),
            "answer": row.answer,
            "metadata": json.loads(row.metadata or "{}"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What an agent gave."""

    reward: float | None = None
    """Of the trajectory; None: it gave none."""
    call_rewards: Mapping[int, float] = field(default_factory=dict)
    """Of single calls, by number, in the order in which they ended."""


def result_of(said: Any, who: str, log: AgentLog) -> AgentResult:
    """Reads what an agent said: a number, an object with `reward` and `call_rewards`, or nothing.

    The object may have a `log` besides, a text for people.

    Args:
        said: JSON value.
        who: Said it, for errors.
        log: Gets the text.

    Raises:
        AgentFailedError: It is something else.
    """
    if said is None:
        return AgentResult()
    if isinstance(said, int | float) and not isinstance(said, bool):
        return AgentResult(reward=_finite(said, "reward", who))
    if not isinstance(said, Mapping):
        raise AgentFailedError(
            f'{who} answered {said!r:.200}: give a number, or {{"reward": x, "call_rewards": '
            "{number: x}}"
        )
    if unknown := [name for name in said if name not in ("reward", "call_rewards", "log")]:
        raise AgentFailedError(
            f"{who} answered with {unknown[0]!r}, which nothing reads: give reward, call_rewards "
            "and log alone"
        )
    text = said.get("log")
    if text is not None and not isinstance(text, str):
        raise AgentFailedError(f"{who} answered log {text!r:.200}: give a text")
    log.take(text or "")
    rewards = said.get("call_rewards") or {}
    if not isinstance(rewards, Mapping):
        raise AgentFailedError(
            f"{who} answered call_rewards {rewards!r:.200}: give {{number: reward}}"
        )
    reward = said.get("reward")
    return AgentResult(
        reward=None if reward is None else _finite(reward, "reward", who),
        call_rewards={
            _number(number, who): _finite(value, f"call_rewards of call {number}", who)
            for number, value in rewards.items()
        },
    )


def _number(given: Any, who: str) -> int:
    try:
        return int(given)
    except (TypeError, ValueError) as error:
        raise AgentFailedError(
            f"{who} answered a reward for call {given!r}: number calls from 0, in the order in "
            "which they ended"
        ) from error


def _finite(given: Any, what: str, who: str) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not math.isfinite(given):
        raise AgentFailedError(f"{who} answered {what} {given!r:.200}: give a finite number")
    return float(given)
