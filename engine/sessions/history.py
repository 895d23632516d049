"""Histories of messages: which earlier answer a list of messages continues.

Digests, so that a session of long messages takes 32 bytes for each answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.sessions.session import Session, SessionCall


def text_of(content: Any) -> Any:
    """The text of a message's content, joined where it comes in parts; other contents as they are.

    Example: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] is "ab", None is "".
    """
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text")
        for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content


class HistoryDigests:
    """Digests of the beginnings of a conversation, message after message.

    Of an answer, its text counts, without the white space around it, and its tool calls. What it
    thought does not: many clients send it back, and many do not, and it was sampled all the same.
    Nor do ids of tool calls there, which some clients make anew.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Begins; `settings` are all else that a prompt is rendered from, e.g. its tools."""
        self._last = _hashed(b"", settings)

    def add(self, message: Mapping[str, Any]) -> bytes:
        """The digest of all messages so far and this one."""
        self._last = _hashed(self._last, canonical(message))
        return self._last

    def with_answer(self, message: Mapping[str, Any]) -> bytes:
        """The digest of all messages so far and an answer to them, which is not added."""
        return _hashed(self._last, canonical({**message, "role": "assistant"}))


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the one form in which it is compared."""
    content = text_of(message.get("content"))
    if message.get("role") != "assistant":
        rest = {key: value for key, value in message.items() if value is not None}
        return {**rest, "content": content}
    return {
        "role": "assistant",
        "content": content.strip() if isinstance(content, str) else content,
        "tool_calls": [_call_of(call) for call in message.get("tool_calls") or ()],
    }


def continued(
    session: Session, settings: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> tuple[SessionCall, Sequence[Mapping[str, Any]]] | None:
    """The latest answer that messages go on from, and those behind it; None: there is none.

    An answer that the client has changed is not the one that was sampled. Then the history forks:
    the answer before it is looked for.
    """
    digests = HistoryDigests(settings)
    found: tuple[SessionCall, Sequence[Mapping[str, Any]]] | None = None
    for number, message in enumerate(messages):
        digest = digests.add(message)
        if message.get("role") != "assistant" or number + 1 == len(messages):
            continue
        call = session.answered(digest)
        if call is not None:
            found = call, messages[number + 1 :]
    return found


def _call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {"name": function.get("name"), "arguments": arguments_of(function.get("arguments"))}


def arguments_of(given: Any) -> Any:
    """Arguments of a tool call as JSON values, whether they came as text or as an object."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given


def _hashed(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(before + text.encode("utf-8", "surrogatepass")).digest()
