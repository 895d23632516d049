"""Which fields of a request are served: one that is not is told, and never passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DRAWING = frozenset(
    {
        "max_tokens",
        "n",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
        "prompt_logprobs",
        "logprob_token_ids",
    }
)
"""By what a completion is drawn, and what is said of it, on every route that samples."""

_SAMPLING = _DRAWING | {
    "model",
    "stream",
    "stream_options",
    "user",
    "response_format",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "add_special_tokens",
    "cache_salt",
    "session_id",
    "metadata",
}

_RENDERING = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
    }
)

_PARAMETERS = _DRAWING | {
    "detokenize",
    "thinking_token_budget",
    # Some clients say from where on they want to know of experts, whatever the model.
    "routed_experts_prompt_start",
}
"""Of `sampling_params`, where tokens go in and out."""

_INNER: Mapping[str, frozenset[str]] = {
    "sampling_params": _PARAMETERS,
    "stream_options": frozenset({"include_usage", "continuous_usage_stats"}),
}
"""Fields that are objects of a fixed form, each with what is served of it."""

_NEUTRAL: Mapping[str, Any] = {
    "chat_template": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "suffix": None,
    "echo": False,
    "store": False,
    "function_call": None,
    "functions": None,
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "service_tier": "auto",
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "features": None,
    "content_parts": None,
    "priority": 0,
    "truncate_prompt_tokens": None,
    "web_search_options": None,
    "verbosity": None,
}
"""Fields that are known and not served; one with the value that changes nothing is let through."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route that takes a JSON object."""

    fields: frozenset[str]
    """Those that are served."""
    neutral: Mapping[str, Any]
    """Those that are not, each with the value that changes nothing."""

    def unserved(self, body: Mapping[str, Any]) -> str | None:
        """The first field of a request that is not served; None where all are.

        Example: "best_of", or "sampling_params.best_of" of one inside another.
        """
        for name, value in body.items():
            if value is None:
                continue
            if name not in self.fields:
                if name not in self.neutral or value != self.neutral[name]:
                    return name
            elif name in _INNER and isinstance(value, Mapping):
                for inner, given in value.items():
                    if given is not None and inner not in _INNER[name]:
                        return f"{name}.{inner}"
        return None


def _route(fields: frozenset[str]) -> Route:
    return Route(fields, {name: value for name, value in _NEUTRAL.items() if name not in fields})


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": _route(
        _SAMPLING
        | _RENDERING
        | {
            "max_completion_tokens",
            "top_logprobs",
            "tool_choice",
            "parallel_tool_calls",
            "include_reasoning",
            "thinking_token_budget",
        }
    ),
    "/v1/completions": _route(_SAMPLING | {"prompt", "echo"}),
    "/tokenize": _route(
        _RENDERING | {"model", "prompt", "add_special_tokens", "return_token_strs"}
    ),
    "/inference/v1/generate": _route(
        frozenset(
            {
                "model",
                "token_ids",
                "sampling_params",
                "request_id",
                "stream",
                "stream_options",
                "cache_salt",
                "return_token_ids",
                "output_mode",
                "token_offsets",
                "metadata",
            }
        )
    ),
}
"""By path; those without a JSON object are not here."""
