"""Log-probs that a vLLM engine gives a row. Imports vLLM, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input


def score_row(
    engine: Any, request_id: str, tokens: Sequence[int], *, lora_request: Any
) -> list[float]:
    """Has an engine that has no other request score a row of token ids.

    Args:
        engine: VLLM's LLMEngine.
        request_id: That no other request has had.
        tokens: At least two.
        lora_request: Names the adapter; None: the model as it is.

    Returns:
        Natural log-probs of all tokens but the first, at temperature 1.

    Raises:
        RuntimeError: The engine ended without them.
    """
    # One token has to be drawn, too; a greedy one draws no random number.
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    row = list(tokens)
    engine.add_request(request_id, tokens_input(row), params, lora_request=lora_request)
    found: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.prompt_logprobs is not None:
                _, *later = output.prompt_logprobs
                found = [
                    float(given[token].logprob) for given, token in zip(later, row[1:], strict=True)
                ]
    if len(found) != len(row) - 1:
        raise RuntimeError(f"vLLM gave {len(found)} log-probs for a row of {len(row)} tokens")
    return found
