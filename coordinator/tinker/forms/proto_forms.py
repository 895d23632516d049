"""Calls of Tinker's protocol as protobuf: data from clients from 0.25 on, and answers to those.

They send JSON for samples as well, which `json_forms` reads, and take protobuf alone as an answer
to samples and data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rolemesh.coordinator.tinker.forms.forms import (
    Datum,
    DenseRoom,
    GradientCall,
    GradientResult,
    Ints,
    ProvenanceSpan,
    SampledSequence,
    SampleResult,
    Tensor,
    TopkLogprobs,
    WireError,
    check_num_data,
    chunk_refused,
    join_chunks,
    make_datum,
    make_span,
)
from rolemesh.v1 import tinker_pb2

MOST_BODY_BYTES = 2**30
"""A body, decompressed."""

_OUTPUT = "ArrayRecord"
_DTYPES = {tinker_pb2.TINKER_DTYPE_FLOAT32: "<f4", tinker_pb2.TINKER_DTYPE_INT64: "<i8"}


def decompress(body: bytes, encoding: str | None) -> bytes:
    """Take a body out of its Content-Encoding.

    Only "identity" is served, or none: Python 3.11 has no zstd, and nothing that a coordinator
    installs does.

    Raises:
        WireError: it is of another encoding, or longer than `MOST_BODY_BYTES`.
    """
    if encoding not in (None, "", "identity"):
        raise WireError(
            "Content-Encoding",
            encoding,
            "send bodies as they are: this server leaves proto_compress_fwdbwd off",
        )
    if len(body) > MOST_BODY_BYTES:
        raise WireError("body", f"{len(body)} bytes", f"send at most {MOST_BODY_BYTES}")
    return body


def read_gradient_call(body: bytes) -> GradientCall:
    """Read the body of POST forward_backward, a `TinkerForwardBackwardRequest`.

    Raises:
        WireError: the client did something wrong.
    """
    message = _parsed(body)
    _refuse_unknown("body", message)
    for name in ("model_id", "loss_fn"):
        if not getattr(message, name):
            raise WireError(name, "empty", "give a text that is not empty")
    if message.seq_id < 0:
        raise WireError("seq_id", message.seq_id, "give 1 or more, in the order of the calls")
    check_num_data(len(message.data))
    room = DenseRoom()
    return GradientCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(
            _read_datum(f"data[{at}]", datum, room) for at, datum in enumerate(message.data)
        ),
        loss=message.loss_fn,
        config=_read_config(message),
        forward_only=message.forward_only,
    )


def ids_of(body: bytes) -> tuple[str, int]:
    """Model and number of a call that may be wrong otherwise; raises WireError where it is none."""
    message = _parsed(body)
    return message.model_id, message.seq_id


def _parsed(body: bytes) -> tinker_pb2.TinkerForwardBackwardRequest:
    message = tinker_pb2.TinkerForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise WireError(
            "body", f"{len(body)} bytes", "send a ForwardBackwardRequest as protobuf"
        ) from None
    return message


def write_gradient_result(result: GradientResult) -> bytes:
    """Write a `TinkerForwardBackwardOutput`: a record for each run of data of one K."""
    message = tinker_pb2.TinkerForwardBackwardOutput(
        loss_fn_output_type=_OUTPUT, metrics=dict(result.metrics)
    )
    for trailing_shape, run in groupby(result.logprobs, lambda logprobs: logprobs.shape[1:]):
        parts = [logprobs.astype("<f4").tobytes() for logprobs in run]
        offsets = np.zeros(len(parts) + 1, "<i8")
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT, num_datums=len(parts))
        record.fields["logprobs"].CopyFrom(
            tinker_pb2.TinkerBatchedTensor(
                data=b"".join(parts),
                offsets=offsets.tobytes(),
                dtype=tinker_pb2.TINKER_DTYPE_FLOAT32,
                trailing_shape=trailing_shape,
            )
        )
    return message.SerializeToString()


def write_sample_result(result: SampleResult) -> bytes:
    """Write a `TinkerSampleResponse`."""
    message = tinker_pb2.TinkerSampleResponse(
        sequences=[_sequence_message(sequence) for sequence in result.sequences],
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
    )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk_message(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_tensor_message(result.target_prompt_logprobs))
    if (drawn := result.prompt_alt_tokens) is not None:
        message.prompt_alt_tokens.CopyFrom(
            tinker_pb2.TinkerPromptAltTokens(
                tokens=tinker_pb2.TinkerTensor(
                    dense=drawn.token_ids.astype("<i4").tobytes(),
                    dtype=tinker_pb2.TINKER_DTYPE_INT32,
                    shape=drawn.token_ids.shape,
                ),
                logprobs=_tensor_message(Tensor(drawn.logprobs)),
            )
        )
    return message.SerializeToString()


def _sequence_message(sequence: SampledSequence) -> tinker_pb2.TinkerSampledSequence:
    message = tinker_pb2.TinkerSampledSequence(
        stop_reason=(
            tinker_pb2.TINKER_STOP_REASON_STOP
            if sequence.is_stopped
            else tinker_pb2.TINKER_STOP_REASON_LENGTH
        ),
        tokens=sequence.tokens.astype("<i4").tobytes(),
    )
    if sequence.logprobs is not None:
        message.logprobs = sequence.logprobs.astype("<f4").tobytes()
    if sequence.topk is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk_message(sequence.topk))
    return message


def _topk_message(topk: TopkLogprobs) -> tinker_pb2.TinkerTopkLogprobs:
    length, k = topk.token_ids.shape
    return tinker_pb2.TinkerTopkLogprobs(
        token_ids=topk.token_ids.astype("<i4").tobytes(),
        logprobs=topk.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _tensor_message(tensor: Tensor) -> tinker_pb2.TinkerTensor:
    """float32, with the cells listed as the tensor says."""
    values = tensor.listed().astype("<f4").tobytes()
    message = tinker_pb2.TinkerTensor(
        dtype=tinker_pb2.TINKER_DTYPE_FLOAT32, shape=tensor.values.shape
    )
    if tensor.crow_indices is None or tensor.col_indices is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = tensor.crow_indices.astype("<i8").tobytes()
        message.sparse_csr.col_indices = tensor.col_indices.astype("<i8").tobytes()
    return message


def _read_config(message: tinker_pb2.TinkerForwardBackwardRequest) -> dict[str, float | str]:
    """The newer map where it is set: it says the same of numbers, and has texts too."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise WireError(f"loss_fn_config_v2.{key}", "empty", "give a number or a text")
        config[key] = value.number if kind == "number" else value.text
    return config


def _read_datum(name: str, datum: tinker_pb2.TinkerDatum, room: DenseRoom) -> Datum:
    _refuse_unknown(name, datum)
    return make_datum(
        name,
        join_chunks(f"{name}.model_input", _read_chunks(f"{name}.model_input", datum.model_input)),
        {
            key: _read_tensor(f"{name}.loss_fn_inputs.{key}", tensor, room)
            for key, tensor in datum.loss_fn_inputs.items()
        },
        _read_spans(f"{name}.model_input_spans", datum.model_input_spans),
        _read_spans(f"{name}.loss_fn_input_spans", datum.loss_fn_input_spans),
    )


def _read_chunks(name: str, chunks: Iterable[tinker_pb2.TinkerChunk]) -> Iterator[Ints]:
    """int64 [n] each."""
    for at, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise chunk_refused(f"{name}[{at}]", kind or "a kind that is not known here")
        yield _numbers(f"{name}[{at}].tokens", chunk.encoded_text.tokens, "<i4").astype(np.int64)


def _read_tensor(name: str, tensor: tinker_pb2.TinkerTensor, room: DenseRoom) -> npt.NDArray[Any]:
    """float32 or int64 of the shape that it says; cells that are not listed are 0."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WireError(f"{name}.dtype", tensor.dtype, "send DTYPE_FLOAT32 or DTYPE_INT64")
    encoding = tensor.WhichOneof("encoding")
    if encoding == "dense":
        values = _numbers(name, tensor.dense, dtype)
        return Tensor.of_dense(name, values, tensor.shape, room).values
    if encoding is None:
        raise WireError(name, "no values", "send them as dense or sparse_csr")
    csr = tensor.sparse_csr
    return Tensor.of_csr(
        name,
        _numbers(f"{name}.values", csr.values, dtype),
        _numbers(f"{name}.crow_indices", csr.crow_indices, "<i8"),
        _numbers(f"{name}.col_indices", csr.col_indices, "<i8"),
        tensor.shape,
        room,
    ).values


def _read_spans(
    name: str, spans: Iterable[tinker_pb2.TinkerProvenanceSpan]
) -> tuple[ProvenanceSpan, ...]:
    read = []
    for at, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise WireError(f"{name}[{at}]", "empty", "give prompt_tokens or sampled_tokens")
        is_sampled = kind == "sampled_tokens"
        run = span.sampled_tokens if is_sampled else span.prompt_tokens
        read.append(
            make_span(
                f"{name}[{at}]", run.sequence_id, run.offset, run.length, is_sampled=is_sampled
            )
        )
    return tuple(read)


def _numbers(name: str, data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Little-endian numbers as an array of their own, [n], in the machine's order of bytes."""
    item_bytes = np.dtype(dtype).itemsize
    if len(data) % item_bytes:
        raise WireError(
            name, f"{len(data)} bytes", f"send whole numbers of {item_bytes} bytes each"
        )
    return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="))


def _refuse_unknown(name: str, message: Message) -> None:
    """Refuse fields that only a newer client has: they could change the result."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise WireError(
            name,
            f"field {unknown[0].field_number}",
            "this server does not know it: use a client up to 0.38",
        )
