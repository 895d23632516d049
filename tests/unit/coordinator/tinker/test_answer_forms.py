"""Answers of Tinker's protocol, in both of its forms."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from support.tinker_bodies import SAMPLE

from rolemesh.coordinator.tinker.forms import json_forms, proto_forms
from rolemesh.coordinator.tinker.forms.forms import (
    EMPTY_LOGPROB,
    GradientResult,
    SampledSequence,
    SampleResult,
    Tensor,
    TopkLogprobs,
)
from rolemesh.v1 import tinker_pb2

LOGPROBS = [
    np.array([-0.5, -1.0], np.float32),
    np.array([-2.0], np.float32),
    np.array([[-1, -2], [-3, -4]], np.float32),
    np.array([-0.25], np.float32),
]


def test_log_probs_of_data_are_written_in_runs_of_one_shape() -> None:
    result = GradientResult(LOGPROBS, {"loss:sum": 1.5})
    message = tinker_pb2.TinkerForwardBackwardOutput.FromString(
        proto_forms.write_gradient_result(result)
    )
    assert message.loss_fn_output_type == "ArrayRecord"
    assert dict(message.metrics) == {"loss:sum": 1.5}
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    read = []
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        offsets = np.frombuffer(tensor.offsets, "<i8")
        for begin, end in pairwise(offsets):
            part = np.frombuffer(tensor.data[begin:end], "<f4")
            read.append(part.reshape(-1, *tensor.trailing_shape))
    assert [part.tolist() for part in read] == [part.tolist() for part in LOGPROBS]


def test_log_probs_of_data_are_written_as_json() -> None:
    written = json_forms.write_gradient_result(GradientResult(LOGPROBS, {"loss:sum": 1.5}))
    assert written["loss_fn_output_type"] == "ArrayRecord"
    assert written["metrics"] == {"loss:sum": 1.5}
    assert written["loss_fn_outputs"][2] == {
        "logprobs": {"data": [-1, -2, -3, -4], "dtype": "float32", "shape": [2, 2]}
    }
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("name", ["loss", "loss:sum:mean", "loss:median", "loss:"])
def test_a_metric_that_no_client_joins_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="NAME:REDUCTION"):
        GradientResult([], {name: 1.0})


@pytest.mark.parametrize(
    "result",
    [
        GradientResult([], {"loss:sum": math.nan}),
        GradientResult([np.array([-math.inf], np.float32)]),
    ],
    ids=["metric", "logprob"],
)
def test_what_json_cannot_say_is_no_answer(result: GradientResult) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        json_forms.write_gradient_result(result)
    assert proto_forms.write_gradient_result(result)


def sample_result() -> SampleResult:
    topk = TopkLogprobs(
        np.array([[0, 0], [4, 5], [6, 0]]),
        np.array([[EMPTY_LOGPROB] * 2, [-0.5, -1.5], [-0.25, EMPTY_LOGPROB]], np.float32),
    )
    asked = json_forms.read_sample_call(SAMPLE).target_prompt_logprobs
    assert asked is not None
    return SampleResult(
        sequences=[
            SampledSequence(np.array([7, 8]), np.array([-1, -2], np.float32), is_stopped=True),
            SampledSequence(np.array([9]), None, is_stopped=False),
        ],
        prompt_logprobs=np.array([math.nan, -0.5, -0.75], np.float32),
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=Tensor(
            np.array([[0, 0], [0, -3]], np.float32), asked.crow_indices, asked.col_indices
        ),
        prompt_alt_tokens=TopkLogprobs(
            np.array([[3], [4]]), np.array([[-1], [-2]], dtype=np.float32)
        ),
        prompt_cache_hit_tokens=2,
    )


def test_samples_are_written_as_json() -> None:
    written = json_forms.write_sample_result(sample_result())
    assert written == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [7, 8], "logprobs": [-1, -2]},
            {"stop_reason": "length", "tokens": [9]},
        ],
        "prompt_logprobs": [None, -0.5, -0.75],
        "topk_prompt_logprobs": [None, [[4, -0.5], [5, -1.5]], [[6, -0.25]]],
        "target_prompt_logprobs": {
            "data": [-3],
            "dtype": "float32",
            "shape": [2, 2],
            "sparse_crow_indices": [0, 0, 1],
            "sparse_col_indices": [1],
        },
        "prompt_alt_tokens": {
            "tokens": {"data": [3, 4], "dtype": "int64", "shape": [2, 1]},
            "logprobs": {"data": [-1, -2], "dtype": "float32", "shape": [2, 1]},
        },
        "prompt_cache_hit_tokens": 2,
    }
    json.dumps(written, allow_nan=False)


def test_samples_are_written_as_protobuf() -> None:
    message = tinker_pb2.TinkerSampleResponse.FromString(
        proto_forms.write_sample_result(sample_result())
    )
    first, second = message.sequences
    assert (first.stop_reason, second.stop_reason) == (0, 1)
    assert np.frombuffer(first.tokens, "<i4").tolist() == [7, 8]
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-1, -2]
    assert not second.HasField("logprobs")
    assert not second.HasField("topk_sampled_logprobs")
    prompt = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0])
    assert prompt[1:].tolist() == [-0.5, -0.75]
    topk = message.topk_prompt_logprobs
    assert (topk.length, topk.k) == (3, 2)
    assert np.frombuffer(topk.token_ids, "<i4").tolist() == [0, 0, 4, 5, 6, 0]
    target = message.target_prompt_logprobs
    assert list(target.shape) == [2, 2]
    assert np.frombuffer(target.sparse_csr.values, "<f4").tolist() == [-3]
    assert np.frombuffer(message.prompt_alt_tokens.tokens.dense, "<i4").tolist() == [3, 4]
    assert message.prompt_cache_hit_tokens == 2
