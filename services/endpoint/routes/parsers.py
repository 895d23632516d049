"""Which of vLLM's tool parsers reads what a model family writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.engine.specs.sampling.endpoint import EndpointSpec

_OF_FAMILY: Mapping[str, str] = {
    "qwen2": "hermes",
    "qwen3": "hermes",
    "mistral": "mistral",
    "granite": "granite",
    "olmo3": "olmo3",
    "phi3": "phi4_mini_json",
    "gpt_oss": "openai",
    "glm4_moe": "glm45",
    "deepseek_v3": "deepseek_v3",
}
"""By model_type. Llama is none of them: its architecture is that of models of many makers, which
write tools in many ways."""


def tool_parser_of(spec: EndpointSpec, engine: Any) -> str | None:
    """The parser that an endpoint is given, or that its model's family has; None: there is none.

    Raises:
        ValueError: VLLM has no parser of that name.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    name = spec.tool_parser
    if name is None:
        name = _OF_FAMILY.get(engine.model_config.hf_config.model_type)
    for field, given, known in (
        ("tool_parser", name, ToolParserManager.list_registered()),
        ("reasoning_parser", spec.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if given is not None and given not in known:
            raise ValueError(
                f"endpoint.{field} is {given!r}, which vLLM does not have: give one of "
                f"{', '.join(sorted(known))}"
            )
    return name
