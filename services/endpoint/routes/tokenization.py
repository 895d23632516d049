"""Which tokens a text or a chat would be; a chat of a session is what its next call is given."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from rolemesh.services.endpoint.asked import ASKED
from rolemesh.services.endpoint.routes.prompts import SessionPrompts, beside_messages


class SessionTokenization(ServingTokenization):  # type: ignore[misc]
    """vLLM's /tokenize, with prompts of sessions that continue what was sampled.

    So a client that asks for the tokens of a call's prompt hears what the call had.
    """

    prompts: SessionPrompts
    """Set by who makes it."""

    async def create_tokenize(self, request: TokenizeRequest, raw_request: Any) -> Any:
        """See vLLM."""
        asked = ASKED.get()
        if asked is not None and isinstance(request, TokenizeChatRequest):
            # VLLM's own knows no fields for these, and would pass them over.
            beside = beside_messages(asked.body)
            request.chat_template_kwargs = {**(request.chat_template_kwargs or {}), **beside}
            await self.prompts.put_into(request)
        return await super().create_tokenize(request, raw_request)
