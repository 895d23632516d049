"""The limits of requests: what is beyond one is refused by name, and what is legitimate passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rolemesh.rpc import limits
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.limits import check_json, checked, request_reader
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.v1 import (
    experience_pb2,
    operation_pb2,
    reward_pb2,
    trainer_pb2,
    value_pb2,
    worker_pb2,
)

MOST_SECONDS = 5.0
"""What takes a loop over a number of the message takes years; these take milliseconds."""


def fields_of(kind: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[Any]:
    """Paths to all fields of a message, those of ours inside it included."""
    for field in kind.fields:
        yield (*path, field)
        inner = field.message_type
        is_ours = inner is not None and inner.file.package == "rolemesh.v1"
        if is_ours and not inner.GetOptions().map_entry:
            yield from fields_of(inner, (*path, field))


def inner_message(root: Message, path: tuple[FieldDescriptor, ...]) -> Any:
    message: Any = root
    for field in path:
        value = getattr(message, field.name)
        message = value.add() if field.is_repeated else value
    return message


def too_much(root: Message, path: tuple[FieldDescriptor, ...]) -> bool:
    """Puts one item, or one character, too many into a field; False where a field has no size."""
    *parents, field = path
    message, name = inner_message(root, tuple(parents)), field.name
    known = f"{field.containing_type.name}.{name}"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
            getattr(message, name)["key"] = "x" * (limits.MAX_NAME_CHARACTERS + 1)
        else:
            getattr(message, name).update({str(at): 0 for at in range(limits.MAX_ITEMS + 1)})
    elif field.is_repeated:
        number = limits._COUNTS.get(known, limits.MAX_ITEMS) + 1
        if field.message_type is not None:
            getattr(message, name).extend([GetMessageClass(field.message_type)()] * number)
        else:
            kinds = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BYTES: b"x"}
            item: Any = kinds.get(field.type, 1)
            getattr(message, name).extend([item] * number)
    elif field.type == FieldDescriptor.TYPE_STRING:
        number = limits._CHARACTERS.get(known, limits.MAX_NAME_CHARACTERS) + 1
        setattr(message, name, "x" * number)
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.name == "Struct":
        getattr(message, name)["key"] = "x" * limits.MAX_SPEC_BYTES
    else:
        return False
    return True


FIELDS = {
    f"{path[-1].containing_type.name}.{path[-1].name}": (method.input_type, path)
    for method in rolemesh_methods().values()
    for path in fields_of(method.input_type)
}
"""Every field of every request, by its name: the request, and the way to the field."""


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_of_a_request_that_sizes_memory_has_a_limit(name: str) -> None:
    kind, path = FIELDS[name]
    request = GetMessageClass(kind)()
    if not too_much(request, path):
        return
    with pytest.raises(InvalidRequestError) as refused:
        checked(request)
    error = refused.value
    assert (error.reason, path[-1].name in error.metadata["field"]) == ("LIMIT_EXCEEDED", True)
    assert error.metadata["value"] in error.message
    assert error.metadata["limit"] in error.message


def test_every_limit_is_of_a_field_that_there_is() -> None:
    limited = {*limits._COUNTS, *limits._CHARACTERS, *limits._NUMBERS, *limits._JSON}
    assert limited <= FIELDS.keys()


@pytest.mark.parametrize("num_rows", [limits.MAX_ROWS + 1, 2**62, -1])
def test_a_reference_of_ten_bytes_is_refused_before_rows_are_counted(num_rows: int) -> None:
    request = value_pb2.ComputeValuesRequest(
        experience=experience_pb2.ExperienceRef(num_rows=num_rows)
    )
    with pytest.raises(InvalidRequestError, match=r"experience\.num_rows is .* limit of 1048576"):
        checked(request)


@pytest.mark.parametrize(
    "shard",
    [
        {"row_start": 1, "num_rows": limits.MAX_ROWS},
        {"num_rows": 2**40},
        {"row_start": -1},
        {"num_rows": 1, "rows": [2**32 - 1]},
    ],
    ids=str,
)
def test_shards_lie_in_a_batch_that_may_be(shard: dict[str, Any]) -> None:
    group = experience_pb2.ColumnGroup(shards=[experience_pb2.Shard(**shard)])
    request = value_pb2.ComputeValuesRequest(
        experience=experience_pb2.ExperienceRef(num_rows=1, groups=[group])
    )
    with pytest.raises(InvalidRequestError, match=r"experience\.groups\[0\]\.shards\[0\]"):
        checked(request)


def reader(kind: type[Message]) -> Any:
    return request_reader(kind.FromString, kind.DESCRIPTOR)


def test_bytes_that_are_no_message_are_refused_and_do_not_raise() -> None:
    read = reader(value_pb2.ComputeValuesRequest)
    unreadable = read(b"\xff\xff\xff")
    with pytest.raises(InvalidRequestError, match="3 bytes cannot be read") as refused:
        checked(unreadable)
    assert refused.value.reason == "MESSAGE_MALFORMED"
    key = operation_pb2.OperationKey(run_id="run")
    request = value_pb2.ComputeValuesRequest(key=key)
    assert checked(read(request.SerializeToString())) == request


def test_millions_of_empty_messages_are_refused_before_they_are_made() -> None:
    began = time.monotonic()
    empty_rows = b"\x0a\x00" * (2**21 - 8)
    batch = b"\x1a" + varint(len(empty_rows)) + empty_rows
    with pytest.raises(InvalidRequestError, match="with over 131072 parts"):
        checked(reader(reward_pb2.ComputeRewardRequest)(batch))
    assert time.monotonic() - began < MOST_SECONDS


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return encoded + bytes((value,))


def test_structs_nest_no_deeper_than_a_parser_can_follow() -> None:
    value = b"\x08\x00"  # Value.null_value = 1
    for _ in range(200):  # Value.list_value = 6, ListValue.values = 1
        values = b"\x0a" + varint(len(value)) + value
        value = b"\x32" + varint(len(values)) + values
    fields = b"\x0a\x01k\x12" + varint(len(value)) + value
    spec = b"\x0a" + varint(len(fields)) + fields
    request = b"\x12" + varint(len(spec)) + spec
    with pytest.raises(InvalidRequestError) as refused:
        checked(reader(worker_pb2.InitializeRequest)(request))
    assert refused.value.reason == "MESSAGE_MALFORMED"


# --- what is legitimate -----------------------------------------------------------------------


def test_the_reference_of_a_large_step_passes_quickly() -> None:
    groups = []
    for columns in (["tokens", "logprobs", "loss_mask"], ["values"], ["rewards"], ["advantages"]):
        shards = [
            experience_pb2.Shard(
                experience_id=f"{8 * block:032d}",
                row_start=8 * block,
                num_rows=8,
                address="127.0.0.1:50051",
                role="actor",
                row_tokens=[32_768] * 8 if columns[0] == "tokens" else [],
            )
            for block in range(2048)
        ]
        schemas = [experience_pb2.ColumnSchema(name=name) for name in columns]
        groups.append(experience_pb2.ColumnGroup(columns=schemas, shards=shards))
    request = trainer_pb2.UpdateRequest(
        experience=experience_pb2.ExperienceRef(run_id="run", num_rows=16_384, groups=groups)
    )
    data = request.SerializeToString()
    assert limits.WALKED_BYTES < len(data) < 4 << 20
    began = time.monotonic()
    assert checked(reader(trainer_pb2.UpdateRequest)(data)) == request
    assert time.monotonic() - began < MOST_SECONDS


def test_a_step_of_rows_with_their_text_passes() -> None:
    row = reward_pb2.Trajectory(
        prompt="2 + 2 =",
        completion="4",
        prompt_tokens=range(100, 160),
        completion_tokens=range(100, 110),
        answer="4",
        metadata_json='{"level": 1}',
    )
    request = reward_pb2.ComputeRewardRequest(
        trajectories=reward_pb2.TrajectoryBatch(trajectories=[row] * limits.MAX_INLINE_ROWS)
    )
    data = request.SerializeToString()
    assert len(data) < 4 << 20
    assert checked(reader(reward_pb2.ComputeRewardRequest)(data)) == request


# --- JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[" * 65, '{"a":' * 65, "[" * 200_000, '["' + '\\"' * 70 + '",' + "[" * 64],
    ids=["lists", "objects", "very deep", "behind a string"],
)
def test_json_that_nests_too_deep_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"row\.metadata .* limit of 64") as refused:
        check_json(text, "row.metadata")
    assert refused.value.metadata["limit"] == "64"


@pytest.mark.parametrize(
    "text",
    ["[" * 64 + "]" * 64, "[]" * 5000, '"' + "[" * 5000 + '"', '"\\"' + "[" * 5000 + '"', "]" * 99],
    ids=["deep enough", "wide", "in a string", "behind a quote", "not JSON at all"],
)
def test_other_json_is_left_to_the_parser(text: str) -> None:
    check_json(text, "row.metadata")


def test_metadata_of_requests_is_looked_at() -> None:
    deep = reward_pb2.Trajectory(metadata_json="[" * 10_000)
    request = reward_pb2.ComputeRewardRequest(
        trajectories=reward_pb2.TrajectoryBatch(trajectories=[deep])
    )
    with pytest.raises(InvalidRequestError, match=r"trajectories\[0\]\.metadata_json"):
        checked(request)
