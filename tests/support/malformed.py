"""Malformed requests: drawn from the types of messages, from valid ones, and from plain bytes.

A message made of random bytes is refused at its first one. Most of these are almost right: values
that let a call go deep come from `Known`, and one thing or a few are wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

INTEGERS = (0, 1, -1, 2, 3, 127, 65_536, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "a",
    "\0",
    "x" * 129,
    "x" * 5000,
    "../../etc/passwd",
    "a/../../b",
    "%s%n{0}",
    "\u202e\ufeff\U0001f600",
    "[" * 3000,
    '{"a":' * 200,
    '{"level": 1}',
    "null",
    "1e999",
    "*",
)
WORD = FieldDescriptor

_RANGES = {
    WORD.TYPE_INT32: (-(2**31), 2**31 - 1),
    WORD.TYPE_UINT32: (0, 2**32 - 1),
    WORD.TYPE_FIXED32: (0, 2**32 - 1),
    WORD.TYPE_INT64: (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True)
class Known:
    """What lets a request go deep, by the name of its field or the type of its message."""

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """E.g. {"run_id": ["run"]}."""
    messages: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """E.g. {"ExperienceRef": [one that a service has made]}."""


class Malformed:
    """Draws requests. The same seed and the same `Known` give the same ones.

    Example: `Malformed(7, known).request(GenerateRequest.DESCRIPTOR)` is bytes: of a request for
    the known run with a negative count, of a part of such a one, or of anything at all.
    """

    def __init__(self, seed: int, known: Known) -> None:
        self.random = random.Random(seed)
        self._known = known
        self._sequence = 0

    def request(self, kind: Descriptor, *, is_damaged: bool = False) -> bytes:
        """A serialized request, most probably a wrong one.

        Args:
            kind: Its type.
            is_damaged: Changes the bytes of every one. Otherwise it is half of them.
        """
        drawn = self.random.random()
        if drawn < 0.03:
            return self.random.randbytes(self.random.choice((0, 1, 7, 200)))
        if drawn < 0.04:
            return self._nested(self._seldom_last((90, 500, 20_000)))
        if drawn < 0.05:
            # One of few fields, again and again: parts of a message cost more than their bytes.
            tag = bytes((self.random.randrange(1, 8) << 3 | 2, 0))
            return tag * self._seldom_last((10, 3000, 200_000))
        if drawn < 0.052:
            return b"\x0a" + _varint(5 << 20) + bytes(5 << 20)
        data = self.message(kind).SerializeToString()
        if not data or (drawn < 0.55 and not is_damaged):
            return data
        return self._damaged(data)

    def _seldom_last(self, sizes: tuple[int, int, int]) -> int:
        """The largest costs server or client a hundred times as much as any other message."""
        (size,) = self.random.choices(sizes, (5, 4, 1))
        return size

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A message of this type."""
        message: Any = GetMessageClass(kind)()
        known = self._known.messages.get(kind.name)
        if known and self.random.random() < 0.7:
            message.CopyFrom(self.random.choice(known))
            if self.random.random() < 0.7:
                self._change_one(message)
        else:
            chosen = {oneof.name: self.random.choice(oneof.fields) for oneof in kind.oneofs}
            for each in kind.fields:
                if each.containing_oneof and chosen[each.containing_oneof.name] is not each:
                    continue
                if self.random.random() < 0.8 and depth < 6:
                    self._fill(message, each, depth)
        if kind.name == "OperationKey" and self.random.random() < 0.9:
            # Otherwise nearly every call would be a reused key.
            self._sequence += 1
            message.sequence = self._sequence
        return message

    def json(self, depth: int = 0) -> Any:
        """A value for the body of an HTTP request."""
        drawn = self.random.randrange(9 if depth < 4 else 6)
        if drawn == 0:
            return None
        if drawn == 1:
            return self.random.choice(INTEGERS)
        if drawn == 2:
            return self.random.choice((True, False))
        if drawn == 3:
            return self.random.choice([one for one in FLOATS if math.isfinite(one)])
        if drawn < 6:
            return self.random.choice(TEXTS)
        number = self.random.choice((0, 1, 2, 3, 100 if depth == 0 else 1))
        if drawn == 6:
            return [self.json(depth + 1) for _ in range(number)]
        return {self.random.choice(TEXTS): self.json(depth + 1) for _ in range(number)}

    def damaged_text(self, text: str) -> bytes:
        """A text with something wrong in it."""
        return self._damaged(text.encode()) if text else b"\xff"

    def _fill(self, message: Any, each: FieldDescriptor, depth: int) -> None:
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            value = each.message_type.fields_by_name["value"]
            if value.message_type is None:
                for _ in range(self.random.choice((0, 1, 2, 5))):
                    getattr(message, each.name)[self.random.choice(TEXTS)] = self._scalar(value)
            return
        if not each.is_repeated:
            if each.message_type is None:
                setattr(message, each.name, self._scalar(each))
            else:
                inner = self.message(each.message_type, depth + 1)
                getattr(message, each.name).CopyFrom(inner)
            return
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 30))):
            if each.message_type is None:
                getattr(message, each.name).append(self._scalar(each))
            else:
                getattr(message, each.name).append(self.message(each.message_type, depth + 1))

    def _scalar(self, each: FieldDescriptor) -> Any:
        known = self._known.values.get(each.name)
        if known and self.random.random() < 0.8:
            return self.random.choice(known)
        if each.type == WORD.TYPE_STRING:
            return self.random.choice(TEXTS)
        if each.type == WORD.TYPE_BYTES:
            return self.random.randbytes(self.random.choice((0, 1, 64, 5000)))
        if each.type == WORD.TYPE_BOOL:
            return self.random.random() < 0.5
        if each.type == WORD.TYPE_ENUM:
            numbers = [value.number for value in each.enum_type.values]
            return self.random.choice((*numbers, *numbers, 77, -1))
        if each.type in (WORD.TYPE_DOUBLE, WORD.TYPE_FLOAT):
            return self.random.choice(FLOATS)
        least, greatest = _RANGES[each.type]
        return min(greatest, max(least, self.random.choice(INTEGERS)))

    def _change_one(self, message: Any) -> None:
        """Changes one field somewhere in a message."""
        while True:
            each = self.random.choice(message.DESCRIPTOR.fields)
            value = getattr(message, each.name)
            inner = [value] if each.message_type and not each.is_repeated else []
            if each.message_type and each.is_repeated and not hasattr(value, "items"):
                inner = list(value)
            if not inner or self.random.random() < 0.3:
                break
            message = self.random.choice(inner)
            if not message.DESCRIPTOR.fields:
                return
        message.ClearField(each.name)
        if self.random.random() < 0.8:
            self._fill(message, each, 4)

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        way, at = self.random.randrange(5), self.random.randrange(len(data))
        if way == 0:
            return bytes(changed[:at])
        if way == 1:
            for _ in range(self.random.choice((1, 1, 2, 8))):
                changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        elif way == 2:
            changed[at:at] = changed[at : at + self.random.randrange(1, 64)]
        elif way == 3:
            changed[at:at] = self.random.randbytes(self.random.choice((1, 4)))
        else:
            # A known field with another wire type, or an unknown one.
            changed += bytes((self.random.randrange(1, 128),)) + _varint(
                self.random.getrandbits(63)
            )
        return bytes(changed)

    def _nested(self, depth: int) -> bytes:
        value = b""
        for _ in range(depth):
            value = bytes((self.random.randrange(1, 4) << 3 | 2,)) + _varint(len(value)) + value
            if len(value) > 1 << 16:
                break
        return value


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return encoded + bytes((value,))
