"""Chat completions of sessions: a history that goes on keeps its tokens as they were sampled."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from rolemesh.engine.data.rendering import Renderer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.sessions.history import HistoryDigests, arguments_of, continued, text_of
from rolemesh.engine.sessions.session import Session
from rolemesh.services.endpoint.asked import ASKED, Asked

logger = logging.getLogger(__name__)

_SETTINGS = frozenset({"tools", "chat_template_kwargs", "documents", "reasoning_effort"})
"""Fields that a prompt is rendered from beside its messages."""


class SessionChat(OpenAIServingChat):  # type: ignore[misc]
    """vLLM's chat completions, with prompts of sessions that continue what was sampled.

    A request whose messages go on from an earlier answer of its session is given the tokens of that
    call, and behind them those that the chat template puts between that answer and the next one. So
    nothing that was sampled is encoded or rendered again: not the separator of turns, not what the
    template would leave out of earlier answers. Where the client has changed the answer, or the
    template has no fixed text for the turns between, the messages are rendered whole, as vLLM does.
    """

    renders: Renderer
    """With the same template; set by who makes it."""
    renders_tools = False
    """Whether the template shows the model its tools; likewise."""

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """See vLLM; the prompt of a session's call may be put in the place of rendering."""
        if request.tools and request.tool_choice != "none" and not self.renders_tools:
            return self.create_error_response(
                "tools is given, but the chat template of this model does not show them to it: "
                "describe them in a message, or give endpoint.chat_template one that does",
                param="tools",
            )
        asked = ASKED.get()
        if asked is not None and asked.opened is not None:
            tokens = self._continued(request, asked.body, asked.opened.session)
            if tokens is not None:
                # vLLM's own door for a prompt that is tokens already: tools, parsers and checks of
                # the request are as ever.
                request.kv_transfer_params = {"prompt_token_ids": tokens}
        return await super().render_chat_request(request)

    def _continued(
        self, request: ChatCompletionRequest, body: Mapping[str, Any], session: Session
    ) -> list[int] | None:
        if not request.add_generation_prompt or request.continue_final_message:
            return None
        found = continued(session, _settings(body), body["messages"])
        if found is None:
            return None
        call, behind = found
        said = [_as_rendered(message) for message in behind]
        if not all(isinstance(message["content"], str) for message in said):
            return None
        is_closed = call.finish_reason == "stop" and len(call.sampled_tokens) > 0
        last = call.sampled_tokens[-1] if is_closed else None
        ends = self.renders.end_tokens()
        try:
            between = self.renders.continuation(
                said,
                end_token=last if last in ends else None,
                template_arguments=_template_arguments(body),
            )
        except DataInvalidError as error:
            logger.info("session %s is rendered whole: %s", session.session_id, error)
            return None
        return [*session.tokens(call), *between]

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> Any:
        """See vLLM; remembers which history the answers make."""
        if request.return_token_ids and request.return_tokens_as_token_ids is None:
            # Who asks for ids checks log-probs against them: their tokens are "token_id:7" then.
            request.return_tokens_as_token_ids = True
        asked = ASKED.get()
        if asked is None or asked.opened is None:
            return await super().create_chat_completion(request, raw_request)
        given = await super().create_chat_completion(request, raw_request)
        digests = HistoryDigests(_settings(asked.body))
        for message in asked.body["messages"]:
            digests.add(message)
        if isinstance(given, ChatCompletionResponse):
            for choice in given.choices:
                _note(asked, choice.index, digests, choice.message.model_dump())
        elif isinstance(given, AsyncGenerator):
            return _noted_stream(given, asked, digests)
        return given


def _settings(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: body[name] for name in _SETTINGS if body.get(name) is not None}


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is given beside the messages."""
    given = dict(_settings(body))
    chosen = given.pop("chat_template_kwargs", {})
    ours = {"add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
    return {**{name: value for name, value in chosen.items() if name not in ours}, **given}


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


def _note(asked: Asked, index: int, digests: HistoryDigests, message: Mapping[str, Any]) -> None:
    call = asked.calls.get(index)
    if call is not None and asked.opened is not None:
        asked.opened.session.note_answer(digests.with_answer(message), call)


async def _noted_stream(
    chunks: AsyncIterator[str], asked: Asked, digests: HistoryDigests
) -> AsyncGenerator[str, None]:
    """Passes a stream of events on, and notes its answers when it has ended."""
    answers: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        data = chunk.removeprefix("data: ").strip()
        if data == "[DONE]":
            # Before the client hears that it is whole, and goes on.
            for index, answer in answers.items():
                _note(asked, index, digests, answer)
        elif chunk.startswith("data: "):
            for choice in json.loads(data).get("choices", ()):
                answer = answers.setdefault(choice["index"], {"content": "", "tool_calls": []})
                _grow(answer, choice.get("delta") or {})
        yield chunk


def _grow(answer: dict[str, Any], delta: Mapping[str, Any]) -> None:
    answer["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or ():
        while len(answer["tool_calls"]) <= part["index"]:
            answer["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        known, new = answer["tool_calls"][part["index"]]["function"], part.get("function") or {}
        known["name"] += new.get("name") or ""
        known["arguments"] += new.get("arguments") or ""
