"""Log-probs that a vLLM engine gives a row. Imports vLLM, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input


def score_row(
    engine: Any,
    step: Callable[[], Sequence[Any]],
    request_id: str,
    tokens: Sequence[int],
    *,
    lora_request: Any,
) -> list[float]:
    """Has an engine score a row of token ids, beside whatever else is in it.

    Args:
        engine: VLLM's LLMEngine.
        step: Takes a step of it, hands on what others have asked for, and returns the rest.
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
    while engine.has_unfinished_requests():
        for output in step():
            if output.request_id != request_id or not output.finished:
                continue
            _, *later = output.prompt_logprobs or [None]
            if len(later) != len(row) - 1:
                raise RuntimeError(
                    f"vLLM gave {len(later)} log-probs for a row of {len(row)} tokens"
                )
            return [
                float(given[token].logprob) for given, token in zip(later, row[1:], strict=True)
            ]
    raise RuntimeError(f"vLLM ended without log-probs for a row of {len(row)} tokens")
