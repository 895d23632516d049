"""LogprobService of one of several teachers: which rows it scores, and what it tells of them.

No check is a MUST, since a teacher that is alone gets no route.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.checks.likeliest import TOP_K
from rolemesh.coordinator.compliance.checks.scoring import expect_close, scored
from rolemesh.coordinator.compliance.contract import Level
from rolemesh.coordinator.compliance.samples import Sample, ordinary_samples
from rolemesh.coordinator.compliance.subject import (
    Subject,
    events_of,
    expect,
    experience_in,
    result_in,
    shorten,
)
from rolemesh.rpc.experience.columns import ColumnKind, Columns
from rolemesh.rpc.experience.references import rows_of
from rolemesh.v1 import experience_pb2, logprob_pb2

DOMAINS = ("a", "b", "c")
"""Of the rows, in turn."""

WEIGHTS = "scores_weights"

route_check = partial(check, roles=("teacher",))


def _samples() -> list[Sample]:
    return [
        replace(sample, metadata_json=json.dumps({"domain": domain}))
        for sample, domain in zip(ordinary_samples(), itertools.cycle(DOMAINS), strict=False)
    ]


def _rows_of(*domains: str) -> list[int]:
    each = zip(ordinary_samples(), itertools.cycle(DOMAINS), strict=False)
    return [row for row, (_, domain) in enumerate(each) if domain in domains]


def _described(route: logprob_pb2.RowRoute, top_k: int = 0) -> str:
    more = f" and top_k {top_k}" if top_k else ""
    return f"rows of the domains a, b, c in turn, with the route {{{shorten(route)}}}{more}"


async def _answered(
    subject: Subject, route: logprob_pb2.RowRoute, rows: list[int], top_k: int = 0
) -> experience_pb2.ExperienceRef:
    """What a teacher answers for these rows, those that the route does not leave to others.

    Raises:
        BrokenContractError: It answers for other rows.
    """
    samples, sent = _samples(), _described(route, top_k)
    ref = subject.producer.serve(samples, subject.run_id)
    result = result_in(await events_of(subject.consume(ref, route=route, top_k=top_k)), sent)
    found = experience_in(result, sent)
    held = [sorted(row for one in group.shards for row in rows_of(one)) for group in found.groups]
    expect(
        found.num_rows == len(samples)
        and all(one == rows for one in held)
        and bool(held or not rows),
        sent=sent,
        came=f"shards over the rows {shorten(held)} of a batch of {found.num_rows}",
        remedy=f"let the shards name the rows {rows} of the batch of {len(samples)}; where all are "
        "left to others, answer without a shard",
    )
    expect(
        getattr(result, "is_part", False),
        sent=sent,
        came="a result whose is_part is false",
        remedy="set is_part where the request has a route",
    )
    return found


async def _columns(
    subject: Subject, route: logprob_pb2.RowRoute, rows: list[int], top_k: int = 0
) -> Columns:
    """The columns of the answer, row by row of these.

    Raises:
        BrokenContractError: It is over other rows, or has not their lengths.
    """
    columns = await subject.rows(await _answered(subject, route, rows, top_k), rows=rows)
    samples = _samples()
    wanted = [len(samples[row].completion_tokens) for row in rows]
    lengths = {
        name: column.lengths().tolist()
        for name, column in columns.items()
        if column.kind is ColumnKind.COMPLETION
    }
    expect(
        all(came == wanted for came in lengths.values()),
        sent=f"{_described(route, top_k)}: of its rows, completions of {wanted} tokens",
        came=f"{lengths} values",
        remedy="hold the rows in the order in which the shard names them, with one value for each "
        "completion token",
    )
    return columns


@route_check(
    "route.rows",
    Level.SHOULD,
    "Of several teachers each scores its own rows: with `route` the result is over the rows that "
    "the route does not leave to others.",
)
async def rows(subject: Subject) -> None:
    """Shards name these rows alone, and their log-probs are those of a call without a route."""
    route = logprob_pb2.RowRoute(field="domain", weights={"a": 1.0, "b": 0.5}, left=["c"])
    mine = _rows_of("a", "b")
    for top_k in (0, TOP_K):
        sent = _described(route, top_k)
        part = await _columns(subject, route, mine, top_k)
        whole = await subject.rows(await scored(subject, _samples(), top_k=top_k))
        expect(
            set(part) == set(whole),
            sent=sent,
            came=f"the columns {sorted(part)}",
            remedy=f"answer the columns {sorted(whole)}, as without a route",
        )
        # Rounding may change which of two tokens is the likelier one, but hardly its log-prob.
        for name in sorted(set(whole) - {"scores_top_ids"}):
            expect_close(
                whole.select(mine)[name].rows(),
                part[name].rows(),
                sent=f"{sent}, and without a route",
                remedy="score the rows that Shard.rows names, in this order; weigh no number",
            )
    for other, wanted in (
        (logprob_pb2.RowRoute(field="domain", weights={"b": 1.0}, others_left=True), ["b"]),
        (logprob_pb2.RowRoute(others_weight=1.0), DOMAINS),
        (logprob_pb2.RowRoute(field="domain", left=DOMAINS), []),
    ):
        await _answered(subject, other, _rows_of(*wanted))


@route_check(
    "route.weights",
    Level.SHOULD,
    "`with_weights`: the result has the column `<column>_weights`, float32, row: the weight of "
    "each row. At 0 the row is not scored: its log-probs and ids are 0 in the result.",
)
async def weights(subject: Subject) -> None:
    """Each row comes with the weight of its domain, and with zeros where that is 0."""
    route = logprob_pb2.RowRoute(
        field="domain", weights={"a": 1.0, "b": 0.0}, others_weight=0.25, with_weights=True
    )
    sent = _described(route, TOP_K)
    columns = await _columns(subject, route, _rows_of(*DOMAINS), TOP_K)
    expect(
        WEIGHTS in columns,
        sent=sent,
        came=f"the columns {sorted(columns)}",
        remedy=f"add the column {WEIGHTS!r}, float32, row",
    )
    found = columns[WEIGHTS]
    wanted = np.zeros(found.num_rows, np.float32)
    wanted[_rows_of("a")], wanted[_rows_of("c")] = 1.0, 0.25
    expect(
        found.kind is ColumnKind.ROW
        and found.values.dtype == wanted.dtype
        and bool((found.values == wanted).all()),
        sent=sent,
        came=f"{found.kind.name} {WEIGHTS}, {found.values.dtype}: {shorten(found.values)}",
        remedy=f"answer {wanted} as a column of kind ROW and dtype float32",
    )
    unscored = columns.select(_rows_of("b"))
    greatest = {
        name: float(np.abs(column.values).max())
        for name, column in unscored.items()
        if name != WEIGHTS
    }
    expect(
        not any(greatest.values()),
        sent=sent,
        came=f"in rows of weight 0 numbers of up to {greatest}",
        remedy="answer zeros for the tokens of a row of weight 0",
    )


@route_check(
    "route.refusals",
    Level.SHOULD,
    "`others`: what becomes of rows with another value, or none. Absent: they are refused.",
)
async def refusals(subject: Subject) -> None:
    """A row whose value the route says nothing of is refused, and so is one without a value."""
    ref = subject.producer.serve(_samples(), subject.run_id)
    for route in (
        logprob_pb2.RowRoute(field="domain", weights={"a": 1.0}, left=["b"]),
        logprob_pb2.RowRoute(field="domain.of", weights=dict.fromkeys(DOMAINS, 1.0)),
    ):
        await subject.refused(
            events_of(subject.logprobs(subject.key(), ref, route=route)),
            _described(route),
            "INVALID_ARGUMENT (DATA_INVALID)",
            "refuse rows of which the route says nothing: to leave them out would teach nothing, "
            "in silence",
        )
