"""Typed tensor bytes: the width table and the check that every receiver makes first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rolemesh.v1 import tensor_pb2

ITEM_BYTES: Mapping[tensor_pb2.DataType.ValueType, int] = MappingProxyType(
    {
        tensor_pb2.DATA_TYPE_FLOAT32: 4,
        tensor_pb2.DATA_TYPE_BFLOAT16: 2,
        tensor_pb2.DATA_TYPE_FLOAT16: 2,
        tensor_pb2.DATA_TYPE_FLOAT64: 8,
        tensor_pb2.DATA_TYPE_INT64: 8,
        tensor_pb2.DATA_TYPE_INT32: 4,
        tensor_pb2.DATA_TYPE_UINT8: 1,
        tensor_pb2.DATA_TYPE_BOOL: 1,
    }
)
"""Bytes of one element by DataType."""

_BY_NAME: Mapping[str, tensor_pb2.DataType.ValueType] = MappingProxyType(
    {
        tensor_pb2.DataType.Name(number).removeprefix("DATA_TYPE_").lower(): number
        for number in ITEM_BYTES
    }
)

MAX_DIMENSIONS = 16
"""More dimensions are refused: no tensor here has them, and a bound keeps the product cheap."""


class TensorMalformedError(ValueError):
    """The bytes of a tensor do not fit its shape and dtype."""


def data_type_of(name: str) -> tensor_pb2.DataType.ValueType:
    """The DataType of a dtype's name, e.g. "torch.bfloat16" or "bfloat16".

    Raises:
        ValueError: it may not travel.
    """
    number = _BY_NAME.get(name.removeprefix("torch."))
    if number is None:
        raise ValueError(f"dtype {name!r} may not travel: use one of {sorted(_BY_NAME)}")
    return number


def check_tensor(tensor: tensor_pb2.Tensor, field: str) -> bytes:
    """Checks a tensor before its bytes are touched and returns them, read once.

    Args:
        tensor: as it came from the wire.
        field: its name, for the message.

    Raises:
        TensorMalformedError: dtype, shape and number of bytes do not fit.
    """
    data = tensor.data
    check_tensor_bytes(tensor.dtype, tensor.shape, len(data), field)
    return data


def check_tensor_bytes(
    dtype: tensor_pb2.DataType.ValueType, shape: Sequence[int], num_bytes: int, field: str
) -> None:
    """Checks product(shape) * item size == num_bytes.

    Raises:
        TensorMalformedError: they do not fit.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise TensorMalformedError(
            f"{field}: dtype is {dtype}, which is no DataType that may travel: "
            f"use one of {sorted(ITEM_BYTES)}"
        )
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise TensorMalformedError(
            f"{field}: shape is {list(shape)}: give at most {MAX_DIMENSIONS} sizes, each >= 0"
        )
    expected = math.prod(shape) * item_bytes
    if expected != num_bytes:
        name = tensor_pb2.DataType.Name(dtype)
        raise TensorMalformedError(
            f"{field}: shape {list(shape)} of {name} needs {expected} bytes, but {num_bytes} came: "
            "send row-major elements without padding"
        )
