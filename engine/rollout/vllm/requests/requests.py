"""What a vLLM engine is asked for. Imports vLLM, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rolemesh.engine.rollout.requests import RolloutRequest, completion_budget, drawing_arguments
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
    return SamplingParams(
        **drawing_arguments(sampling),
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
