"""What a vLLM engine is asked for. Imports vLLM, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rolemesh.engine.rollout.requests import RolloutRequest, completion_budget
from rolemesh.engine.specs import SamplingSpec


def sampling_params(
    request: RolloutRequest,
    sampling: SamplingSpec,
    *,
    max_model_len: int,
    stop_tokens: Sequence[int],
) -> SamplingParams:
    """How vLLM draws a completion, with the log-probs of its tokens.

    Args:
        request: Of one completion; vLLM tells its tokens as they come where the caller ends it.
        sampling: How to draw.
        max_model_len: Longest prompt and completion together, in tokens.
        stop_tokens: Token ids that end a completion.
    """
    distribution: dict[str, Any] = (
        {"temperature": 0.0}
        if sampling.greedy
        else {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    )
    return SamplingParams(
        **distribution,
        seed=request.seed,
        max_tokens=completion_budget(request, sampling, max_model_len=max_model_len),
        stop_token_ids=list(stop_tokens),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=(
            RequestOutputKind.FINAL_ONLY if request.is_complete is None else RequestOutputKind.DELTA
        ),
    )
