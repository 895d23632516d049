"""Calls of an endpoint and their outputs as text and bytes, on their way between ranks.

What arrives is read as the types that it must have, and nothing of it is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rolemesh.engine.images.prompt_images import (
    ImageInvalidError,
    PromptImage,
    images_of,
    images_text,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


class WireError(ValueError):
    """What came is not what the ranks of a service send each other."""


class _Prompt(msgspec.Struct, array_like=True):
    """As much of vLLM's EngineInput as a call has, and its images."""

    prompt_token_ids: list[int]
    prompt: str | None = None
    cache_salt: str | None = None
    images: str = ""
    """As a row of the column `images`."""


class _Logprob(msgspec.Struct, array_like=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


_Logprobs = list[dict[int, _Logprob] | None]


class _Completion(msgspec.Struct, array_like=True):
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: _Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[tuple[str, int, int]] | None


class _Output(msgspec.Struct, array_like=True):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: _Logprobs | None
    num_cached_tokens: int | None
    finished: bool
    completions: list[_Completion]


def pack_call(prompt: Any, params: Any, images: Sequence[PromptImage] = ()) -> str:
    """A call as JSON text.

    Args:
        prompt: VLLM's EngineInput, of token ids.
        params: VLLM's SamplingParams.
        images: Of the prompt.

    Raises:
        WireError: The prompt is of another kind.
    """
    if prompt["type"] != "token":
        raise WireError(
            f"the prompt is of type {prompt['type']!r}: only token ids travel to other ranks"
        )
    packed = _Prompt(
        list(prompt["prompt_token_ids"]),
        prompt.get("prompt"),
        prompt.get("cache_salt"),
        images_text(images),
    )
    return msgspec.json.encode([packed, params]).decode()


def unpack_call(text: str | bytes) -> tuple[Any, SamplingParams, tuple[PromptImage, ...]]:
    """Prompt, parameters and images of a call that `pack_call` has packed.

    Raises:
        WireError: It is none.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import SamplingParams

    try:
        prompt, params = msgspec.json.decode(text, type=tuple[_Prompt, SamplingParams])
        images = images_of(prompt.images)
    except (msgspec.MsgspecError, ImageInvalidError) as error:
        raise WireError(f"a call is not what a rank sends: {error}") from error
    return (
        tokens_input(prompt.prompt_token_ids, prompt=prompt.prompt, cache_salt=prompt.cache_salt),
        params,
        images,
    )


def pack_output(output: RequestOutput) -> bytes:
    """What a step has given a call. Numbers arrive bit by bit, NaN and infinities too."""
    return msgspec.msgpack.encode(
        _Output(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=list(output.prompt_token_ids or ()),
            prompt_logprobs=_packed(output.prompt_logprobs),
            num_cached_tokens=output.num_cached_tokens,
            finished=output.finished,
            completions=[
                _Completion(
                    index=one.index,
                    text=one.text,
                    token_ids=list(one.token_ids),
                    cumulative_logprob=one.cumulative_logprob,
                    logprobs=_packed(one.logprobs),
                    finish_reason=one.finish_reason,
                    stop_reason=one.stop_reason,
                    weight_versions=None
                    if one.weight_versions is None
                    else [(span.version, span.start, span.end) for span in one.weight_versions],
                )
                for one in output.outputs
            ],
        )
    )


def unpack_output(data: bytes) -> RequestOutput:
    """An output that `pack_output` has packed.

    Raises:
        WireError: It is none.
    """
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    try:
        told = msgspec.msgpack.decode(data, type=_Output)
    except msgspec.MsgspecError as error:
        raise WireError(f"an output of a call is not what a rank sends: {error}") from error
    return RequestOutput(
        request_id=told.request_id,
        prompt=told.prompt,
        prompt_token_ids=told.prompt_token_ids,
        prompt_logprobs=_unpacked(told.prompt_logprobs),
        num_cached_tokens=told.num_cached_tokens,
        finished=told.finished,
        outputs=[
            CompletionOutput(
                index=one.index,
                text=one.text,
                token_ids=one.token_ids,
                cumulative_logprob=one.cumulative_logprob,
                logprobs=_unpacked(one.logprobs),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                weight_versions=None
                if one.weight_versions is None
                else [WeightVersionSpan(*span) for span in one.weight_versions],
            )
            for one in told.completions
        ],
    )


def _packed(places: Any) -> _Logprobs | None:
    if places is None:
        return None
    return [
        None
        if place is None
        else {
            token: _Logprob(one.logprob, one.rank, one.decoded_token)
            for token, one in place.items()
        }
        for place in places
    ]


def _unpacked(places: _Logprobs | None) -> Any:
    from vllm.logprobs import Logprob

    if places is None:
        return None
    return [
        None
        if place is None
        else {
            token: Logprob(one.logprob, rank=one.rank, decoded_token=one.decoded_token)
            for token, one in place.items()
        }
        for place in places
    ]
