"""TensorBoard event files for scalars, written without torch.

The usual writers import torch whenever it is installed, which the coordinator must not. An event
file is a TFRecord file of `Event` messages; for scalars a few protobuf fields are all of it
(event.proto and summary.proto of TensorFlow): Event {wall_time = 1, step = 2, file_version = 3,
summary = 5}, Summary {value = 1}, Value {tag = 1, simple_value = 2}.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CASTAGNOLI = 0x82F63B78  # reflected polynomial of CRC-32C
_MASK_DELTA = 0xA282EAD8  # TFRecord stores a rotated CRC plus this


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, wire_type: int, data: bytes) -> bytes:
    length = _varint(len(data)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + data


class ScalarWriter:
    """Appends scalars to one event file, which the first of them makes.

    Invariant: every record is whole once `write` returns, so that a reader may follow the file.

    Example::

        ScalarWriter(folder).write(3, {"reward/mean": 0.25})
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file: BinaryIO | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends scalars of one step (>= 0)."""
        values = b"".join(
            _field(
                1,
                _BYTES,
                _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", value)),
            )
            for tag, value in scalars.items()
        )
        self._append(
            _field(1, _FIXED64, struct.pack("<d", time.time()))
            + _field(2, _VARINT, _varint(step))
            + _field(5, _BYTES, values)
        )

    def _append(self, event: bytes) -> None:
        if self._file is None:
            self._file = self._opened()
        self._file.write(_record(event))
        self._file.flush()

    def _opened(self) -> BinaryIO:
        now = time.time()
        # TensorBoard looks for this name and orders files by the time in it.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.0"
        file = (self._folder / name).open("ab")
        version = _field(3, _BYTES, b"brain.Event:2")
        file.write(_record(_field(1, _FIXED64, struct.pack("<d", now)) + version))
        return file

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
