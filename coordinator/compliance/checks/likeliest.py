"""LogprobService of a teacher: the likeliest tokens at the place of each completion token.

No vocabulary has to be known: what is told of an id must be what a row with that token gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.checks.scoring import ABOVE_ZERO, scored, scores_of
from rolemesh.coordinator.compliance.contract import Level
from rolemesh.coordinator.compliance.samples import Sample, ordinary_samples
from rolemesh.coordinator.compliance.subject import Subject, events_of, expect, shorten
from rolemesh.v1 import experience_pb2, tensor_pb2

TOP_K = 3

MOST = 1024
"""Greatest top_k of the contract."""

TOLERANCE = 0.05
"""Largest difference of two computations of one log-prob, in nats. bfloat16 stays below it."""

likeliest_check = partial(check, roles=("teacher",))


@dataclass(frozen=True, slots=True)
class _Told:
    """What a server said of the ordinary rows, row by row."""

    samples: Sequence[Sample]
    logprobs: list[Any]
    """float32 [T] each."""
    ids: list[Any]
    """int [T, K] each."""
    top: list[Any]
    """float [T, K] each."""


async def _told(subject: Subject) -> _Told:
    samples = ordinary_samples()
    columns = await subject.rows(await scored(subject, samples, top_k=TOP_K))
    names = ("scores", "scores_top_ids", "scores_top")
    wanted = [len(sample.completion_tokens) for sample in samples]
    found = {name: columns[name] for name in names if name in columns}
    lengths = {name: column.lengths().tolist() for name, column in found.items()}
    is_whole = lengths == dict.fromkeys(names, wanted)
    widths = [column.width for column in found.values()]
    expect(
        is_whole and widths == [1, TOP_K, TOP_K],
        sent=f"ComputeLogprobs with top_k {TOP_K} of completions of {wanted} tokens",
        came=f"{lengths} values of widths {widths}",
        remedy=f"answer {TOP_K} ids and log-probs for each completion token",
    )
    return _Told(samples, *(columns[name].rows() for name in names))


@likeliest_check(
    "likeliest.columns",
    Level.MUST,
    "With `top_k` above 0 also <column>_top_ids, int32, completion, of width k, and <column>_top, "
    "float32, completion, of width k.",
)
async def columns(subject: Subject) -> None:
    """There are three columns, of the right names, kinds, dtypes and widths."""
    ref = await scored(subject, ordinary_samples(), top_k=TOP_K)
    schemas = [schema for group in ref.groups for schema in group.columns]

    def schema(name: str, dtype: tensor_pb2.DataType.ValueType, width: int) -> Any:
        return experience_pb2.ColumnSchema(
            name=name, kind=experience_pb2.COLUMN_KIND_COMPLETION, dtype=dtype, width=width
        )

    float32, int32 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_INT32
    wanted = [
        schema("scores", float32, 0),
        schema("scores_top", float32, TOP_K),
        schema("scores_top_ids", int32, TOP_K),
    ]
    expect(
        sorted(schemas, key=lambda one: one.name) == wanted,
        sent=f"ComputeLogprobs with top_k {TOP_K}",
        came=shorten(schemas),
        remedy="publish the column of log-probs, the ids and their log-probs, with their width",
    )


@likeliest_check("likeliest.order", Level.MUST, "The k likeliest tokens, the likeliest first.")
async def order(subject: Subject) -> None:
    """Log-probs at a place do not rise."""
    told = await _told(subject)
    rises = [float(np.diff(row, axis=1).max()) for row in told.top]
    expect(
        max(rises) <= 0,
        sent=f"ComputeLogprobs with top_k {TOP_K}",
        came=f"a log-prob that is {max(rises):.4g} above the one before it",
        remedy="sort the tokens of each place by their log-probs, the greatest first",
    )


@likeliest_check(
    "likeliest.probabilities",
    Level.MUST,
    "`<column>_top`: their log-probs, natural log, of one distribution: at most 0, and all "
    "probabilities together at most 1.",
)
async def probabilities(subject: Subject) -> None:
    """Log-probs are at most 0, and their probabilities sum to at most 1."""
    top = np.concatenate((await _told(subject)).top)
    greatest, mass = float(top.max()), float(np.exp(top.astype(np.float64)).sum(1).max())
    expect(
        bool(np.isfinite(top).all()) and greatest <= ABOVE_ZERO and mass <= 1 + ABOVE_ZERO,
        sent=f"ComputeLogprobs with top_k {TOP_K}",
        came=f"log-probs of up to {greatest:.4g}, whose probabilities sum to up to {mass:.4g}",
        remedy="answer log-softmax over the whole vocabulary, not over the k tokens, and no logits",
    )


@likeliest_check(
    "likeliest.ids",
    Level.MUST,
    "`<column>_top_ids`: tokens of the vocabulary, each once at a place.",
)
async def ids(subject: Subject) -> None:
    """Ids are not negative, differ, and are tokens that the server itself scores."""
    told = await _told(subject)
    found = np.concatenate(told.ids)
    repeated = [row.tolist() for row in found if len(set(row.tolist())) < TOP_K]
    expect(
        bool((found >= 0).all()) and not repeated,
        sent=f"ComputeLogprobs with top_k {TOP_K}",
        came=f"ids from {int(found.min())}, and at a place {shorten(repeated[:1] or 'all differ')}",
        remedy="answer the ids of different tokens at each place",
    )
    for place in range(TOP_K):
        # An id beyond the vocabulary is refused here.
        await scores_of(subject, _ending_with(told, place))


@likeliest_check(
    "likeliest.sampled",
    Level.MUST,
    "The log-prob of the token at a place is the one that is told of it where it is among the "
    "likeliest.",
)
async def sampled(subject: Subject) -> None:
    """A row that ends with one of the likeliest tokens gets what was told of that token."""
    told = await _told(subject)
    off = [
        abs(float(row[at]) - float(top[at, place]))
        for sample, row, tokens, top in zip(
            told.samples, told.logprobs, told.ids, told.top, strict=True
        )
        for at, token in enumerate(sample.completion_tokens)
        for place in range(TOP_K)
        if int(tokens[at, place]) == token
    ]
    for place in range(TOP_K):
        found = await scores_of(subject, _ending_with(told, place))
        off += [
            abs(float(row[-1]) - float(top[-1, place]))
            for row, top in zip(found, told.top, strict=True)
        ]
    expect(
        max(off) <= TOLERANCE,
        sent="rows, then the same with one of their likeliest tokens as the last",
        came=f"a log-prob that is {max(off):.4g} off what was told of the token",
        remedy="take ids, their log-probs and the token's own from one distribution: that of the "
        "state before the token",
    )


@likeliest_check(
    "likeliest.refusals",
    Level.MUST,
    "`top_k`: 0 to 1,024 and at most the size of the vocabulary; not together with `with_entropy`.",
)
async def refusals(subject: Subject) -> None:
    """A top_k out of range is refused, and one beside an entropy."""
    ref = subject.producer.serve(ordinary_samples(), subject.run_id)
    for top_k, with_entropy in ((-1, False), (MOST + 1, False), (TOP_K, True)):
        call = subject.logprobs(subject.key(), ref, top_k=top_k, with_entropy=with_entropy)
        await subject.refused(
            events_of(call),
            f"ComputeLogprobs with top_k {top_k} and with_entropy {with_entropy}",
            "INVALID_ARGUMENT (SPEC_INVALID)",
            "refuse what the contract does not allow",
        )


def _ending_with(told: _Told, place: int) -> list[Sample]:
    """The rows with their last token replaced by the one that stands at `place` there."""
    return [
        replace(sample, completion_tokens=(*sample.completion_tokens[:-1], int(tokens[-1, place])))
        for sample, tokens in zip(told.samples, told.ids, strict=True)
    ]
