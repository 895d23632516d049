"""Bounds on what a request may size: every limit with its reason, and the one check of them all.

Servers read requests with `request_reader`, and pass them through `checked` before anything is made
of them. What depends on a service's state, such as room in its store, is checked there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.v1 import experience_pb2

# --- numbers ----------------------------------------------------------------------------------

MAX_ROWS = 1 << 20
"""Rows of a batch. Large steps have 16,384; a held-out set that is read at once has 100,000s. A
reference tells the tokens of each row in 4 bytes, so that more would not fit into a message."""

MAX_ROW_TOKENS = 1 << 20
"""Tokens of a row, prompt and completion. Long contexts have 32,768 to 131,072."""

MAX_INLINE_ROWS = 1 << 14
"""Trajectories or prompts whose text stands in the request itself: a step of 16,384 rows."""

MAX_SHARDS = 1 << 14
"""Shards of a group of columns: as many blocks of one row as a step of 16,384 rows has."""

MAX_COLUMNS = 256
"""Columns of a batch. All that we name are about 30; users add some for their losses."""

MAX_PARAMETERS = 1 << 17
"""Parameters of a model, and boxes of them: 128 layers with 256 experts of three matrices each
have 98,304."""

MAX_DIMENSIONS = 8
"""Dimensions of a parameter. Convolutions have 5."""

MAX_TEXT_CHARACTERS = 1 << 20
"""Characters of a prompt, a completion or an answer: 131,072 tokens of 8 characters."""

MAX_KEY_BYTES = 1 << 20
"""Bytes of a value by which ranks meet. That of a rank of gloo has 170, that of NCCL 128; libraries
may put lists of all ranks there."""

MAX_KEY_WAIT_MS = 20_000
"""Longest wait for such a value in one call, in milliseconds: within its deadline."""

MAX_METADATA_BYTES = 64 << 10
"""Bytes of a row's metadata, which is sent with each of its trajectories."""

MAX_JSON_DEPTH = 64
"""Levels of nesting in JSON, of a body or a row's metadata. JSON that people write has 10."""

MAX_NAME_CHARACTERS = 4096
"""Characters of every other text: paths have at most so many on Linux, names are shorter."""

MAX_ITEMS = 1024
"""Items of every other list or map."""

MAX_SPEC_BYTES = 1 << 20
"""Bytes of a role's section of a recipe, or of the parameters of an algorithm's part: a recipe may
have 1 MiB. Protobuf itself refuses more than 100 nested messages, which are 33 levels of JSON."""

MAX_TRAINED_ROWS = 1 << 21
"""Rows of an update, over all its epochs: 16,384 rows, 128 times. Every rank plans all of them."""

MAX_PASS_AT = 64
"""Values of k for pass@k in one call: 1, 2, 4 up to 2^20 are 21."""

MAX_EPOCH = (1 << 53) - 1
"""Fencing epochs stay exact in the store, whose scripts know doubles only."""

HIGHEST_EPOCH = "highest_epoch"
"""Key of the metadata of STALE_EPOCH: the epoch that has spoken."""

MAX_EPOCH_JUMP = 1 << 16
"""How far a call may raise the epoch of a run at once. The store counts epochs by one: an attempt
or an attachment takes one, and a service may have missed a few thousand of them."""

# --- load -------------------------------------------------------------------------------------

MAX_CALLS = 1 << 16
"""Calls that a process serves at the same time; one more is refused and not queued. 512 ranks that
pull their rows of a batch from 128 blocks each fetch so often at once."""

MAX_CONNECTIONS = 1024
"""HTTP connections that a server serves at the same time: 100 browsers have 600."""

MAX_OPERATIONS = 2048
"""Keyed operations in progress in a service. A step of 16,384 rows in blocks of 8 has as many, when
all are asked for at once."""

MAX_WATCHES = 256
"""Watches of runs that a coordinator serves at the same time, over all protocols: 100 browsers, and
as many scripts. Each asks the store four times a second."""

MAX_SERVICES = 1024
"""Services of a role that register themselves, each with a number below it."""

MAX_PEERS = 1024
"""Peers to which a service keeps a channel: a mesh of 1,000 ranks."""

PUT_IDLE_S = 30.0
"""A put whose next chunk does not come for so long is given up: a chunk is 1 MiB at most, which
takes 8 s at 1 Mbit/s."""

REQUEST_S = 30.0
"""A call whose request has not come whole for so long is refused: 4 MiB, the most that gRPC takes,
need as long at 1.1 Mbit/s. Reflection, which asks for no token, has as long for all that it is
asked in one call."""

REQUEST_HEAD_S = 10.0
"""An HTTP connection on which no whole head of a request has come for so long, since it was made or
since its last answer, is closed: a head has 16 KiB at most, which takes 0.2 s at 1 Mbit/s, and
browsers, which open connections ahead of need, open others then."""

MAX_IDLE_CONNECTION_S = 900.0
"""A server closes a connection without a call for so long; clients connect anew by themselves."""

# --- parts of a message -----------------------------------------------------------------------

WALKED_BYTES = 64 << 10
"""Requests up to this size are parsed at once: their parts take a few MiB at most."""

MAX_PARTS = 1 << 17
"""Fields and nested messages of one request: 16,384 trajectories of 6 fields have 114,688. A part
takes two bytes on the wire and about 100 in memory."""

MAX_MENTIONED = 80
"""Characters of a value in an error."""

_COUNTS: Mapping[str, int] = MappingProxyType(
    {
        "ExperienceRef.groups": MAX_COLUMNS,
        "ColumnGroup.columns": MAX_COLUMNS,
        "ColumnGroup.shards": MAX_SHARDS,
        "Shard.rows": MAX_ROWS,
        "Shard.row_tokens": MAX_ROWS,
        "FetchRequest.columns": MAX_COLUMNS,
        "FetchRequest.rows": MAX_ROWS,
        "ReleaseRequest.experience_ids": MAX_PARAMETERS,
        "PayloadHeader.columns": MAX_COLUMNS,
        "TrajectoryBatch.trajectories": MAX_INLINE_ROWS,
        "Trajectory.prompt_tokens": MAX_ROW_TOKENS,
        "Trajectory.completion_tokens": MAX_ROW_TOKENS,
        "GivenPrompts.prompts": MAX_INLINE_ROWS,
        "GivenPrompt.tokens": MAX_ROW_TOKENS,
        "ComputeRewardRequest.pass_at": MAX_PASS_AT,
        "WeightsRef.parameters": MAX_PARAMETERS,
        "ParameterSpec.shape": MAX_DIMENSIONS,
        "FetchWeightsRequest.boxes": MAX_PARAMETERS,
        "WeightsBox.start": MAX_DIMENSIONS,
        "WeightsBox.stop": MAX_DIMENSIONS,
        "Sample.token_ids": MAX_ROW_TOKENS,
        "Sample.logprobs": MAX_ROW_TOKENS,
        "Sample.loss_mask": MAX_ROW_TOKENS,
        "Sample.advantages": MAX_ROW_TOKENS,
    }
)
"""Most items of a list or map; every other one has MAX_ITEMS."""

_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {
        "Trajectory.prompt": MAX_TEXT_CHARACTERS,
        "Trajectory.completion": MAX_TEXT_CHARACTERS,
        "Trajectory.answer": MAX_TEXT_CHARACTERS,
        "Trajectory.metadata_json": MAX_METADATA_BYTES,
        "GivenPrompt.text": MAX_TEXT_CHARACTERS,
        "GivenPrompt.answer": MAX_TEXT_CHARACTERS,
        "GivenPrompt.metadata_json": MAX_METADATA_BYTES,
        "Sample.prompt": MAX_TEXT_CHARACTERS,
        "Sample.completion": MAX_TEXT_CHARACTERS,
        "Sample.answer": MAX_TEXT_CHARACTERS,
        "SetKeyRequest.value": MAX_KEY_BYTES,
        # Their bound is one of bytes, on all of them together; see the coordinator's operations.
        "CreateRunRequest.recipe": 4 << 20,
        "CreateRunRequest.overrides": 4 << 20,
        "ResumeRunRequest.overrides": 4 << 20,
    }
)
"""Most characters of a text; every other one has MAX_NAME_CHARACTERS."""

_NUMBERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "ExperienceRef.num_rows": (0, MAX_ROWS),
        "Shard.row_start": (0, MAX_ROWS),
        "Shard.num_rows": (0, MAX_ROWS),
        "PayloadHeader.num_rows": (0, MAX_ROWS),
        "GetKeyRequest.wait_ms": (0, MAX_KEY_WAIT_MS),
        "ColumnSchema.width": (0, MAX_WIDTH),
    }
)
"""Least and greatest value of numbers by which memory or time is taken before they are compared
with what is there."""

_JSON = ("Trajectory.metadata_json", "GivenPrompt.metadata_json")


def exceeded(field: str, value: object, limit: object, remedy: str) -> InvalidRequestError:
    """The refusal of a request beyond a limit: it names the field, the value and the limit."""
    shown = str(value)[:MAX_MENTIONED]
    return InvalidRequestError(
        f"{field} is {shown}, more than the limit of {limit}: {remedy}",
        reason="LIMIT_EXCEEDED",
        metadata={"field": field[:MAX_MENTIONED], "value": shown, "limit": str(limit)},
    )


# --- requests ---------------------------------------------------------------------------------


class Unreadable:
    """A request that was refused before there was a message. The server's method never sees it."""

    def __init__(self, error: InvalidRequestError) -> None:
        self.error = error


def request_reader(
    deserialize: Callable[[bytes], Any], message: Descriptor
) -> Callable[[bytes], Any]:
    """Reads requests of one method as `deserialize` does, but never raises.

    gRPC answers with UNKNOWN when its deserializer raises. What this one returns goes to
    `checked` first, which raises the refusal where the server can send it.

    Args:
        deserialize: Of the generated code.
        message: Type of the request.
    """

    def read(data: bytes) -> Any:
        try:
            if len(data) > WALKED_BYTES:
                _check_parts(data, message)
            return deserialize(data)
        except InvalidRequestError as error:
            return Unreadable(error)
        except Exception as error:  # protobuf raises DecodeError or, on some builds, others
            return Unreadable(
                InvalidRequestError(
                    f"{len(data)} bytes cannot be read: they are no {message.name} ({error})",
                    reason="MESSAGE_MALFORMED",
                )
            )

    return read


def checked(request: Any) -> Any:
    """The request, if it could be read and is within all limits.

    Raises:
        InvalidRequestError: MESSAGE_MALFORMED or LIMIT_EXCEEDED; the latter names field, value and
            limit.
    """
    if isinstance(request, Unreadable):
        raise request.error
    if isinstance(request, Message):
        _check_message(request, "")
    return request


def _check_parts(data: bytes, message: Descriptor) -> None:
    """Counts the parts of a serialized message, which may be 50 times as large once parsed."""
    num_parts = 0
    waiting = [(0, len(data), message)]
    while waiting:
        at, stop, kind = waiting.pop()
        while at < stop:
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise exceeded(
                    message.name,
                    f"a message of {len(data)} bytes with over {MAX_PARTS} parts",
                    f"{MAX_PARTS} parts",
                    "send several smaller requests",
                )
            tag, at = _varint(data, at)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _varint(data, at)
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            elif wire_type == 2:
                length, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, at + length, field.message_type))
                at += length
            else:
                raise ValueError(f"wire type {wire_type}, which rolemesh does not use")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 10 bytes")


def _check_message(message: Message, path: str) -> None:
    kind = message.DESCRIPTOR
    if kind.file.package == "google.protobuf":
        if message.ByteSize() > MAX_SPEC_BYTES:
            raise exceeded(path, f"{message.ByteSize()} bytes", MAX_SPEC_BYTES, "make it smaller")
        return
    for field, value in message.ListFields():
        name, place = f"{kind.name}.{field.name}", f"{path}{field.name}"
        if field.is_repeated:
            limit = _COUNTS.get(name, MAX_ITEMS)
            if len(value) > limit:
                raise exceeded(place, f"{len(value)} items", limit, "send fewer")
        if field.message_type is not None:
            for where, item in _messages(field, value, place):
                _check_message(item, f"{where}.")
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            _check_texts(name, place, value if field.is_repeated else (value,))
        elif name in _NUMBERS:
            least, greatest = _NUMBERS[name]
            if not least <= value <= greatest:
                raise exceeded(place, value, greatest, f"give {least} to {greatest}")
    if isinstance(message, experience_pb2.Shard):
        _check_shard(message, path)


def _messages(field: FieldDescriptor, value: Any, place: str) -> Iterator[tuple[str, Message]]:
    if not field.is_repeated:
        yield place, value
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key, item in value.items():
            if isinstance(key, str):
                _check_texts(f"{place} key", f"{place} key", (key,))
            if isinstance(item, str):
                _check_texts(place, f"{place}[{key[:MAX_MENTIONED]!r}]", (item,))
    else:
        for index, item in enumerate(value):
            yield f"{place}[{index}]", item


def _check_texts(name: str, place: str, texts: Any) -> None:
    limit = _CHARACTERS.get(name, MAX_NAME_CHARACTERS)
    for text in texts:
        if len(text) > limit:
            raise exceeded(place, f"{len(text)} characters", limit, "send a shorter one")
        if name in _JSON:
            check_json(text, place)


def _check_shard(shard: experience_pb2.Shard, path: str) -> None:
    """Rows of a shard lie in a batch that may be, so that what is counted by them has a bound."""
    last = max((shard.row_start + shard.num_rows, *shard.rows[:1], *shard.rows[-1:]))
    if last > MAX_ROWS:
        raise exceeded(f"{path}rows", f"up to {last}", MAX_ROWS, "name rows of the batch")


# --- JSON -------------------------------------------------------------------------------------

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_OPEN, _CLOSE = "[{", "]}"


def check_json(text: str, field: str) -> None:
    """Refuses JSON that nests too deep for any parser. Whether it is JSON is not looked at.

    Raises:
        InvalidRequestError: LIMIT_EXCEEDED; names the field.
    """
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for character in _STRINGS.sub("", text):
        if character in _OPEN:
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise exceeded(
                    field, f"JSON of more than {MAX_JSON_DEPTH} levels", MAX_JSON_DEPTH, "nest less"
                )
        elif character in _CLOSE:
            depth -= 1
