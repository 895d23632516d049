"""Messages of coordinator.proto as plain JSON values, by their descriptors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rolemesh.v1 import coordinator_pb2

_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


def to_plain(message: Message) -> dict[str, Any]:
    """The message as JSON values, under the names of the proto.

    Returns:
        Every field: Timestamp as RFC 3339 text, an enum value as its lower-case word, NaN and
        infinities as None, an absent field as None. Of a oneof only the member that is set.
    """
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            plain[field.name] = _to_plain_many(field, value)
        elif not field.has_presence or message.HasField(field.name):
            plain[field.name] = _to_plain_one(field, value)
        elif not _is_of_oneof(field):
            plain[field.name] = None
    return plain


def to_metrics(answer: coordinator_pb2.GetMetricsResponse) -> dict[str, Any]:
    """Metrics with their series by name, and None where all steps were sent."""
    return {
        "steps": list(answer.steps),
        "series": {one.name: _finite(one.values) for one in answer.series},
        "next_step": answer.next_step or None,
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    # One sum instead of one test for each value, since a whole run may be sent at once.
    if math.isfinite(sum(values)):
        return list(values)
    return [value if math.isfinite(value) else None for value in values]


def _is_of_oneof(field: Any) -> bool:
    # proto3 writes `optional x` as a oneof named "_x" around x alone.
    oneof = field.containing_oneof
    return oneof is not None and oneof.name != f"_{field.name}"


def _to_plain_many(field: Any, values: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = field.message_type.fields_by_name["value"]
        return {key: _to_plain_one(of_value, values[key]) for key in values}
    if field.message_type is None and field.cpp_type not in _FLOATS and field.enum_type is None:
        return list(values)
    return [_to_plain_one(field, value) for value in values]


def _to_plain_one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _to_text(value) if isinstance(value, Timestamp) else to_plain(value)
    if field.enum_type is not None:
        # RUN_STATE_RUNNING of RunState: the prefix is as long as that of the zero value.
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return field.enum_type.values_by_number[value].name.removeprefix(prefix).lower()
    if field.cpp_type in _FLOATS and not math.isfinite(value):
        return None
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        # Nine digits distinguish all float32 values; further digits belong to the float64 only.
        return float(f"{value:.9g}")
    return value


def _to_text(time: Timestamp) -> str:
    return time.ToDatetime().isoformat(timespec="microseconds") + "Z"
