"""Values from messages: a dataclass states its fields, and the message is read by their names."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from types import MappingProxyType
from typing import Any, Self, TypeVar, get_args, get_type_hints

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message

Value = TypeVar("Value")


class FromMessage:
    """Base of a value that is read from one message."""

    __slots__ = ()

    @classmethod
    def of(cls, message: Message) -> Self:
        """From its message."""
        return from_message(cls, message)


def from_message(kind: type[Value], message: Message, **given: Any) -> Value:
    """The value that a message stands for.

    Args:
        kind: A dataclass. Each of its fields has the name of a field of the message; a timestamp
            is read as a datetime in UTC, an enum value as a lower-case word without the prefix that
            all values of the enum share, a map as a read-only mapping, what is repeated as a tuple
            (of the dataclass that the field's type names), and an optional number that is absent as
            None.
        message: What was sent.
        given: Fields that the message tells in another form.
    """
    types = _types(kind)  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in given:
            given[field.name] = _read(message, field.name, types[field.name])
    return kind(**given)


_types = functools.cache(get_type_hints)


def to_time(timestamp: timestamp_pb2.Timestamp) -> datetime.datetime:
    """A time, in UTC."""
    return timestamp.ToDatetime(datetime.UTC)


def _read(message: Message, name: str, kind: Any) -> Any:
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.is_repeated and field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return MappingProxyType(dict(value))
        return tuple(from_message(get_args(kind)[0], one) for one in value)
    if field.is_repeated:
        return tuple(value)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return kind(field.enum_type.values_by_number[value].name.removeprefix(prefix).lower())
    if isinstance(value, timestamp_pb2.Timestamp):
        return to_time(value)
    return value if not field.has_presence or message.HasField(name) else None
