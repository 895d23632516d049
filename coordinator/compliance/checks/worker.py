"""WorkerService: who the server is, and its life within a run."""

from __future__ import annotations

import json

from rolemesh.coordinator.compliance.check import check, run_check
from rolemesh.coordinator.compliance.contract import (
    MODEL_ROLES,
    REWARD_ROLES,
    BrokenContractError,
    Level,
    NotApplicableError,
    Phase,
)
from rolemesh.coordinator.compliance.subject import (
    EPOCH,
    Subject,
    describe_error,
    events_of,
    expect,
    expect_progress_then_one_result,
    result_in,
    shorten,
)
from rolemesh.coordinator.dataflow.calls.connection import REQUIRED_SERVICES
from rolemesh.rpc.channel import CHUNK_BYTES
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.v1 import operation_pb2, worker_pb2

UNKNOWN_FIELD = "compliance_no_such_field"


async def _status(subject: Subject) -> worker_pb2.GetStatusResponse:
    return await subject.client.get_status(subject.run_id)


def _known(subject: Subject) -> worker_pb2.GetCapabilitiesResponse:
    if subject.capabilities is None:
        raise NotApplicableError("the server has no WorkerService")
    return subject.capabilities


@check(
    "worker.served",
    Level.MUST,
    "WorkerService: what every role serves. A reward alone may leave it out.",
    phase=Phase.BEFORE,
)
async def served(subject: Subject) -> None:
    """Without WorkerService the coordinator cannot give the server its part of a run."""
    if subject.capabilities_error is not None:
        raise subject.capabilities_error
    if subject.role in REWARD_ROLES:
        _known(subject)
    expect(
        subject.capabilities is not None,
        sent="GetCapabilities",
        came="UNIMPLEMENTED",
        remedy="serve rolemesh.v1.WorkerService",
    )


@check(
    "worker.role", Level.MUST, 'GetCapabilities.role: the role, e.g. "actor".', phase=Phase.BEFORE
)
async def role(subject: Subject) -> None:
    """The coordinator refuses a server of another role."""
    known = _known(subject)
    expect(
        known.role == subject.role,
        sent="GetCapabilities",
        came=f"role {known.role!r}",
        remedy=f"answer role {subject.role!r}, or run the suite with --role {known.role}",
    )


@check(
    "worker.services",
    Level.MUST,
    "To stand in for a role a server has to serve all families of calls that the role needs.",
    phase=Phase.BEFORE,
)
async def services(subject: Subject) -> None:
    """The coordinator uses this list of services."""
    known = _known(subject)
    missing = sorted(set(REQUIRED_SERVICES[subject.role]) - set(known.services))
    expect(
        not missing,
        sent="GetCapabilities",
        came=f"services without {missing}",
        remedy="serve them and name them in GetCapabilities.services",
    )


@check(
    "worker.capabilities",
    Level.MUST,
    "world_size >= 1 and rank below it; chunk_bytes at most 1 MiB where experience is served; "
    "spec_schema_json is a JSON Schema or empty.",
    phase=Phase.BEFORE,
)
async def capabilities(subject: Subject) -> None:
    """Callers rely on these numbers."""
    known = _known(subject)
    problems = []
    if known.world_size < 1 or not 0 <= known.rank < known.world_size:
        problems.append(f"rank {known.rank} of world_size {known.world_size}")
    if "rolemesh.v1.ExperienceService" in known.services:
        if not 1 <= known.chunk_bytes <= CHUNK_BYTES:
            problems.append(f"chunk_bytes {known.chunk_bytes}")
        if known.experience_capacity_bytes < 1:
            problems.append(f"experience_capacity_bytes {known.experience_capacity_bytes}")
    if known.spec_schema_json:
        try:
            schema = json.loads(known.spec_schema_json)
        except ValueError as error:
            problems.append(f"spec_schema_json that is no JSON ({error})")
        else:
            if not isinstance(schema, dict):
                problems.append("spec_schema_json that is no JSON object")
    expect(
        not problems,
        sent="GetCapabilities",
        came="; ".join(problems),
        remedy="fill the fields as worker.proto says",
    )


@check(
    "worker.references",
    Level.MUST,
    "accepts_references: every role but a reward pulls experience by reference.",
    roles=MODEL_ROLES,
    phase=Phase.BEFORE,
)
async def references(subject: Subject) -> None:
    """Data never passes through the coordinator."""
    expect(
        _known(subject).accepts_references,
        sent="GetCapabilities",
        came="accepts_references false",
        remedy="pull rows with ExperienceService.Fetch from the addresses in the reference, and "
        "set accepts_references",
    )


@run_check(
    "worker.idle",
    Level.MUST,
    "GetStatus: WORKER_STATE_IDLE serves and holds no run; run_id is empty when none does.",
    phase=Phase.BEFORE,
)
async def idle(subject: Subject) -> None:
    """Looks at the state before Initialize."""
    status = await _status(subject)
    # A service may still report an Initialize that failed before the suite came.
    fine = (worker_pb2.WORKER_STATE_IDLE, worker_pb2.WORKER_STATE_FAILED)
    expect(
        status.state in fine and not status.run_id,
        sent="GetStatus before Initialize",
        came=_told(status),
        remedy="answer WORKER_STATE_IDLE and an empty run_id while no run holds the service",
    )


def _told(status: worker_pb2.GetStatusResponse) -> str:
    return f"{worker_pb2.WorkerState.Name(status.state)} with run_id {status.run_id!r}"


@run_check(
    "worker.not-initialized",
    Level.SHOULD,
    "FAILED_PRECONDITION (NOT_INITIALIZED): call Initialize first.",
    phase=Phase.BEFORE,
)
async def not_initialized(subject: Subject) -> None:
    """Asks for work of a run that the service does not hold."""
    await subject.refused(
        events_of(subject.work(subject.key())),
        "work before Initialize",
        "FAILED_PRECONDITION (NOT_INITIALIZED)",
        "refuse work until Initialize",
    )


@run_check(
    "worker.spec-invalid",
    Level.MUST,
    "Initialize: INVALID_ARGUMENT (SPEC_INVALID): a field of the spec is unknown or out of range; "
    "the message names it.",
    phase=Phase.BEFORE,
)
async def spec_invalid(subject: Subject) -> None:
    """A misspelt field of a recipe gives an error with its name, not a half-loaded model."""
    if not subject.schema():
        raise NotApplicableError("the server takes no spec: spec_schema_json is empty")
    sent = f"Initialize with the unknown field {UNKNOWN_FIELD!r}"
    remedy = "refuse unknown fields and name them"
    call = subject.initialize(key=subject.key(step=0), more={UNKNOWN_FIELD: 1})
    refusal = "INVALID_ARGUMENT (SPEC_INVALID)"
    error = await subject.refused(events_of(call), sent, refusal, remedy)
    expect(
        UNKNOWN_FIELD in error.message,
        sent=sent,
        came=f"a message without the field: {shorten(error.message)}",
        remedy="name the field in the message of the status",
    )
    status = await _status(subject)
    expect(
        not status.run_id,
        sent="GetStatus after an Initialize that was refused",
        came=_told(status),
        remedy="let no run hold the service when its Initialize fails",
    )


@run_check(
    "worker.initialize",
    Level.MUST,
    "Initialize: any number of progress messages, then one result.",
    phase=Phase.INITIALIZE,
)
async def initialize(subject: Subject) -> None:
    """The suite's run takes the service. All later checks need it."""
    given = "the spec of --spec" if subject.spec else "an empty spec, since there is no --spec"
    try:
        events = await events_of(subject.initialize())
    except InvalidRequestError as error:
        raise BrokenContractError(
            sent=f"Initialize with {given}",
            came=describe_error(error),
            remedy="give --spec FILE with the section of a recipe that this server takes; its "
            "schema is GetCapabilities.spec_schema_json",
        ) from error
    result = result_in(events, "Initialize")
    assert isinstance(result, worker_pb2.InitializeResult)
    subject.initialized = result
    expect_progress_then_one_result(events, "Initialize")


@run_check(
    "worker.initialize-replay",
    Level.MUST,
    "Initialize is keyed by `key`: a repeat returns the first answer.",
)
async def initialize_replay(subject: Subject) -> None:
    """A coordinator that lost its connection asks again."""
    first = subject.initialized
    again = result_in(await events_of(subject.initialize()), "Initialize again")
    expect(
        again == first,
        sent="Initialize again, with the same key and spec",
        came=f"{shorten(again)} instead of {shorten(first)}",
        remedy="keep the answer of each key, and return it to every repeat",
    )


@run_check(
    "worker.ready",
    Level.MUST,
    "GetStatus: WORKER_STATE_READY is ready for work; run_id is the run that holds the service.",
)
async def ready(subject: Subject) -> None:
    """Looks at the state after Initialize."""
    status = await _status(subject)
    expect(
        status.state == worker_pb2.WORKER_STATE_READY and status.run_id == subject.run_id,
        sent="GetStatus after Initialize",
        came=_told(status),
        remedy=f"answer WORKER_STATE_READY with run_id {subject.run_id!r}",
    )


@run_check(
    "worker.stale-epoch",
    Level.MUST,
    "A fencing_epoch lower than the highest one seen is refused with FAILED_PRECONDITION "
    "(STALE_EPOCH): a newer coordinator has taken over.",
)
async def stale_epoch(subject: Subject) -> None:
    """Of two coordinators of one run, the service must refuse the older."""
    await subject.refused(
        events_of(subject.work(subject.key(epoch=EPOCH - 1))),
        f"work of epoch {EPOCH - 1} after epoch {EPOCH} has spoken",
        "FAILED_PRECONDITION (STALE_EPOCH)",
        "remember the highest epoch of the run and refuse lower ones",
    )


@run_check(
    "worker.held",
    Level.MUST,
    "Initialize: FAILED_PRECONDITION (ALREADY_INITIALIZED): another run holds the service and was "
    "heard within 30 s.",
)
async def held(subject: Subject) -> None:
    """A service takes part in one run at a time."""
    key = operation_pb2.OperationKey(
        run_id=f"{subject.run_id}-other", fencing_epoch=1, operation="compliance.initialize"
    )
    await subject.refused(
        events_of(subject.initialize(key=key)),
        "Initialize of another run",
        "FAILED_PRECONDITION (ALREADY_INITIALIZED)",
        "refuse other runs while one holds the service",
    )


@run_check(
    "worker.sleep",
    Level.SHOULD,
    "Sleep: until Wake, every keyed call but Sleep, Wake and Initialize is refused with "
    "FAILED_PRECONDITION (ASLEEP).",
)
async def sleep(subject: Subject) -> None:
    """Only roles that share a device are asked to sleep."""
    await subject.client.sleep(subject.key("compliance.sleep"))
    try:
        await subject.refused(
            events_of(subject.work(subject.key())),
            "work while asleep",
            "FAILED_PRECONDITION (ASLEEP)",
            "refuse work until Wake",
        )
    finally:
        await subject.client.wake(subject.key("compliance.wake"))
    await events_of(subject.work(subject.key()))


@run_check(
    "worker.drain-of-others",
    Level.MUST,
    "Drain: FAILED_PRECONDITION (STALE_EPOCH) of an older coordinator, (RUN_MISMATCH) of another "
    "run than the one that holds the service.",
    phase=Phase.DRAIN,
)
async def drain_of_others(subject: Subject) -> None:
    """Only the run itself can end its hold of the service."""
    for run_id, epoch, reason in (
        (subject.run_id, EPOCH - 1, "STALE_EPOCH"),
        (f"{subject.run_id}-other", 1, "RUN_MISMATCH"),
    ):
        await subject.refused(
            subject.client.drain(run_id, epoch),
            f"Drain of run {run_id} with epoch {epoch}",
            f"FAILED_PRECONDITION ({reason})",
            "give the service back to its own run's newest coordinator alone",
        )


@run_check(
    "worker.drain", Level.MUST, "Drain finishes what runs, then forgets the run.", phase=Phase.DRAIN
)
async def drain(subject: Subject) -> None:
    """The service takes part in another run afterwards."""
    await subject.client.drain(subject.run_id, EPOCH)
    subject.is_held = False
    status = await _status(subject)
    expect(
        status.state == worker_pb2.WORKER_STATE_IDLE and not status.run_id,
        sent="GetStatus after Drain",
        came=_told(status),
        remedy="answer WORKER_STATE_IDLE and an empty run_id once the run is forgotten",
    )
