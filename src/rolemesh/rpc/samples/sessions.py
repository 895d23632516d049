"""What is told of an agent's session beside a row: read from its column, to a message and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rolemesh.v1 import coordinator_pb2

SESSION = "session"
"""Column of a text a row: a JSON object, as rollout.proto says."""

MAX_CALLS = 1024
"""Of each list of calls; further ones are left out."""

MAX_LOG_BYTES = 16 * 2**10
"""A longer log loses its beginning."""

_MOST = 2**31 - 1
_WORDS = {
    "trained": coordinator_pb2.CALL_USE_TRAINED,
    "shared": coordinator_pb2.CALL_USE_SHARED,
    "untrained": coordinator_pb2.CALL_USE_UNTRAINED,
}
_USES = {use: word for word, use in _WORDS.items()}
_NUMBERS = ("branch", "num_branches", "attempts")
_OF_CALL = ("number", "num_added_tokens", "num_sampled_tokens")


def read_session(
    encoded: bytes, prompt_id: int, sample_index: int
) -> coordinator_pb2.SampledSession:
    """The session of a row, as its column tells it.

    Args:
        encoded: Of the row.
        prompt_id: Of the row.
        sample_index: Of the row.

    Raises:
        ValueError: It is no such object; says what is wrong.
    """
    try:
        told = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    if not isinstance(told, dict):
        raise ValueError("it is no object")
    return session_message({**told, "prompt_id": prompt_id, "sample_index": sample_index})


def session_message(told: Mapping[str, Any]) -> coordinator_pb2.SampledSession:
    """A session as a message, from plain JSON values under the names of the proto.

    Raises:
        ValueError: A field is not what it should be; names it.
    """
    log = told.get("log", "")
    if not isinstance(log, str):
        raise ValueError("log is no text")
    return coordinator_pb2.SampledSession(
        prompt_id=_whole(told, "prompt_id", least=-(2**63), most=2**63 - 1),
        sample_index=_whole(told, "sample_index", most=2**63 - 1),
        **{name: _whole(told, name) for name in _NUMBERS},
        calls=_calls(told, "calls"),
        left_out=_calls(told, "left_out"),
        # Its end is what counts. A lone surrogate, which JSON may hold, is no UTF-8.
        log=log.encode(errors="replace")[-MAX_LOG_BYTES:].decode(errors="ignore"),
    )


def session_facts(session: coordinator_pb2.SampledSession) -> dict[str, Any]:
    """The message as plain JSON values, of which `session_message` makes it again."""
    return {
        "prompt_id": session.prompt_id,
        "sample_index": session.sample_index,
        **{name: getattr(session, name) for name in _NUMBERS},
        "calls": [_facts(call) for call in session.calls],
        "left_out": [_facts(call) for call in session.left_out],
        "log": session.log,
    }


def _facts(call: coordinator_pb2.SampledCall) -> dict[str, Any]:
    return {**{name: getattr(call, name) for name in _OF_CALL}, "use": _USES[call.use]}


def _calls(told: Mapping[str, Any], name: str) -> list[coordinator_pb2.SampledCall]:
    given = told.get(name, [])
    if not isinstance(given, list) or not all(isinstance(call, dict) for call in given):
        raise ValueError(f"{name} is no list of objects")
    calls = []
    for call in given[:MAX_CALLS]:
        use = call.get("use")
        if not isinstance(use, str) or use not in _WORDS:
            raise ValueError(f"use of a call in {name} is none of {', '.join(_WORDS)}")
        numbers = {number: _whole(call, number) for number in _OF_CALL}
        calls.append(coordinator_pb2.SampledCall(**numbers, use=_WORDS[use]))
    return calls


def _whole(told: Mapping[str, Any], name: str, *, least: int = 0, most: int = _MOST) -> int:
    value = told.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is no whole number of {least} to {most}")
    return value
