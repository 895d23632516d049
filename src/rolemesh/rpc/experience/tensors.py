"""Element types of tensors on the wire: their numbers, names and widths."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rolemesh.engine.layout import payload
from rolemesh.v1 import tensor_pb2

_BY_NAME: Mapping[str, tensor_pb2.DataType.ValueType] = MappingProxyType(
    {name: tensor_pb2.DataType.Value(f"DATA_TYPE_{name.upper()}") for name in payload.ITEM_BYTES}
)

NAMES: Mapping[int, str] = MappingProxyType({number: name for name, number in _BY_NAME.items()})
"""Names of element types, e.g. "bfloat16", by DataType."""

ITEM_BYTES: Mapping[tensor_pb2.DataType.ValueType, int] = MappingProxyType(
    {number: payload.ITEM_BYTES[name] for name, number in _BY_NAME.items()}
)
"""Bytes of one element by DataType."""


def data_type_of(name: str) -> tensor_pb2.DataType.ValueType:
    """The DataType of a dtype's name, e.g. "torch.bfloat16" or "bfloat16".

    Raises:
        ValueError: It may not travel.
    """
    number = _BY_NAME.get(name.removeprefix("torch."))
    if number is None:
        raise ValueError(f"dtype {name!r} may not travel: use one of {sorted(_BY_NAME)}")
    return number
