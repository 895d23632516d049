"""Chat completions of sessions: they continue what was sampled, and their answers are noted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from rolemesh.engine.sessions.history import HistoryDigests
from rolemesh.services.endpoint.asked import ASKED, Asked
from rolemesh.services.endpoint.routes.prompts import SessionPrompts, settings_of


class SessionChat(OpenAIServingChat):  # type: ignore[misc]
    """vLLM's chat completions, with prompts of sessions that continue what was sampled."""

    prompts: SessionPrompts
    """Set by who makes it."""
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
        await self.prompts.put_into(request)
        return await super().render_chat_request(request)

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
        digests = HistoryDigests(settings_of(asked.body))
        for message in asked.body["messages"]:
            digests.add(message)
        if isinstance(given, ChatCompletionResponse):
            for choice in given.choices:
                _note(asked, choice.index, digests, choice.message.model_dump())
        elif isinstance(given, AsyncGenerator):
            return _noted_stream(given, asked, digests)
        return given


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
