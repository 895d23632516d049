"""Which tokens a text or a chat would be; a chat of a session is what its next call is given."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from rolemesh.services.endpoint.prompts import SessionPrompts


class SessionTokenization(ServingTokenization):  # type: ignore[misc]
    """vLLM's /tokenize, with prompts of sessions that continue what was sampled.

    So a client that asks for the tokens of a call's prompt hears what the call had.
    """

    prompts: SessionPrompts
    """Set by who makes it."""

    async def create_tokenize(self, request: TokenizeRequest, raw_request: Any) -> Any:
        """See vLLM."""
        if isinstance(request, TokenizeChatRequest):
            self.prompts.put_into(request)
        return await super().create_tokenize(request, raw_request)
