"""ExperienceService.Put: rows from a client without a server, held as if made here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience, read_payload
from rolemesh.rpc.errors import DeadlineError, InvalidRequestError
from rolemesh.rpc.experience.payload import layout_of
from rolemesh.rpc.experience.payload_stream import (
    PayloadMalformedError,
    collect_chunks,
    decode_part,
)
from rolemesh.rpc.limits import MAX_METADATA_BYTES, PUT_IDLE_S, check_json, checked, exceeded
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.runtime import Context, Runtime
from rolemesh.v1 import experience_pb2

_METADATA = "metadata"
_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


async def put_experience(
    runtime_of: Callable[[str], Runtime], messages: AsyncIterator[bytes], context: Context
) -> experience_pb2.PutResponse:
    """Takes the stream of a put; see experience.proto.

    Nothing is allocated before the header is checked and the store has room for it. Any rank may
    hold the rows: consumers pull their shares from it as from every producer.

    Args:
        runtime_of: Gives the runtime of a run, on the rank that will hold them.
        messages: Serialized PutRequests.
        context: Of the call.

    Raises:
        InvalidRequestError: PAYLOAD_MALFORMED, INPUT_UNSUPPORTED, or what is wrong with the key.
        CapacityError: EXPERIENCE_CAPACITY.
        DeadlineError: No chunk came for PUT_IDLE_S.
        PreconditionError: Not initialised, or a stale epoch.
    """
    messages = _punctual(messages)
    opening = checked(await _opening(messages))
    runtime = runtime_of(opening.key.run_id)
    store, header = runtime.store, opening.header
    identity = runtime.ledger.check_epoch(opening.key)
    runtime.hold.check_initialized(opening.key.run_id)
    if header.HasField("shared_memory_name"):
        raise InvalidRequestError(
            "header.shared_memory_name is set: a put brings its bytes as chunks",
            reason="INPUT_UNSUPPORTED",
        )
    try:
        layout = layout_of(header)
        # A repeat gets the first answer, also where there is no room for a second copy.
        is_repeat = runtime.ledger.has(identity) and layout.num_bytes <= store.capacity_bytes
        async with AsyncExitStack() as stack:
            if is_repeat:
                await stack.enter_async_context(runtime.repeated_puts)
            else:
                stack.enter_context(store.room_for_given(layout.num_bytes))
            payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
            view = payload.numpy().data
            await collect_chunks(messages, experience_pb2.PutRequest, view)
        batch = await asyncio.to_thread(lambda: _checked(read_payload(layout, payload)))
    except ValueError as error:
        raise InvalidRequestError(
            f"the payload of a put is wrong: {error}", reason="PAYLOAD_MALFORMED"
        ) from error

    async def work(call: Call) -> experience_pb2.PutResponse:
        published = runtime.publish(opening.key, batch, is_given=True)
        return experience_pb2.PutResponse(experience=published)

    return await runtime.keyed_unary(opening, work, on_all_ranks=False, payload=view)


async def _punctual(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same messages; gives a sender up that is silent, since its bytes count as held."""
    while True:
        try:
            async with asyncio.timeout(PUT_IDLE_S):
                message = await anext(messages, None)
        except TimeoutError as error:
            raise DeadlineError(
                f"no message of the put came for {PUT_IDLE_S:g} s: send its chunks without a pause"
            ) from error
        if message is None:
            return
        yield message


async def _opening(messages: AsyncIterator[bytes]) -> experience_pb2.PutOpening:
    try:
        opening = decode_part(await anext(messages, b""), experience_pb2.PutRequest)
        if isinstance(opening, experience_pb2.PutOpening):
            return opening
        problem = "a chunk came"
    except PayloadMalformedError as error:
        problem = str(error)
    raise InvalidRequestError(
        f"the stream of a put does not begin with an opening ({problem}): send key and header "
        "first",
        reason="PAYLOAD_MALFORMED",
    )


def _checked(batch: Experience) -> Experience:
    """Checks rows, names and values of a batch from an untrusted client; returns it."""
    if batch.num_rows < 1:
        raise ValueError("num_rows is 0: put one row at least")
    for name, column in batch.columns.items():
        if not _COLUMN_NAME.fullmatch(name):
            raise ValueError(f"column {name[:80]!r} is no lower_snake name of 1 to 64 characters")
        _check_values(name, column)
    return batch


def _check_values(name: str, column: Column) -> None:
    if column.kind is ColumnKind.TEXT:
        if column.values.dtype is not torch.uint8:
            raise ValueError(f"column {name!r} is text of {column.values.dtype}: send UTF-8 bytes")
        try:
            texts = column.strings()
        except UnicodeDecodeError as error:
            raise ValueError(f"column {name!r} holds text that is no UTF-8: {error}") from error
        for row, text in enumerate(texts if name == _METADATA else ()):
            if len(text) > MAX_METADATA_BYTES:
                raise exceeded(
                    f"{name}[{row}]", f"{len(text)} characters", MAX_METADATA_BYTES, "send less"
                )
            check_json(text, f"{name}[{row}]")
    elif column.values.dtype is torch.bool and bool((column.values.view(torch.uint8) > 1).any()):
        raise ValueError(f"column {name!r} is bool, but holds bytes other than 0 and 1")
