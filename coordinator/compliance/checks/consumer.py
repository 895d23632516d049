"""Checks of how a service pulls experience by reference, and of its errors when it cannot."""

from __future__ import annotations

from functools import partial

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.checks.reward import judge
from rolemesh.coordinator.compliance.checks.scoring import scores_of
from rolemesh.coordinator.compliance.contract import (
    REWARD_ROLES,
    BrokenContractError,
    Level,
    Serves,
)
from rolemesh.coordinator.compliance.samples import ordinary_samples
from rolemesh.coordinator.compliance.subject import (
    Subject,
    events_of,
    expect,
    experience_in,
    result_in,
    shorten,
)
from rolemesh.rpc.errors import DeadlineError, RolemeshError

consumer_check = partial(
    check, roles=(*REWARD_ROLES, "reference", "teacher", "critic", "actor"), serves=Serves.RUNS
)

NO_SERVER = "127.0.0.1:1"
"""Nothing listens on this port."""


@consumer_check(
    "experience.column-missing",
    Level.MUST,
    "INVALID_ARGUMENT (COLUMN_MISSING): the experience lacks a column; names it.",
)
async def column_missing(subject: Subject) -> None:
    """A reference names its columns, so a missing one is known without a fetch."""
    without = ("completion_text", "tokens") if subject.role in REWARD_ROLES else ("prompt_lengths",)
    ref = subject.producer.serve(ordinary_samples(), subject.run_id, without=without)
    sent = f"an experience without {' and '.join(without)}"
    remedy = "refuse an experience that lacks a column, and name the column"
    refusal = "INVALID_ARGUMENT (COLUMN_MISSING)"
    error = await subject.refused(events_of(subject.consume(ref)), sent, refusal, remedy)
    expect(
        any(name in error.message for name in without),
        sent=sent,
        came=f"a message without its name: {shorten(error.message)}",
        remedy=remedy,
    )


@consumer_check(
    "experience.peer-unreachable",
    Level.MUST,
    "UNAVAILABLE (PEER_UNREACHABLE): a producer of the experience does not answer.",
)
async def peer_unreachable(subject: Subject) -> None:
    """A dead producer ends the call soon, but it does not end the service."""
    ref = subject.producer.serve(ordinary_samples(), subject.run_id)
    for group in ref.groups:
        for shard in group.shards:
            shard.address = NO_SERVER
    await subject.refused(
        events_of(subject.consume(ref)),
        f"an experience at {NO_SERVER}, where no server listens",
        "UNAVAILABLE (PEER_UNREACHABLE)",
        "pass the failure of the fetch on",
    )


@consumer_check(
    "experience.gone",
    Level.MUST,
    "NOT_FOUND (EXPERIENCE_NOT_FOUND): released, or never here; the step must be replayed.",
)
async def gone(subject: Subject) -> None:
    """The producer reports that rows are gone, and the consumer passes this on."""
    ref = subject.producer.serve(ordinary_samples(), subject.run_id)
    ref.groups[0].shards[0].experience_id = "compliance-released"
    await subject.refused(
        events_of(subject.consume(ref)),
        "an experience that its producer has released",
        "NOT_FOUND (EXPERIENCE_NOT_FOUND)",
        "pass the producer's refusal on",
    )


@consumer_check(
    "experience.torn",
    Level.MUST,
    "Chunks concatenated are the payload that the header describes: a consumer refuses what is "
    "shorter.",
)
async def torn(subject: Subject) -> None:
    """The producer ends its stream before the last byte."""
    ref = subject.producer.serve(ordinary_samples(), subject.run_id, is_torn=True)
    try:
        await events_of(subject.consume(ref))
    except DeadlineError:
        came = f"nothing within {subject.timeout_s:g} s"
    except RolemeshError:
        return
    else:
        came = "a result"
    raise BrokenContractError(
        sent="an experience whose payload ends one byte early",
        came=came,
        remedy="count the bytes that came, and refuse a payload that is not whole",
    )


@consumer_check(
    "experience.shards",
    Level.MUST,
    "Shard.rows: rows of the batch that this shard holds, ascending, when they are not "
    "consecutive. Every row of the batch is in exactly one shard.",
)
async def shards(subject: Subject) -> None:
    """A producer of several ranks spreads a batch over its ranks by length, not by order."""
    samples = ordinary_samples()
    spread = ([1, 3, 4], [0, 2, 5, 6])
    ref = subject.producer.serve(samples, subject.run_id, shards=spread)
    sent = f"seven rows in two shards, rows {spread[0]} and {spread[1]}"
    remedy = "put fetched rows into the batch's order: row i of a shard is row Shard.rows[i]"
    if subject.role in REWARD_ROLES:
        made = experience_in(result_in(await events_of(subject.consume(ref)), sent), sent)
        columns = await subject.rows(made, [subject.column])
        came = columns[subject.column].values.tolist()
        wanted = await judge(subject, samples)
        again = await judge(subject, samples)
        is_same = came == wanted or wanted != again
    else:
        lengths = [len(row) for row in await scores_of(subject, samples, ref)]
        wanted = [len(sample.completion_tokens) for sample in samples]
        came, is_same = lengths, lengths == wanted
    expect(is_same, sent=sent, came=f"{came} instead of {wanted}", remedy=remedy)
