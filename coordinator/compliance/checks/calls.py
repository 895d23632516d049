"""Checks of every call with a key: order of the stream, one effect for a key, clear refusals."""

from __future__ import annotations

import asyncio
import math

from google.protobuf.message import Message

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.contract import (
    SAMPLING_ROLES,
    BrokenContractError,
    Level,
    Phase,
)
from rolemesh.coordinator.compliance.samples import make_sample
from rolemesh.coordinator.compliance.subject import (
    NUM_PROMPTS,
    Subject,
    describe_error,
    events_of,
    expect,
    expect_progress_then_one_result,
    result_in,
    shorten,
)
from rolemesh.rpc.errors import ERROR_DOMAIN, RolemeshError
from rolemesh.v1 import experience_pb2, operation_pb2, reward_pb2


@check(
    "streams.one-result-last",
    Level.MUST,
    "Stream order: any number of progress messages, then one result; last message of the stream.",
)
async def one_result_last(subject: Subject) -> None:
    """Callers take the first result and may leave."""
    events = await subject.usual_answer()
    expect_progress_then_one_result(events, "an ordinary call")


@check(
    "streams.cancelled-call",
    Level.MUST,
    "A repeat with the same key returns the first answer, also to a caller that had left.",
)
async def cancelled_call(subject: Subject) -> None:
    """A coordinator that loses its connection comes back with the same key."""
    key = subject.key()
    call = subject.work(key)
    call.cancel()
    try:
        result_in(await events_of(subject.work(key)), "the same key again")
    except RolemeshError as error:
        raise BrokenContractError(
            sent="a call that was cancelled at once, then the same call with the same key",
            came=describe_error(error),
            remedy="let a key whose call was cancelled go on, or begin anew",
        ) from error


@check(
    "keys.replay",
    Level.MUST,
    "Keyed by `key`: a repeat with the same (run_id, fencing_epoch, step, operation, sequence) "
    "returns that first answer and changes nothing.",
)
async def replay(subject: Subject) -> None:
    """A call that is repeated with the same key has its effect once."""
    key = subject.key()
    first = _answer(result_in(await events_of(subject.work(key)), "a call"))
    again = _answer(result_in(await events_of(subject.work(key)), "the same call again"))
    _same(first, again, "the same call twice, one after the other, with one key")


@check(
    "keys.side-by-side",
    Level.MUST,
    "Two calls with one key that are in flight together get one answer.",
)
async def side_by_side(subject: Subject) -> None:
    """A retry may overtake the call that it repeats."""
    key = subject.key()
    answers = await asyncio.gather(*(events_of(subject.work(key)) for _ in range(2)))
    first, second = (_answer(result_in(events, "one of two calls")) for events in answers)
    _same(first, second, "the same call twice, side by side, with one key")


def _answer(result: Message) -> Message | list[float]:
    """The part of a result that has to be equal in every repeat."""
    if isinstance(result, reward_pb2.Rewards):
        return list(result.rewards)
    return result.experience if isinstance(result, experience_pb2.ExperienceResult) else result


def _same(first: Message | list[float], again: Message | list[float], sent: str) -> None:
    is_same = first == again
    if isinstance(first, list) and isinstance(again, list):
        # Another check looks for NaN.
        is_same = list(map(repr, first)) == list(map(repr, again))
    expect(
        is_same,
        sent=sent,
        came=f"{shorten(first, 120)} and {shorten(again, 120)}",
        remedy="keep the answer of each key of the newest operations, and return it to repeats",
    )


@check(
    "keys.reused",
    Level.SHOULD,
    "A key names one effect: another request under the same key gets the first answer or is "
    "refused, and is not carried out.",
)
async def reused(subject: Subject) -> None:
    """Shows whether the server keeps keys at all: equal answers alone may be chance."""
    key = subject.key()
    first = _answer(result_in(await events_of(subject.work(key)), "a call"))
    other = (
        subject.generate(key, start=NUM_PROMPTS)
        if subject.role in SAMPLING_ROLES
        else subject.work(key, [make_sample(20, "something else"), make_sample(21, "12")])
    )
    try:
        again = _answer(result_in(await events_of(other), "another request"))
    except RolemeshError:
        return
    _same(first, again, "another request with a key that was used")


@check(
    "keys.invalid",
    Level.SHOULD,
    "OperationKey: run_id has 1 to 128 characters, fencing_epoch is >= 1.",
)
async def invalid_key(subject: Subject) -> None:
    """A key with empty parts cannot identify an operation."""
    await subject.refused(
        events_of(subject.work(operation_pb2.OperationKey())),
        "a call with an empty key",
        "INVALID_ARGUMENT (KEY_INVALID)",
        "refuse keys that are out of range",
    )


@check(
    "calls.metrics-finite",
    Level.MUST,
    "CallReport.metrics: non-finite values are refused by the producer, never sent.",
)
async def metrics_finite(subject: Subject) -> None:
    """Looks at the metrics of the report, or at Rewards.metrics."""
    result = await subject.usual_result()
    metrics = dict(
        result.metrics
        if isinstance(result, reward_pb2.Rewards)
        else getattr(result, "report", experience_pb2.CallReport()).metrics
    )
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    expect(
        not wrong,
        sent="an ordinary call",
        came=f"the metrics {wrong}",
        remedy="leave a metric out, or refuse the call, when it is not finite",
    )


@check(
    "errors.reasons",
    Level.SHOULD,
    f"A refusal is a google.rpc.Status with an ErrorInfo of domain {ERROR_DOMAIN!r} whose reason "
    "is the one that the contract names.",
    phase=Phase.AFTER,
)
async def reasons(subject: Subject) -> None:
    """Judges all refusals that other checks have seen."""
    wrong = [
        f"{one.sent}: {one.error.reason} instead of {one.reason}"
        for one in subject.refusals
        if one.error.reason != one.reason
    ]
    expect(
        not wrong,
        sent="what was refused as it should be",
        came="; ".join(wrong),
        remedy="send google.rpc.Status in grpc-status-details-bin with an ErrorInfo whose reason "
        f"is the UPPER_SNAKE name of the contract and whose domain is {ERROR_DOMAIN!r}",
    )
