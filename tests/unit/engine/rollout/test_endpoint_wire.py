"""Calls and outputs arrive as they were, between ranks of a service."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.rollout.endpoint.wire import (
    WireError,
    pack_call,
    pack_output,
    unpack_call,
    unpack_output,
)


@pytest.fixture
def vllm_inputs() -> Any:
    # Imported by the one process that runs these tests, and not by each that collects them.
    return pytest.importorskip("vllm.inputs.engine")


def test_a_call_arrives_as_it_was(vllm_inputs: Any) -> None:
    from vllm.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    prompt = vllm_inputs.tokens_input([1, 2, 3], prompt="abc", cache_salt="s")
    params = SamplingParams(
        n=2,
        temperature=0.7,
        seed=2**62 + 1,
        stop=["\n\n"],
        stop_token_ids=[4],
        logprobs=3,
        logit_bias={5: -1.5},
        bad_words=["no"],
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json='{"type": "object"}'),
    )
    assert unpack_call(pack_call(prompt, params)) == (prompt, params, ())
    bare = vllm_inputs.tokens_input([7])
    images = (PromptImage.of(b"a", (1, 4, 2)), PromptImage.of(b"b", (1, 2, 2)))
    called = unpack_call(pack_call(bare, SamplingParams(), images))
    assert called == (bare, SamplingParams(), images)


def test_a_prompt_that_is_more_than_tokens_does_not_travel() -> None:
    with pytest.raises(WireError, match="type 'embeds'"):
        pack_call({"type": "embeds"}, None)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '[[[1],null,null,"[1]"],{}]', '[[["a"]],{}]', '[[[1],null,null],{"n":"two"}]'],
)
def test_what_is_no_call_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="not what a rank sends"):
        unpack_call(text)


def test_an_output_arrives_as_it_was_to_the_bit() -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    places = [
        {3: Logprob(-0.1, rank=1, decoded_token="c"), 4: Logprob(-math.inf)},
        {5: Logprob(math.nan, rank=2)},
    ]
    whole = CompletionOutput(
        index=1,
        text="cé",
        token_ids=[3, 5],
        cumulative_logprob=-0.30000000000000004,
        logprobs=places,
        finish_reason="stop",
        stop_reason="\n",
        weight_versions=[WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2)],
    )
    begun = CompletionOutput(index=0, text="", token_ids=(), cumulative_logprob=None, logprobs=None)
    sent = RequestOutput("a", "ab", [1, 2], [None, places[0]], [begun, whole], True)
    sent.num_cached_tokens = 16
    told = unpack_output(pack_output(sent))
    assert (told.request_id, told.prompt, told.prompt_token_ids) == ("a", "ab", [1, 2])
    assert (told.finished, told.num_cached_tokens) == (True, 16)
    assert told.prompt_logprobs == sent.prompt_logprobs
    first, second = told.outputs
    assert (first.index, list(first.token_ids), first.logprobs) == (0, [], None)
    assert second.logprobs[0] == places[0]
    assert math.isnan(second.logprobs[1][5].logprob)
    assert second.weight_versions == whole.weight_versions
    assert (second.text, second.cumulative_logprob, second.stop_reason) == (
        whole.text,
        whole.cumulative_logprob,
        "\n",
    )


def test_what_is_no_output_is_refused() -> None:
    with pytest.raises(WireError, match="not what a rank sends"):
        unpack_output(b"\x93\x01\x02\x03")
