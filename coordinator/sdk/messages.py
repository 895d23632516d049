"""Values from messages: a dataclass states its fields, and the message is read by their names."""

from __future__ import annotations

import dataclasses
import datetime
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message

Value = TypeVar("Value")


def from_message(kind: type[Value], message: Message, **given: Any) -> Value:
    """The value that a message stands for.

    Args:
        kind: A dataclass. Each of its fields has the name of a field of the message; a timestamp
            is read as a datetime in UTC, a map as a read-only mapping, what is repeated as a tuple,
            and an optional number that is absent as None.
        message: What was sent.
        given: Fields that the message tells in another form.
    """
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in given:
            given[field.name] = _read(message, field.name)
    return kind(**given)


def word(enum: Any, number: int) -> str:
    """An enum value as a lower-case word, without the prefix that all values of the enum share."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower()


def to_time(timestamp: timestamp_pb2.Timestamp) -> datetime.datetime:
    """A time, in UTC."""
    return timestamp.ToDatetime(datetime.UTC)


def _read(message: Message, name: str) -> Any:
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.is_repeated:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        return MappingProxyType(dict(value)) if is_map else tuple(value)
    if isinstance(value, timestamp_pb2.Timestamp):
        return to_time(value)
    return value if not field.has_presence or message.HasField(name) else None
