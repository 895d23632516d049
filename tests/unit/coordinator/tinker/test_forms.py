"""Bodies of Tinker's protocol: what its own client wrote is read, and what is wrong is refused."""

from __future__ import annotations

import base64
import json
import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from support.tinker_bodies import SAMPLE

from rolemesh.coordinator.tinker.forms import forms, json_forms, proto_forms
from rolemesh.coordinator.tinker.forms.forms import (
    DenseRoom,
    ProvenanceSpan,
    Tensor,
    WireError,
)
from rolemesh.v1 import tinker_pb2

# Written by the client tinker 0.38.0, of data and settings of ours.
DENSE = (
    "Cgl4OnRyYWluOjEQAxq+AQoMCgoKCAUAAAAGAAAACggKBgoEBwAAABIfCghsb2dwcm9icxITCgwAAAC/AACgvwAAwH"
    "8YASIBAxIwCg10YXJnZXRfdG9rZW5zEh8KGAYAAAAAAAAABwAAAAAAAAAIAAAAAAAAABgCIgEDEiEKCmFkdmFudGFn"
    "ZXMSEwoMAAAAAAAAgD8AAIA/GAEiAQMaCQoHCgNzOjEYAhoLEgkKA3M6MRAEGAEiCwoJCgNzOjEQARgBIgkSBwoDcz"
    "oxGAIiA3BwbyodChJjbGlwX2xvd190aHJlc2hvbGQRAAAAAAAA6D86HwoSY2xpcF9sb3dfdGhyZXNob2xkEgkJAAAA"
    "AAAA6D86DgoEa2luZBIGEgRzb2Z0"
)
SPARSE = (
    "Cgl4OnRyYWluOjEQBBriAQoQCg4KDAkAAAAKAAAACwAAABJdCgd3ZWlnaHRzElISSgoMAAAAPwAAgD4AAIC/EiAAAA"
    "AAAAAAAAEAAAAAAAAAAQAAAAAAAAADAAAAAAAAABoYAgAAAAAAAAAAAAAAAAAAAAMAAAAAAAAAGAEiAgMEEm8KDXRh"
    "cmdldF90b2tlbnMSXhJWChgUAAAAAAAAABUAAAAAAAAAFgAAAAAAAAASIAAAAAAAAAAAAQAAAAAAAAABAAAAAAAAAA"
    "MAAAAAAAAAGhgCAAAAAAAAAAAAAAAAAAAAAwAAAAAAAAAYAiICAwQaTQoICgYKBAEAAAASFgoHd2VpZ2h0cxILCgQA"
    "AIA/GAEiAQESKQoNdGFyZ2V0X3Rva2VucxIYChACAAAAAAAAAAMAAAAAAAAAGAIiAgECIg1jcm9zc19lbnRyb3B5MA"
    "E="
)
IMAGE = "CgFtEAEaGAoICgYKBAEAAAAKDBIKCgF4EgNwbmcYAiINY3Jvc3NfZW50cm9weQ=="
# Written by tinker 0.18.1.
JSON_INPUT = json.loads(
    '{"data": [{"loss_fn_inputs": {"weights": {"data": [1.0, 0.5], "dtype": "float32",'
    '"shape": [2]}, "target_tokens": {"data": [7], "dtype": "int64", "shape": [2, 2],'
    '"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}}, "model_input": {"chunks":'
    '[{"tokens": [1, 2], "type": "encoded_text"}]}}], "loss_fn": "ppo",'
    '"loss_fn_config": {"clip_low_threshold": 0.75}}'
)
SMALL_SAMPLE = json.loads(
    '{"num_samples": 1, "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},'
    '"sampling_params": {"stop": [], "temperature": 1.0, "top_k": -1, "top_p": 1.0},'
    '"sampling_session_id": "s", "seq_id": 0, "topk_prompt_logprobs": 0, "type": "sample"}'
)


def changed(body: Any, path: tuple[str | int, ...], value: object) -> Any:
    """A copy of a body with another value at a path."""
    made = inner = deepcopy(body)
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


def json_call(path: tuple[str | int, ...] = (), value: object = None) -> dict[str, Any]:
    inner = changed(JSON_INPUT, path, value) if path else JSON_INPUT
    return {"forward_backward_input": inner, "model_id": "m", "seq_id": 1}


def proto_call() -> tinker_pb2.TinkerForwardBackwardRequest:
    return tinker_pb2.TinkerForwardBackwardRequest.FromString(base64.b64decode(SPARSE))


# --- data -------------------------------------------------------------------------------------


def test_dense_data_of_the_newer_client_are_read() -> None:
    call = proto_forms.read_gradient_call(base64.b64decode(DENSE))
    assert (call.model_id, call.seq_id, call.loss) == ("x:train:1", 3, "ppo")
    assert call.config == {"clip_low_threshold": 0.75, "kind": "soft"}
    assert not call.forward_only
    (datum,) = call.data
    assert datum.tokens.dtype == np.int64
    assert datum.tokens.tolist() == [5, 6, 7]
    assert set(datum.inputs) == {"target_tokens", "logprobs", "advantages"}
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.inputs["logprobs"].dtype == np.float32
    assert datum.inputs["logprobs"].tolist()[:2] == [-0.5, -1.25]
    assert math.isnan(datum.inputs["logprobs"][2])
    assert datum.input_spans == (
        ProvenanceSpan("s:1", 0, 2, is_sampled=False),
        ProvenanceSpan("s:1", 4, 1, is_sampled=True),
    )
    assert datum.target_spans == (
        ProvenanceSpan("s:1", 1, 1, is_sampled=False),
        ProvenanceSpan("s:1", 0, 2, is_sampled=True),
    )


def test_sparse_data_of_the_newer_client_become_dense() -> None:
    call = proto_forms.read_gradient_call(base64.b64decode(SPARSE))
    assert call.forward_only
    assert call.config == {}
    first, second = call.data
    assert first.inputs["target_tokens"].tolist() == [[0, 0, 20, 0], [0] * 4, [21, 0, 0, 22]]
    assert first.inputs["weights"].tolist() == [[0, 0, 0.5, 0], [0] * 4, [0.25, 0, 0, -1]]
    assert second.inputs["target_tokens"].tolist() == [[2, 3]]
    assert second.inputs["weights"].tolist() == [1]
    assert first.input_spans == ()


def test_a_config_of_clients_before_the_second_map_is_read() -> None:
    message = proto_call()
    message.loss_fn_config["clip_high_threshold"] = 1.5
    call = proto_forms.read_gradient_call(message.SerializeToString())
    assert call.config == {"clip_high_threshold": 1.5}


@pytest.mark.parametrize("forward_only", [False, True])
def test_data_of_the_older_client_are_read(forward_only: bool) -> None:
    name = "forward_input" if forward_only else "forward_backward_input"
    body = {name: JSON_INPUT, "model_id": "m", "seq_id": 2}
    call = json_forms.read_gradient_call(body, forward_only=forward_only)
    assert (call.model_id, call.seq_id, call.loss) == ("m", 2, "ppo")
    assert call.forward_only is forward_only
    assert call.config == {"clip_low_threshold": 0.75}
    (datum,) = call.data
    assert datum.tokens.tolist() == [1, 2]
    assert datum.inputs["weights"].dtype == np.float32
    assert datum.inputs["target_tokens"].tolist() == [[0, 0], [0, 7]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": ""}, "model_id: empty"),
        ({"seq_id": -1}, "seq_id: -1"),
        ({"loss_fn": ""}, "loss_fn: empty"),
    ],
    ids=str,
)
def test_a_request_without_its_names_is_refused(change: dict[str, Any], message: str) -> None:
    request = proto_call()
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(WireError, match=message):
        proto_forms.read_gradient_call(request.SerializeToString())


@pytest.mark.parametrize("body", [b"\xff", b"", b"\x0a\x02\xff\xff"], ids=str)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        proto_forms.read_gradient_call(body)


def test_a_picture_is_refused_and_named() -> None:
    with pytest.raises(WireError, match=r"data\[0\]\.model_input\[1\]: image: .* encoded_text"):
        proto_forms.read_gradient_call(base64.b64decode(IMAGE))


def _little(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("crow_indices", _little(0, 2, 1, 3), "ascend from 0 to 3"),
        ("crow_indices", _little(0, 1, 1, 4), "ascend from 0 to 3"),
        ("crow_indices", _little(0, 1, 3), "give 4 numbers"),
        ("crow_indices", _little(0, 2**63 - 1, -2, 3), "ascend"),
        ("crow_indices", b"", "give 4 numbers"),
        ("col_indices", _little(2, 0, 4), "from 0 to 3"),
        ("col_indices", _little(2, 3, 0), "ascend inside each row"),
        ("col_indices", _little(-1, 0, 3), "from 0 to 3"),
        ("col_indices", _little(2, 0), "2 numbers: give 3"),
        ("col_indices", b"\0" * 9, "9 bytes"),
        ("values", b"\0" * 11, "11 bytes"),
    ],
)
def test_a_sparse_tensor_that_is_none_is_refused(name: str, value: bytes, message: str) -> None:
    request = proto_call()
    setattr(request.data[0].loss_fn_inputs["weights"].sparse_csr, name, value)
    with pytest.raises(WireError, match=rf"data\[0\]\.loss_fn_inputs\.weights\.\w+: .*{message}"):
        proto_forms.read_gradient_call(request.SerializeToString())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": tinker_pb2.TINKER_DTYPE_BFLOAT16}, "dtype: 4: send DTYPE_FLOAT32"),
        ({"dtype": 77}, "dtype: 77"),
        ({"dense": b"\0" * 7}, "7 bytes: send whole numbers of 4 bytes"),
        ({"shape": [2]}, "it has 1 elements"),
        ({"shape": [-1]}, "sizes of 0 or more"),
        ({"shape": [2**62, 0]}, "bytes when dense"),
        ({"shape": [1] * 33}, "up to 32 sizes"),
    ],
    ids=str,
)
def test_a_dense_tensor_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    request = proto_call()
    tensor = request.data[1].loss_fn_inputs["weights"]
    for name, value in change.items():
        if name == "shape":
            tensor.shape[:] = value
        else:
            setattr(tensor, name, value)
    with pytest.raises(WireError, match=message):
        proto_forms.read_gradient_call(request.SerializeToString())


def test_a_sparse_tensor_cannot_ask_for_more_than_a_call_may_take() -> None:
    request = proto_call()
    for datum in request.data:
        tensor = datum.loss_fn_inputs["weights"]
        tensor.sparse_csr.values = tensor.sparse_csr.col_indices = b""
        tensor.sparse_csr.crow_indices = _little(0, 0)
        tensor.shape[:] = [1, 2**20]
    request.data[1].loss_fn_inputs["weights"].shape[1] = 2**28
    with pytest.raises(WireError, match=r"data\[1\]\.loss_fn_inputs\.weights\.shape: .* dense"):
        proto_forms.read_gradient_call(request.SerializeToString())


@pytest.mark.parametrize(
    ("offset", "length", "sequence_id", "message"),
    [
        (-1, 3, "s", r"model_input_spans\[0\]\.offset: -1"),
        (0, -3, "s", r"model_input_spans\[0\]\.length: -3"),
        (0, 3, "", r"model_input_spans\[0\]\.sequence_id: empty"),
        (0, 2, "s", "model_input_spans: 2 tokens: let them cover all 3"),
    ],
)
def test_a_span_that_covers_nothing_is_refused(
    offset: int, length: int, sequence_id: str, message: str
) -> None:
    request = proto_call()
    span = request.data[0].model_input_spans.add().prompt_tokens
    span.offset, span.length, span.sequence_id = offset, length, sequence_id
    with pytest.raises(WireError, match=message):
        proto_forms.read_gradient_call(request.SerializeToString())


def test_a_field_of_a_later_client_is_refused() -> None:
    # Field 15, a varint.
    with pytest.raises(WireError, match="field 15"):
        proto_forms.read_gradient_call(base64.b64decode(SPARSE) + b"\x78\x01")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((), "no tokens"), ((3, -1), "-1: give ids"), ((0,) * 5, "more than 4 tokens")],
    ids=["none", "negative", "many"],
)
def test_tokens_are_bounded(
    tokens: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MOST_TOKENS", 4)
    request = proto_call()
    request.data[0].model_input[0].encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    with pytest.raises(WireError, match=message):
        proto_forms.read_gradient_call(request.SerializeToString())
    chunks = [{"tokens": list(tokens)}]
    body = json_call(("data", 0, "model_input", "chunks"), chunks)
    with pytest.raises(WireError, match=message):
        json_forms.read_gradient_call(body, forward_only=False)


def test_data_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MOST_DATA", 1)
    with pytest.raises(WireError, match="2 data: send 1 to 1"):
        proto_forms.read_gradient_call(base64.b64decode(SPARSE))
    with pytest.raises(WireError, match="0 data"):
        json_forms.read_gradient_call(json_call(("data",), []), forward_only=False)


WEIGHTS = ("data", 0, "loss_fn_inputs", "weights")
CHUNK = ("data", 0, "model_input", "chunks", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*WEIGHTS, "dtype"), "float16", "weights.dtype: float16: give one of"),
        ((*WEIGHTS, "dtype"), "int64", "flat list of numbers of int64"),
        ((*WEIGHTS, "data"), [1.0, None], "flat list of numbers of float32"),
        ((*WEIGHTS, "data"), ["1", "2"], "flat list"),
        ((*WEIGHTS, "data"), [True, False], "flat list"),
        ((*WEIGHTS, "data"), [[1.0, 2.0]], "flat list"),
        ((*WEIGHTS, "data"), [[1.0], 2.0], "flat list"),
        ((*WEIGHTS, "data"), [1.0], "it has 1 elements"),
        ((*WEIGHTS, "shape"), [-2], "from 0 to"),
        ((*WEIGHTS, "sparse_crow_indices"), [0, 2], "sparse_col_indices: None: give a JSON list"),
        ((*WEIGHTS, "pad"), 3, "weights.pad: 3: this server does not know"),
        (("data", 0, "loss_fn_inputs"), None, "loss_fn_inputs: None: give a JSON object"),
        ((*CHUNK, "tokens"), [1, 2**63], "flat list of numbers of int64"),
        ((*CHUNK, "tokens"), [10**40], "flat list of numbers of int64"),
        ((*CHUNK, "type"), "image", r"chunks\[0\]\.type: image: .* encoded_text"),
        (("loss_fn",), 3, "loss_fn: 3"),
        (("loss_fn_config", "clip"), True, "loss_fn_config.clip: True"),
        (("loss_fn_config", "clip"), 10**400, "loss_fn_config.clip: 1000"),
        (("data",), {}, "data: {}: give a JSON list"),
    ],
)
def test_wrong_data_of_the_older_client_are_refused(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        json_forms.read_gradient_call(json_call(path, value), forward_only=False)


@pytest.mark.parametrize("encoding", [None, "", "identity"])
def test_a_plain_body_is_taken_as_it_is(encoding: str | None) -> None:
    assert proto_forms.decompress(b"abc", encoding) == b"abc"


def test_a_compressed_body_and_a_huge_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match=r"Content-Encoding: zstd: .* proto_compress_fwdbwd off"):
        proto_forms.decompress(b"abc", "zstd")
    monkeypatch.setattr(proto_forms, "MOST_BODY_BYTES", 2)
    with pytest.raises(WireError, match="3 bytes: send at most 2"):
        proto_forms.decompress(b"abc", None)


# --- samples ----------------------------------------------------------------------------------


def test_a_sample_call_of_the_newer_client_is_read() -> None:
    call = json_forms.read_sample_call(SAMPLE)
    assert call.prompt.tolist() == [1, 2, 3]
    assert (call.sampling_session_id, call.seq_id) == ("s", 22801844000000000)
    assert (call.base_model, call.model_path, call.num_samples) == (None, None, 2)
    assert call.params == forms.SamplingParams(
        max_tokens=8, seed=7, stop=("\n",), temperature=0.5, top_k=3, top_p=0.9
    )
    assert call.prompt_logprobs
    assert call.record_stability_info
    assert (call.topk_prompt_logprobs, call.topk_sample_logprobs) == (2, 0)
    assert (call.prompt_alt_tokens_k, call.prompt_logprobs_last_n) == (0, 1)
    assert call.target_prompt_logprobs is not None
    # What is not listed asks for nothing, which a dense tensor says with -1.
    assert call.target_prompt_logprobs.values.tolist() == [[-1, -1], [-1, 5]]
    assert call.target_prompt_logprobs.listed().tolist() == [5]


def test_a_sample_call_of_the_older_client_is_read() -> None:
    call = json_forms.read_sample_call(SMALL_SAMPLE)
    assert call.params == forms.SamplingParams(stop=())
    assert (call.num_samples, call.seq_id, call.prompt_logprobs) == (1, 0, False)
    assert call.target_prompt_logprobs is None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, None), ("a", ("a",)), (["a", "b"], ("a", "b")), ([7, 8], (7, 8)), ([], ())],
    ids=str,
)
def test_each_form_of_a_stop_is_read(stop: object, expected: object) -> None:
    body = changed(SMALL_SAMPLE, ("sampling_params", "stop"), stop)
    assert json_forms.read_sample_call(body).params.stop == expected


@pytest.mark.parametrize("names", [("base_model",), ("model_path",), ("base_model", "model_path")])
def test_a_model_may_stand_in_place_of_a_session(names: tuple[str, ...]) -> None:
    body = {
        key: value
        for key, value in SMALL_SAMPLE.items()
        if key not in ("sampling_session_id", "seq_id")
    }
    call = json_forms.read_sample_call(body | dict.fromkeys(names, "x"))
    assert call.seq_id is None
    assert [name for name in ("base_model", "model_path") if getattr(call, name)] == list(names)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_samples",), 0, "num_samples: 0: give a whole number from 1"),
        (("num_samples",), 1.0, "num_samples"),
        (("seq_id",), None, "seq_id: null"),
        (("seq_id",), True, "seq_id: True"),
        (("seq_id",), 2**63, "seq_id"),
        (("sampling_session_id",), None, "sampling_session_id"),
        (("base_model",), "b", "sampling_session_id: .*: give it alone"),
        (("params",), 1, "body.params: 1: this server does not know"),
        (("sample_sequence_ids",), ["a"], "sample_sequence_ids"),
        (("prompt", "chunks"), [], "prompt: no tokens"),
        (("prompt", "chunks", 0), {"type": "dmel", "dmel": ""}, r"chunks\[0\]\.type: dmel"),
        (("prompt_logprobs",), 1, "true or false"),
        (("topk_prompt_logprobs",), -1, "topk_prompt_logprobs: -1"),
        (("prompt_logprobs_last_n",), 3, "from 1 to 2"),
        (("prompt_logprobs_last_n",), 0, "from 1 to 2"),
        (("target_prompt_logprobs", "dtype"), "float32", "ids of tokens as int64"),
        (("target_prompt_logprobs", "shape"), [2, 1], "from 0 to 0"),
        (("prompt", "chunks", 1, "tokens"), [3, 4], r"give \[3, K\]"),
        (("sampling_params",), [], "sampling_params"),
        (("sampling_params", "max_tokens"), 0, "max_tokens: 0"),
        (("sampling_params", "seed"), -1, "seed: -1"),
        (("sampling_params", "temperature"), -0.5, "temperature: -0.5"),
        (("sampling_params", "temperature"), math.inf, "temperature: inf"),
        (("sampling_params", "temperature"), math.nan, "temperature: nan"),
        (("sampling_params", "temperature"), "hot", "temperature: hot"),
        (("sampling_params", "top_k"), 0, "top_k: 0"),
        (("sampling_params", "top_k"), -1.0, "top_k: -1.0"),
        (("sampling_params", "top_p"), 0, "top_p: 0.0"),
        (("sampling_params", "top_p"), 1.5, "top_p: 1.5"),
        (("sampling_params", "min_p"), 0.1, "sampling_params.min_p: 0.1"),
        (("sampling_params", "stop"), ["a", 1], "ids of tokens alone"),
        (("sampling_params", "stop"), "", "not empty"),
        (("sampling_params", "stop"), [1.5], "stop: 1.5"),
    ],
)
def test_a_wrong_sample_call_is_refused(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        json_forms.read_sample_call(changed(SAMPLE, path, value))


def test_the_room_of_a_call_is_one_for_all_its_tensors() -> None:
    room = DenseRoom(24)
    Tensor.of_dense("a", np.zeros(2, np.int64), [], room)
    Tensor.of_dense("b", np.zeros(2, np.float32), [1, 2], room)
    with pytest.raises(WireError, match=r"c\.shape"):
        Tensor.of_dense("c", np.zeros(1, np.float32), [1], room)
