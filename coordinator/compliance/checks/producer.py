"""ExperienceService: what a service made, fetched and released."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.compliance.check import run_check
from rolemesh.coordinator.compliance.contract import (
    BrokenContractError,
    Level,
    NotApplicableError,
    Phase,
)
from rolemesh.coordinator.compliance.subject import (
    EPOCH,
    Subject,
    events_of,
    expect,
    experience_in,
    result_in,
    shorten,
)
from rolemesh.rpc.channel import CHUNK_BYTES
from rolemesh.rpc.errors import NotFoundError, RolemeshError
from rolemesh.rpc.experience.columns import Columns, decode
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.references import place
from rolemesh.v1 import experience_pb2, experience_pb2_grpc


async def _made(subject: Subject) -> experience_pb2.ExperienceRef:
    return experience_in(await subject.usual_result(), "an ordinary call")


async def _shard(subject: Subject) -> tuple[experience_pb2.Shard, list[str]]:
    """A shard of experience that the service made, and the names of its columns."""
    ref = await _made(subject)
    if not ref.groups or not ref.groups[0].shards:
        raise NotApplicableError("the result names no shard: see experience.reference")
    group = ref.groups[0]
    return group.shards[0], [schema.name for schema in group.columns]


def _request(
    shard: experience_pb2.Shard, columns: list[str], **rows: Any
) -> experience_pb2.FetchRequest:
    if not rows:
        rows = {"row_start": 0, "row_stop": shard.num_rows}
    return experience_pb2.FetchRequest(experience_id=shard.experience_id, columns=columns, **rows)


async def _fetch(subject: Subject, request: experience_pb2.FetchRequest) -> list[Any]:
    stub = experience_pb2_grpc.ExperienceServiceStub(subject.channel)
    return await events_of(stub.Fetch(request, timeout=subject.timeout_s))


def _columns_in(parts: list[Any], sent: str) -> Columns:
    payload = b"".join(part.chunk for part in parts[1:])
    try:
        return decode(parts[0].header, payload)
    except PayloadMalformedError as error:
        raise BrokenContractError(
            sent=sent,
            came=str(error),
            remedy="let header and bytes agree: offsets, sizes and boundaries of 64 bytes",
        ) from error


@run_check(
    "experience.reference",
    Level.MUST,
    "ExperienceRef: every group covers all num_rows rows; every row is in exactly one shard, at an "
    "address host:port.",
)
async def reference(subject: Subject) -> None:
    """Looks at the reference of an ordinary call."""
    ref = await _made(subject)
    problems = []
    if ref.run_id != subject.run_id:
        problems.append(f"run_id {ref.run_id!r} instead of {subject.run_id!r}")
    if ref.num_rows < 1 or not ref.groups:
        problems.append(f"{ref.num_rows} rows in {len(ref.groups)} groups")
    for group in ref.groups:
        try:
            place(group.shards, list(range(ref.num_rows)))
        except ValueError as error:
            problems.append(str(error))
        for shard in group.shards:
            host, _, port = shard.address.rpartition(":")
            if not host or not port.isdecimal():
                problems.append(f"address {shard.address!r}")
            tokens = any(schema.name == "tokens" for schema in group.columns)
            if tokens and len(shard.row_tokens) != shard.num_rows:
                problems.append("row_tokens that do not tell the length of each row")
    expect(
        not problems,
        sent="an ordinary call",
        came=shorten("; ".join(problems)),
        remedy="fill ExperienceRef as experience.proto says",
    )


@run_check(
    "experience.fetch",
    Level.MUST,
    "Fetch: exactly one header, then chunks whose bytes concatenated are the payload that the "
    "header describes, each at most 1 MiB.",
)
async def fetch(subject: Subject) -> None:
    """A fetch returns the requested columns in the requested order."""
    shard, names = await _shard(subject)
    wanted = list(reversed(names))
    sent = f"Fetch of {wanted}, {shard.num_rows} rows"
    parts = await _fetch(subject, _request(shard, wanted))
    kinds = [part.WhichOneof("part") for part in parts]
    expect(
        kinds[:1] == ["header"] and set(kinds[1:]) <= {"chunk"},
        sent=sent,
        came=f"the messages {shorten(kinds)}",
        remedy="send one header first, then chunks",
    )
    largest = max((len(part.chunk) for part in parts[1:]), default=0)
    expect(
        largest <= CHUNK_BYTES,
        sent=sent,
        came=f"a chunk of {largest} bytes",
        remedy=f"cut the payload into chunks of at most {CHUNK_BYTES} bytes",
    )
    header = parts[0].header
    expect(
        not header.HasField("shared_memory_name"),
        sent=f"{sent}, with an empty host_id",
        came="the name of a shared memory segment",
        remedy="name shared memory only where FetchRequest.host_id is your own",
    )
    came = [column.schema.name for column in header.columns]
    expect(
        came == wanted and header.num_rows == shard.num_rows,
        sent=sent,
        came=f"{header.num_rows} rows of {came}",
        remedy="send the columns that were asked for, in that order",
    )
    _columns_in(parts, sent)


@run_check(
    "experience.rows",
    Level.MUST,
    "row_start, row_stop: a range of the shard's rows; rows: single rows, in the order wanted.",
)
async def rows(subject: Subject) -> None:
    """A fetch of rows returns the same values as a fetch of all rows."""
    shard, names = await _shard(subject)
    if shard.num_rows < 3:
        raise NotApplicableError(f"the shard has {shard.num_rows} rows, too few to tell")
    whole = _columns_in(await _fetch(subject, _request(shard, names)), "Fetch of all rows")
    for asked, wanted in (
        ({"row_start": 1, "row_stop": 3}, [1, 2]),
        ({"rows": [2, 0]}, [2, 0]),
    ):
        sent = f"Fetch of {asked}"
        part = _columns_in(await _fetch(subject, _request(shard, names, **asked)), sent)
        expected = whole.select(wanted)
        wrong = [
            name
            for name in names
            if name not in part
            or part.num_rows != len(wanted)
            or part[name].values.tobytes() != expected[name].values.tobytes()
        ]
        expect(
            not wrong,
            sent=sent,
            came=f"{part.num_rows} rows, other values in {wrong}",
            remedy="count rows inside the shard, and send them in the order wanted",
        )


@run_check(
    "experience.refusals",
    Level.MUST,
    "Fetch: NOT_FOUND (EXPERIENCE_NOT_FOUND, COLUMN_NOT_FOUND), OUT_OF_RANGE (ROWS_OUT_OF_RANGE), "
    "INVALID_ARGUMENT (ROWS_AMBIGUOUS).",
)
async def refusals(subject: Subject) -> None:
    """The service refuses to fetch what it does not hold."""
    shard, names = await _shard(subject)
    unknown = experience_pb2.Shard(experience_id="compliance-unknown", num_rows=1)
    beyond = {"row_start": 0, "row_stop": shard.num_rows + 1}
    for sent, request, refusal in (
        ("an unknown id", _request(unknown, names), "NOT_FOUND (EXPERIENCE_NOT_FOUND)"),
        (
            "an unknown column",
            _request(shard, ["compliance_no_such"]),
            "NOT_FOUND (COLUMN_NOT_FOUND)",
        ),
        (
            "rows beyond the shard",
            _request(shard, names, **beyond),
            "OUT_OF_RANGE (ROWS_OUT_OF_RANGE)",
        ),
        (
            "a single row beyond the shard",
            _request(shard, names, rows=[shard.num_rows]),
            "OUT_OF_RANGE (ROWS_OUT_OF_RANGE)",
        ),
        (
            "both a range and single rows",
            _request(shard, names, row_start=0, row_stop=1, rows=[0]),
            "INVALID_ARGUMENT (ROWS_AMBIGUOUS)",
        ),
    ):
        await subject.refused(_fetch(subject, request), f"Fetch of {sent}", refusal, "refuse it")


@run_check(
    "experience.release",
    Level.MUST,
    "Release drops experience and frees its bytes; unknown ids are ignored; a second release finds "
    "nothing; FAILED_PRECONDITION (STALE_EPOCH) of an older coordinator.",
)
async def release(subject: Subject) -> None:
    """Releases experience by id."""
    made = result_in(await events_of(subject.work(subject.key())), "a call")
    shard = experience_in(made, "a call").groups[0].shards[0]

    async def freed(epoch: int = EPOCH) -> int:
        ids = [shard.experience_id]
        return await subject.client.release(subject.run_id, epoch, experience_ids=ids)

    await subject.refused(
        freed(EPOCH - 1),
        f"Release with epoch {EPOCH - 1} after epoch {EPOCH} has spoken",
        "FAILED_PRECONDITION (STALE_EPOCH)",
        "refuse an older coordinator",
    )
    first, second = await freed(), await freed()
    expect(
        first > 0 and second == 0,
        sent=f"Release of {shard.experience_id}, twice",
        came=f"{first}, then {second} bytes freed",
        remedy="free the bytes at the first release, and ignore the second",
    )
    await subject.refused(
        _fetch(subject, _request(shard, [])),
        "Fetch of experience that was released",
        "NOT_FOUND (EXPERIENCE_NOT_FOUND)",
        "forget what was released",
    )


@run_check(
    "experience.forgotten",
    Level.MUST,
    "Drain forgets the run: its experience too.",
    phase=Phase.AFTER,
)
async def forgotten(subject: Subject) -> None:
    """Uses experience of the usual call, which was never released."""
    shard, _ = await _shard(subject)
    try:
        await _fetch(subject, _request(shard, []))
    except NotFoundError:
        return
    except RolemeshError as error:
        came = f"{error.code.name}: {shorten(error.message)}"
    else:
        came = "its rows"
    raise BrokenContractError(
        sent="Fetch of experience of the run that was drained",
        came=came,
        remedy="free all experience of a run that gives the service back; answer NOT_FOUND",
    )
