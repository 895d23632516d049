"""Calls of Tinker's protocol as JSON: samples from all clients, data from those before 0.25.

Bodies are what `json.loads` makes of them. A field that is not known here is refused unless it is
null: it could change the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.tinker.forms.forms import (
    EMPTY_LOGPROB,
    Datum,
    DenseRoom,
    GradientCall,
    GradientResult,
    Ints,
    SampleCall,
    SampledSequence,
    SampleResult,
    SamplingParams,
    Tensor,
    TopkLogprobs,
    WireError,
    check_num_data,
    chunk_refused,
    join_chunks,
    make_datum,
)

MOST_SAMPLES = 4096
"""Samples of one call."""

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "int64": np.int64}
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_SAMPLE_FIELDS = frozenset(field.name for field in fields(SampleCall)) - {"params"} | {
    "sampling_params",
    "type",
}


def read_gradient_call(body: object, *, forward_only: bool) -> GradientCall:
    """Read the body of POST forward_backward, or of POST forward with `forward_only`.

    Raises:
        WireError: the client did something wrong.
    """
    name = "forward_input" if forward_only else "forward_backward_input"
    whole = _object("body", body, (name, "model_id", "seq_id"))
    inner = _object(name, whole.get(name), ("data", "loss_fn", "loss_fn_config"))
    data = _list("data", inner.get("data"))
    check_num_data(len(data))
    room = DenseRoom()
    config = inner.get("loss_fn_config")
    return GradientCall(
        model_id=_text("model_id", whole.get("model_id")),
        seq_id=_optional_integer("seq_id", whole.get("seq_id"), 0, _INT32) or 0,
        data=tuple(_read_datum(f"data[{at}]", datum, room) for at, datum in enumerate(data)),
        loss=_text("loss_fn", inner.get("loss_fn")),
        config={
            key: value if isinstance(value, str) else _number(f"loss_fn_config.{key}", value)
            for key, value in _object("loss_fn_config", {} if config is None else config).items()
        },
        forward_only=forward_only,
    )


def read_sample_call(body: object) -> SampleCall:
    """Read the body of POST asample.

    Raises:
        WireError: the client did something wrong.
    """
    whole = _object("body", body, _SAMPLE_FIELDS)
    prompt = _read_model_input("prompt", whole.get("prompt"))
    names = ("sampling_session_id", "base_model", "model_path")
    given = {name: _text(name, whole[name]) for name in names if whole.get(name) is not None}
    if not given or ("sampling_session_id" in given and len(given) > 1):
        raise WireError(
            "sampling_session_id", given, "give it alone, or one or both of base_model, model_path"
        )
    seq_id = _optional_integer("seq_id", whole.get("seq_id"), 0, _INT64)
    if "sampling_session_id" in given and seq_id is None:
        raise WireError("seq_id", "null", "give the number of the call in its sampling session")
    return SampleCall(
        prompt=prompt,
        params=_read_sampling_params(whole.get("sampling_params")),
        num_samples=_optional_integer("num_samples", whole.get("num_samples"), 1, MOST_SAMPLES)
        or 1,
        sampling_session_id=given.get("sampling_session_id"),
        seq_id=seq_id,
        base_model=given.get("base_model"),
        model_path=given.get("model_path"),
        prompt_logprobs=_flag("prompt_logprobs", whole.get("prompt_logprobs")),
        topk_prompt_logprobs=_count("topk_prompt_logprobs", whole),
        topk_sample_logprobs=_count("topk_sample_logprobs", whole),
        target_prompt_logprobs=_read_targets(whole.get("target_prompt_logprobs"), len(prompt)),
        prompt_alt_tokens_k=_count("prompt_alt_tokens_k", whole),
        prompt_logprobs_last_n=_read_last_n(whole, len(prompt)),
        record_stability_info=_flag("record_stability_info", whole.get("record_stability_info")),
    )


def write_gradient_result(result: GradientResult) -> dict[str, Any]:
    """Write what clients before 0.25 read as the result of forward_backward and forward.

    Raises:
        ValueError: a number is not finite. JSON has no form for it that these clients read.
    """
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": _write_tensor(f"logprobs of datum {at}", Tensor(logprobs))}
            for at, logprobs in enumerate(result.logprobs)
        ],
        "metrics": {
            name: _finite(f"metric {name}", np.float64(value))
            for name, value in result.metrics.items()
        },
    }


def write_sample_result(result: SampleResult) -> dict[str, Any]:
    """Write what clients before 0.25 read as the result of asample.

    What they cannot ask for is written under the names that newer clients have for it.

    Raises:
        ValueError: a log-prob is not finite, but for NaN in prompt_logprobs, which is null.
    """
    written: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            _write_sequence(f"sequence {at}", sequence)
            for at, sequence in enumerate(result.sequences)
        ],
    }
    if (logprobs := result.prompt_logprobs) is not None:
        is_none = np.isnan(logprobs)
        numbers = _finite("prompt_logprobs", np.where(is_none, 0, logprobs))
        written["prompt_logprobs"] = [
            None if none else number for none, number in zip(is_none, numbers, strict=True)
        ]
    if result.topk_prompt_logprobs is not None:
        written["topk_prompt_logprobs"] = _write_topk(
            "topk_prompt_logprobs", result.topk_prompt_logprobs
        )
    if result.target_prompt_logprobs is not None:
        written["target_prompt_logprobs"] = _write_tensor(
            "target_prompt_logprobs", result.target_prompt_logprobs
        )
    if (drawn := result.prompt_alt_tokens) is not None:
        written["prompt_alt_tokens"] = {
            "tokens": _write_tensor("prompt_alt_tokens", Tensor(drawn.token_ids)),
            "logprobs": _write_tensor("prompt_alt_tokens", Tensor(drawn.logprobs)),
        }
    if result.prompt_cache_hit_tokens:
        written["prompt_cache_hit_tokens"] = result.prompt_cache_hit_tokens
    return written


def _write_sequence(name: str, sequence: SampledSequence) -> dict[str, Any]:
    written: dict[str, Any] = {
        "stop_reason": "stop" if sequence.is_stopped else "length",
        "tokens": sequence.tokens.tolist(),
    }
    if sequence.logprobs is not None:
        written["logprobs"] = _finite(f"logprobs of {name}", sequence.logprobs)
    if sequence.topk is not None:
        written["topk_logprobs"] = _write_topk(f"topk of {name}", sequence.topk)
    return written


def _write_topk(name: str, topk: TopkLogprobs) -> list[list[list[float]] | None]:
    """Pairs of token and log-prob for each place; None where all cells are empty."""
    is_empty = (topk.token_ids == 0) & (topk.logprobs == np.float32(EMPTY_LOGPROB))
    places = zip(topk.token_ids.tolist(), _finite(name, topk.logprobs), is_empty, strict=True)
    return [
        [[token, logprob] for token, logprob, none in zip(*place, strict=True) if not none] or None
        for place in places
    ]


def _write_tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    is_float = tensor.values.dtype.kind == "f"
    written: dict[str, Any] = {
        "data": _finite(name, tensor.listed()) if is_float else tensor.listed().tolist(),
        "dtype": "float32" if is_float else "int64",
        "shape": list(tensor.values.shape),
    }
    if tensor.crow_indices is not None and tensor.col_indices is not None:
        written["sparse_crow_indices"] = tensor.crow_indices.tolist()
        written["sparse_col_indices"] = tensor.col_indices.tolist()
    return written


def _finite(name: str, values: npt.NDArray[Any] | np.float64) -> Any:
    """Numbers of float32 [...] or of one float64, in lists."""
    if not np.isfinite(values).all():
        raise ValueError(
            f"{name}: NaN or infinite: JSON has no such number; clients from 0.25 on get protobuf"
        )
    return values.tolist()


def _read_datum(name: str, value: object, room: DenseRoom) -> Datum:
    datum = _object(name, value, ("model_input", "loss_fn_inputs"))
    inputs = _object(f"{name}.loss_fn_inputs", datum.get("loss_fn_inputs"))
    return make_datum(
        name,
        _read_model_input(f"{name}.model_input", datum.get("model_input")),
        {
            key: _read_tensor(f"{name}.loss_fn_inputs.{key}", tensor, room).values
            for key, tensor in inputs.items()
        },
    )


def _read_model_input(name: str, value: object) -> Ints:
    """int64 [T]."""
    chunks = _list(f"{name}.chunks", _object(name, value, ("chunks",)).get("chunks"))

    def read() -> Iterator[Ints]:
        for at, chunk in enumerate(chunks):
            field = f"{name}.chunks[{at}]"
            kind = _object(field, chunk).get("type", "encoded_text")
            if kind != "encoded_text":
                raise chunk_refused(f"{field}.type", str(kind))
            tokens = _object(field, chunk, ("type", "tokens")).get("tokens")
            yield _numbers(f"{field}.tokens", tokens, np.int64)

    return join_chunks(name, read())


def _read_tensor(name: str, value: object, room: DenseRoom, fill: int = 0) -> Tensor:
    names = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
    given = _object(name, value, names)
    dtype = given.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WireError(f"{name}.dtype", dtype, f"give one of {sorted(_DTYPES)}")
    values = _numbers(f"{name}.data", given.get("data"), _DTYPES[dtype])
    sizes = given.get("shape")
    shape = [
        _integer(f"{name}.shape", size, 0, _INT64)
        for size in ([] if sizes is None else _list(f"{name}.shape", sizes))
    ]
    crow, col = given.get("sparse_crow_indices"), given.get("sparse_col_indices")
    if crow is None and col is None:
        return Tensor.of_dense(name, values, shape, room)
    return Tensor.of_csr(
        name,
        values,
        _numbers(f"{name}.sparse_crow_indices", crow, np.int64),
        _numbers(f"{name}.sparse_col_indices", col, np.int64),
        shape,
        room,
        fill,
    )


def _read_targets(value: object, num_prompt: int) -> Tensor | None:
    """int64 [P - 1, K]; cells that are not listed ask for nothing, as those with -1."""
    if value is None:
        return None
    name = "target_prompt_logprobs"
    tensor = _read_tensor(name, value, DenseRoom(), fill=-1)
    if tensor.values.dtype != np.int64:
        raise WireError(f"{name}.dtype", "float32", "give ids of tokens as int64")
    if tensor.values.ndim != 2 or len(tensor.values) != num_prompt - 1:
        raise WireError(
            f"{name}.shape",
            list(tensor.values.shape),
            f"give [{num_prompt - 1}, K]: a row for each token of the prompt but the first",
        )
    return tensor


def _read_last_n(body: Mapping[str, Any], num_prompt: int) -> int | None:
    last = body.get("prompt_logprobs_last_n")
    if last is not None and not body.get("prompt_logprobs"):
        raise WireError("prompt_logprobs_last_n", last, "set prompt_logprobs too, or leave it away")
    return _optional_integer("prompt_logprobs_last_n", last, 1, num_prompt - 1)


def _read_sampling_params(value: object) -> SamplingParams:
    name = "sampling_params"
    given = _object(name, {} if value is None else value, _SAMPLING_FIELDS)
    temperature, top_p = (
        1.0 if given.get(key) is None else _number(f"{name}.{key}", given[key])
        for key in ("temperature", "top_p")
    )
    if not 0 <= temperature < float("inf"):
        raise WireError(f"{name}.temperature", temperature, "give 0 or more")
    if not 0 < top_p <= 1:
        raise WireError(f"{name}.top_p", top_p, "give a number above 0, at most 1")
    top_k = _optional_integer(f"{name}.top_k", given.get("top_k"), -1, _INT32)
    if top_k == 0:
        raise WireError(f"{name}.top_k", top_k, "give 1 or more, or -1 for all tokens")
    return SamplingParams(
        max_tokens=_optional_integer(f"{name}.max_tokens", given.get("max_tokens"), 1, _INT32),
        seed=_optional_integer(f"{name}.seed", given.get("seed"), 0, 2**64 - 1),
        stop=_read_stop(f"{name}.stop", given.get("stop")),
        temperature=temperature,
        top_k=-1 if top_k is None else top_k,
        top_p=top_p,
    )


def _read_stop(name: str, value: object) -> tuple[str, ...] | tuple[int, ...] | None:
    if value is None:
        return None
    ends = [value] if isinstance(value, str) else _list(name, value)
    if all(isinstance(end, str) and end for end in ends):
        return tuple(ends)
    if any(isinstance(end, str) for end in ends):
        raise WireError(name, ends, "give texts that are not empty, or ids of tokens alone")
    return tuple(_integer(name, end, 0, _INT32) for end in ends)


def _numbers(name: str, value: object, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A flat list as int64 or float32 [n]. Of integers no float is taken, even a whole one."""
    given = _list(name, value)
    kinds = "iu" if dtype is np.int64 else "iuf"
    try:
        numbers = np.asarray(given)
    except (ValueError, OverflowError):
        numbers = np.asarray([None])
    if not given:
        return np.zeros(0, dtype)
    # "u" is what 2**63 and above become: integers that int64 does not hold.
    if (
        numbers.ndim != 1
        or numbers.dtype.kind not in kinds
        or (dtype is np.int64 and numbers.dtype.kind == "u")
    ):
        raise WireError(name, given[:16], f"give a flat list of numbers of {dtype.__name__}")
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


def _object(name: str, value: object, known: Collection[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(name, value, "give a JSON object")
    if known is not None:
        for key, inner in value.items():
            if key not in known and inner is not None:
                raise WireError(
                    f"{name}.{key}", inner, "this server does not know the field: leave it away"
                )
    return value


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(name, value, "give a JSON list")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise WireError(name, value, "give a text that is not empty")
    return value


def _flag(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise WireError(name, value, "give true or false")
    return bool(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WireError(name, value, "give a number")
    try:
        return float(value)
    except OverflowError:
        raise WireError(name, value, "give a number that a float64 holds") from None


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise WireError(name, value, f"give a whole number from {low} to {high}")
    return value


def _optional_integer(name: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _count(name: str, body: Mapping[str, Any]) -> int:
    value = body.get(name)
    return 0 if value is None else _integer(name, value, 0, _INT32)
