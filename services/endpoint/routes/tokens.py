"""Token ids in and out; log-probs name their tokens as trainers that check the pairing want it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateRequest,
    GenerateTokensResponse,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens


class NamedTokens(ServingTokens):  # type: ignore[misc]
    """vLLM's /inference/v1/generate, whose log-probs also have `token`, as its chat answers do.

    Example: an entry {"token_id": 7, "logprob": -0.5} also has "token": "token_id:7".
    """

    async def serve_tokens(self, request: GenerateRequest, raw_request: Any = None) -> Any:
        """See vLLM."""
        given = await super().serve_tokens(request, raw_request)
        if isinstance(given, GenerateTokensResponse):
            return _NamedResponse.model_construct(**dict(given))
        if isinstance(given, AsyncGenerator) and request.output_mode == "tokens":
            return _named_stream(given)
        return given


class _NamedResponse(GenerateTokensResponse):  # type: ignore[misc]
    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        given: dict[str, Any] = super().model_dump(**kwargs)
        _name(given)
        return given


async def _named_stream(chunks: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    async for chunk in chunks:
        data = chunk.removeprefix("data: ").strip()
        if chunk == data or data == "[DONE]":
            yield chunk
            continue
        given = json.loads(data)
        _name(given)
        yield f"data: {json.dumps(given)}\n\n"


def _name(given: dict[str, Any]) -> None:
    for choice in given.get("choices") or ():
        for place in (choice.get("logprobs") or {}).get("content") or ():
            for entry in (place, *(place.get("top_logprobs") or ())):
                entry["token"] = f"token_id:{entry['token_id']}"
