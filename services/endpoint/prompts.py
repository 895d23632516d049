"""Prompts of sessions: a history that goes on keeps its tokens as they were sampled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from rolemesh.engine.data.rendering import Renderer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.sessions.history import arguments_of, continued, text_of
from rolemesh.engine.sessions.session import Session
from rolemesh.services.endpoint.asked import ASKED

logger = logging.getLogger(__name__)

_BESIDE = frozenset({"documents", "reasoning_effort"})
_SETTINGS = _BESIDE | {"tools", "chat_template_kwargs"}
"""Fields that a prompt is rendered from beside its messages."""


class SessionPrompts:
    """Puts the tokens of a session in the place of rendering its messages.

    A request whose messages go on from an earlier answer of its session is given the tokens of that
    call, and behind them those that the chat template puts between that answer and the next one. So
    nothing that was sampled is encoded or rendered again: not the separator of turns, not what the
    template would leave out of earlier answers. Where the client has changed the answer, or the
    template has no fixed text for the turns between, the messages are rendered whole, as vLLM does.
    """

    def __init__(self, renders: Renderer) -> None:
        """Takes a renderer with the template that vLLM's front renders with."""
        self._renders = renders

    def put_into(self, request: ChatCompletionRequest | TokenizeChatRequest) -> None:
        """Gives a request its prompt as tokens, where it goes on from an answer of its session."""
        asked = ASKED.get()
        if asked is None or asked.opened is None:
            return
        tokens = self._continued(request, asked.body, asked.opened.session)
        if tokens is not None:
            # vLLM's own door for a prompt that is tokens already: tools, parsers and checks of the
            # request are as ever.
            request.kv_transfer_params = {"prompt_token_ids": tokens}

    def _continued(
        self,
        request: ChatCompletionRequest | TokenizeChatRequest,
        body: Mapping[str, Any],
        session: Session,
    ) -> list[int] | None:
        if not request.add_generation_prompt or request.continue_final_message:
            return None
        found = continued(session, settings_of(body), body["messages"])
        if found is None:
            return None
        call, behind = found
        said = [_as_rendered(message) for message in behind]
        if not all(isinstance(message["content"], str) for message in said):
            return None
        is_closed = call.finish_reason == "stop" and len(call.sampled_tokens) > 0
        last = call.sampled_tokens[-1] if is_closed else None
        ends = self._renders.end_tokens()
        try:
            between = self._renders.continuation(
                said,
                end_token=last if last in ends else None,
                template_arguments=_template_arguments(body),
            )
        except DataInvalidError as error:
            logger.info("session %s is rendered whole: %s", session.session_id, error)
            return None
        return [*session.tokens(call), *between]


def settings_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a request's prompt is rendered from beside its messages."""
    return {name: body[name] for name in _SETTINGS if body.get(name) is not None}


def beside_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM gives the template of a chat for fields other than messages and tools.

    Example: of the effort "none" also "enable_thinking": False, unless the caller says otherwise.
    """
    given = {name: body[name] for name in _BESIDE if body.get(name) is not None}
    chosen = body.get("chat_template_kwargs") or {}
    if "reasoning_effort" in given and "enable_thinking" not in chosen:
        given["enable_thinking"] = given["reasoning_effort"] != "none"
    return given


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is given beside the messages."""
    chosen = body.get("chat_template_kwargs") or {}
    ours = {"add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
    tools = {} if body.get("tools") is None else {"tools": body["tools"]}
    return {
        **{name: value for name, value in chosen.items() if name not in ours},
        **tools,
        **beside_messages(body),
    }


def _as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: text as one, arguments of tool calls as objects."""
    shown = {**message, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": arguments_of(call["function"].get("arguments")),
                },
            }
            for call in message["tool_calls"]
        ]
    return shown
