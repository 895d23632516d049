from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rolemesh.coordinator.trackers.tensorboard import ScalarWriter, crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # RFC 3720, appendix B.4, and the usual check value of the digits.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
    ids=["zeros", "ones", "rising", "digits"],
)
def test_crc32c_has_the_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


def event_class() -> Any:
    """TensorFlow's Event message, as far as scalars go, built at run time."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tf", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    fields = {
        "Value": [("tag", 1, kind.TYPE_STRING), ("simple_value", 2, kind.TYPE_FLOAT)],
        "Summary": [("value", 1, ".tf.Value")],
        "Event": [
            ("wall_time", 1, kind.TYPE_DOUBLE),
            ("step", 2, kind.TYPE_INT64),
            ("file_version", 3, kind.TYPE_STRING),
            ("summary", 5, ".tf.Summary"),
        ],
    }
    for message, members in fields.items():
        described = file.message_type.add(name=message)
        for name, number, type_ in members:
            field = described.field.add(name=name, number=number, label=kind.LABEL_OPTIONAL)
            if isinstance(type_, str):
                field.type, field.type_name = kind.TYPE_MESSAGE, type_
            else:
                field.type = type_
            if message == "Summary":
                field.label = kind.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Event"))


def read_records(data: bytes) -> list[bytes]:
    """TFRecord: u64 length, u32 masked CRC of it, the bytes, u32 masked CRC of them."""

    def unmasked(masked: int) -> int:
        rotated = (masked - 0xA282EAD8) % 2**32
        return (rotated << 15 | rotated >> 17) % 2**32

    records = []
    while data:
        length, length_crc = struct.unpack_from("<QI", data)
        record = data[12 : 12 + length]
        (record_crc,) = struct.unpack_from("<I", data, 12 + length)
        assert unmasked(length_crc) == crc32c(data[:8])
        assert unmasked(record_crc) == crc32c(record)
        records.append(record)
        data = data[16 + length :]
    return records


def test_an_independent_reader_reads_what_was_written(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.25, "kl/mean": -1.5})
    writer.write(300, {"reward/mean": 0.5})
    writer.close()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("events.out.tfevents.")
    first, *events = (event_class().FromString(data) for data in read_records(file.read_bytes()))
    assert first.file_version == "brain.Event:2"
    found = [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
    ]
    assert found == [(1, {"reward/mean": 0.25, "kl/mean": -1.5}), (300, {"reward/mean": 0.5})]
    assert all(event.wall_time > 1e9 for event in events)
