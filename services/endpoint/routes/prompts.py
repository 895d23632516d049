"""Prompts that vLLM does not render: histories that go on as they were sampled, and images."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jinja2
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.exceptions import VLLMValidationError

from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.images.openai_parts import as_text, has_urls, without_urls
from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.sessions.history import arguments_of, continued, text_of
from rolemesh.engine.sessions.session import Session
from rolemesh.services.endpoint.asked import ASKED, Asked
from rolemesh.services.endpoint.routes.client_images import ClientImages

logger = logging.getLogger(__name__)

_BESIDE = frozenset({"documents", "reasoning_effort"})
_SETTINGS = _BESIDE | {"tools", "chat_template_kwargs"}
"""Fields that a prompt is rendered from beside its messages."""


Given: TypeAlias = ChatCompletionRequest | TokenizeChatRequest
"""A request that has messages."""


class SessionPrompts:
    """Puts the tokens of a session, or of messages with images, in the place of rendering them.

    A request whose messages go on from an earlier answer of its session is given the tokens of that
    call, and behind them those that the chat template puts between that answer and the next one. So
    nothing that was sampled is encoded or rendered again: not the separator of turns, not what the
    template would leave out of earlier answers. Where the client has changed the answer, or the
    template has no fixed text for the turns between, the messages are rendered whole, as vLLM does.

    Messages that show images are rendered here as the data of a run is, since vLLM would fetch and
    cut images by itself. A session shows images before its first answer alone.
    """

    def __init__(
        self,
        renders: Renderer,
        tokenizer: Any,
        *,
        template: str | None,
        images: ClientImages | None,
    ) -> None:
        """Takes what vLLM's front renders with.

        Args:
            renders: Has the template.
            tokenizer: Of the model's folder.
            template: Stands for its own chat template.
            images: Reads images; None: the model takes none.
        """
        self._renders = renders
        self._tokenizer = tokenizer
        self._template = template
        self._images = images

    async def put_into(self, request: Given) -> None:
        """Gives a request its prompt as tokens, where vLLM must not render it.

        The images of the prompt are left in ASKED.

        Raises:
            VLLMValidationError: Images are not what they should be, or cannot be shown here.
        """
        asked = ASKED.get()
        if asked is None:
            return
        shows = any(has_urls(message) for message in asked.body["messages"])
        if shows:
            self._check_may_show(request, asked)
        try:
            tokens = self._continued(request, asked)
            if tokens is None and shows:
                tokens = await self._shown(asked)
        except (ImageInvalidError, DataInvalidError) as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        if tokens is not None:
            # vLLM's own door for a prompt that is tokens already: tools, parsers and checks of the
            # request are as ever. It is closed to messages with more than text.
            request.kv_transfer_params = {"prompt_token_ids": tokens}
            if shows:
                request.messages = as_text(without_urls(asked.body["messages"])[0])

    def _check_may_show(self, request: Given, asked: Asked) -> None:
        why = None
        if self._images is None:
            why = "messages show images, but this model takes none: send text"
        elif asked.opened is not None and not asked.opened.rules.may_show_images:
            why = (
                "messages show images, but the data of this run has no section images, so its rows "
                "have no place for them: give data.images"
            )
        elif not request.add_generation_prompt or request.continue_final_message:
            why = (
                "messages show images, and add_generation_prompt is false or "
                "continue_final_message true: leave both out"
            )
        if why is not None:
            raise VLLMValidationError(why, parameter="messages")

    async def _shown(self, asked: Asked) -> list[int]:
        """Tokens of messages with images, as the data of a run would have them.

        Raises:
            ImageInvalidError, DataInvalidError: They cannot be shown.
        """
        assert self._images is not None
        turns, images = await self._images.read(asked.body["messages"])
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_as_rendered(turn) for turn in turns],
                add_generation_prompt=True,
                tokenize=False,
                **({} if self._template is None else {"chat_template": self._template}),
                **_template_arguments(asked.body),
            )
        except jinja2.TemplateError as error:
            raise DataInvalidError(f"messages: the chat template refuses them: {error}") from error
        tokens = self._images.expanded(self._renders.tokens(text), images)
        asked.images = images
        return tokens

    def _continued(self, request: Given, asked: Asked) -> list[int] | None:
        if asked.opened is None:
            return None
        if not request.add_generation_prompt or request.continue_final_message:
            return None
        body, session = asked.body, asked.opened.session
        found = continued(session, settings_of(body), body["messages"])
        if found is None:
            return None
        call, behind = found
        _check_no_images(behind, session)
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
        asked.images = call.images
        return [*session.tokens(call), *between]


def _check_no_images(messages: Sequence[Mapping[str, Any]], session: Session) -> None:
    """Raises ImageInvalidError where a message behind an answer shows an image."""
    if any(map(has_urls, messages)):
        raise ImageInvalidError(
            f"session {session.session_id} is shown an image behind an answer of its policy, and a "
            "row has images in its prompt alone: show all images before the first answer, or open "
            "another session"
        )


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
