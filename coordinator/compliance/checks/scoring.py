"""LogprobService and ValueService: one number for each completion token, of the right token.

The checks need no model of their own: they use what is true of every causal model, and what a
temperature does to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.contract import LOGPROB_ROLES, Level, NotApplicableError
from rolemesh.coordinator.compliance.samples import Sample, ordinary_samples, token_ids
from rolemesh.coordinator.compliance.subject import (
    Subject,
    events_of,
    expect,
    experience_in,
    result_in,
    shorten,
)
from rolemesh.v1 import experience_pb2, tensor_pb2

scoring_check = partial(check, roles=("reference", "teacher", "critic", "actor"))

TOLERANCE_OF_SPREAD = 0.1
"""Largest difference between two computations of one number, as a part of the standard deviation of
all numbers. bfloat16 stays below it; the number of another token differs by about the deviation."""

ABOVE_ZERO = 1e-3
"""Rounding may raise the log of a probability of 1 by this much above 0."""

HOT = 1e6
"""A temperature at which all tokens are equally likely."""

EVEN = 0.01
"""Largest spread of log-probs at HOT: logits cause 1e-4 of it, bfloat16 more."""

Scores = list[np.ndarray[Any, Any]]


async def scored(
    subject: Subject,
    samples: Sequence[Sample],
    ref: experience_pb2.ExperienceRef | None = None,
    **options: Any,
) -> experience_pb2.ExperienceRef:
    """What scoring of rows answers, under a new key.

    Args:
        subject: The server.
        samples: The rows.
        ref: Reference to the same rows; None: the suite serves them as one shard.
        **options: Of `Subject.logprobs`.
    """
    ref = subject.producer.serve(samples, subject.run_id) if ref is None else ref
    call = subject.consume(ref, **options)
    return experience_in(result_in(await events_of(call), "an experience"), "an experience")


async def scores_of(
    subject: Subject,
    samples: Sequence[Sample],
    ref: experience_pb2.ExperienceRef | None = None,
) -> Scores:
    """Log-probs or values of each row's completion tokens, under a new key.

    Args:
        subject: The server.
        samples: The rows.
        ref: Reference to the same rows; None: the suite serves them as one shard.
    """
    columns = await subject.rows(await scored(subject, samples, ref))
    name = "values" if subject.role == "critic" else "scores"
    expect(
        name in columns,
        sent=f"a scoring into the column {name!r}",
        came=f"the columns {list(columns)}",
        remedy="name the column as the contract does",
    )
    return columns[name].rows()


def expect_close(first: Scores, second: Scores, *, sent: str, remedy: str) -> None:
    """Raises BrokenContractError where two computations of the same numbers differ.

    Raises:
        NotApplicableError: Nothing can be told from the numbers.
    """
    one, other = np.concatenate(first), np.concatenate(second)
    if len(one) != len(other) or not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise NotApplicableError("the numbers are not finite, or too few: see the other checks")
    spread = float(one.std())
    if spread == 0.0 and bool((one == other).all()):
        raise NotApplicableError("all numbers were equal, so that nothing can be told from them")
    worst = float(np.abs(one - other).max())
    expect(
        worst <= TOLERANCE_OF_SPREAD * spread,
        sent=sent,
        came=f"numbers that differ by up to {worst:.4g}, spread by {spread:.4g}",
        remedy=remedy,
    )


@scoring_check(
    "scores.column",
    Level.MUST,
    "The result has one column, float32, completion: `column` of the request, or values.",
)
async def column(subject: Subject) -> None:
    """The column has the right name, kind and dtype, and the rows of the request."""
    samples = ordinary_samples()
    found = await scored(subject, samples)
    wanted = experience_pb2.ColumnSchema(
        name="values" if subject.role == "critic" else "scores",
        kind=experience_pb2.COLUMN_KIND_COMPLETION,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
    )
    schemas = [schema for group in found.groups for schema in group.columns]
    expect(
        schemas == [wanted] and found.num_rows == len(samples),
        sent=f"an experience of {len(samples)} rows",
        came=f"{found.num_rows} rows of {shorten(schemas)}",
        remedy=f"publish one column {wanted.name!r}, float32, one value a completion token",
    )


@scoring_check("scores.lengths", Level.MUST, "One value for each completion token, packed.")
async def lengths(subject: Subject) -> None:
    """There is one number for each completion token; prompt_lengths says where those begin."""
    samples = ordinary_samples()
    came = [len(row) for row in await scores_of(subject, samples)]
    wanted = [len(sample.completion_tokens) for sample in samples]
    expect(
        came == wanted,
        sent=f"completions of {wanted} tokens",
        came=f"{came} values",
        remedy="answer one value for each token behind the prompt, none for the prompt",
    )


@scoring_check("scores.finite", Level.MUST, "Every value is finite.")
async def finite(subject: Subject) -> None:
    """NaN would reach the weights."""
    scores = np.concatenate(await scores_of(subject, ordinary_samples()))
    expect(
        bool(np.isfinite(scores).all()),
        sent="seven ordinary rows",
        came=f"{int((~np.isfinite(scores)).sum())} of {len(scores)} values not finite",
        remedy="compute the log-softmax in float32; refuse the call when a value is not finite",
    )


@scoring_check(
    "scores.not-positive",
    Level.MUST,
    "Natural log of a probability: at most 0.",
    roles=LOGPROB_ROLES,
)
async def not_positive(subject: Subject) -> None:
    """Log-probs are at most 0, which logits are not."""
    worst = float(np.concatenate(await scores_of(subject, ordinary_samples())).max())
    expect(
        not worst > ABOVE_ZERO,
        sent="seven ordinary rows",
        came=f"a log-prob of {worst:.4g}",
        remedy="answer log-softmax of the logits, not the logits",
    )


@scoring_check("scores.deterministic", Level.MUST, "A frozen model scores the same tokens alike.")
async def deterministic(subject: Subject) -> None:
    """Two keys give the same numbers, so dropout, for example, is off."""
    samples = ordinary_samples()
    first, again = [await scores_of(subject, samples) for _ in range(2)]
    expect_close(
        first,
        again,
        sent="the same rows under two keys",
        remedy="score in evaluation mode, without dropout or sampling",
    )


@scoring_check(
    "scores.causal",
    Level.MUST,
    "values[t] belongs to the state before completion token t; a log-prob is of token t given "
    "those before it.",
)
async def causal(subject: Subject) -> None:
    """Another last token must not change earlier log-probs, nor any value."""
    samples = ordinary_samples()
    changed = [
        replace(one, completion_tokens=(*one.completion_tokens[:-1], *token_ids(seed + 77, 1)))
        for seed, one in enumerate(samples)
    ]
    first, other = [await scores_of(subject, rows) for rows in (samples, changed)]
    if subject.role != "critic":
        first, other = ([row[:-1] for row in rows] for rows in (first, other))
    expect_close(
        first,
        other,
        sent="rows, then the same with another last token",
        remedy="shift by one: the number of token t comes from the hidden state of token t - 1",
    )


@scoring_check(
    "scores.cut",
    Level.MUST,
    "prompt_lengths: where the completion begins in tokens. The cut says which numbers are sent, "
    "not what they are.",
)
async def cut(subject: Subject) -> None:
    """If the prompt is one token longer, only the first number of each row is gone."""
    samples = ordinary_samples()
    later = [
        replace(
            one,
            prompt_tokens=(*one.prompt_tokens, one.completion_tokens[0]),
            completion_tokens=one.completion_tokens[1:],
        )
        for one in samples
    ]
    first, other = [await scores_of(subject, rows) for rows in (samples, later)]
    expect_close(
        [row[1:] for row in first],
        other,
        sent="rows, then the same with the prompt one token longer",
        remedy="let value t be that of token prompt_lengths + t",
    )


@scoring_check(
    "scores.independent",
    Level.MUST,
    "Padding exists only inside a micro-batch: a row's numbers do not depend on its neighbours.",
)
async def independent(subject: Subject) -> None:
    """Scores rows together, then each alone: the numbers are the same."""
    samples = ordinary_samples()
    together = await scores_of(subject, samples)
    alone = [(await scores_of(subject, [sample]))[0] for sample in samples]
    expect_close(
        together,
        alone,
        sent="seven rows together, then each alone",
        remedy="mask padding, and count positions from the first token of each row",
    )


@scoring_check(
    "scores.temperature",
    Level.MUST,
    "natural log at `temperature`; temperature > 0; with `with_entropy` also `<column>_entropy`, "
    "nats.",
    roles=LOGPROB_ROLES,
)
async def temperature(subject: Subject) -> None:
    """At a very high temperature all tokens are equally likely."""
    found = await scored(subject, ordinary_samples(), temperature=HOT, with_entropy=True)
    columns = await subject.rows(found)
    expect(
        {"scores", "scores_entropy"} == set(columns),
        sent="ComputeLogprobs with with_entropy",
        came=f"the columns {list(columns)}",
        remedy="add the column <column>_entropy, float32, completion",
    )
    logprobs, entropy = columns["scores"].values, columns["scores_entropy"].values
    apart = float(np.abs(logprobs - logprobs.mean()).max())
    expect(
        apart <= EVEN,
        sent=f"ComputeLogprobs at temperature {HOT:g}",
        came=f"log-probs that lie up to {apart:.4g} from their mean",
        remedy="divide the logits by the temperature before the softmax",
    )
    off = float(np.abs(entropy + logprobs.mean()).max())
    expect(
        off <= EVEN * max(1.0, abs(float(logprobs.mean()))),
        sent=f"ComputeLogprobs at temperature {HOT:g} with with_entropy",
        came=f"an entropy that is {off:.4g} off the log-prob of an even distribution",
        remedy="answer the entropy of the distribution at the same temperature, in nats",
    )
    ref = subject.producer.serve(ordinary_samples(), subject.run_id)
    await subject.refused(
        events_of(subject.logprobs(subject.key(), ref, temperature=0.0)),
        "ComputeLogprobs at temperature 0",
        "INVALID_ARGUMENT (SPEC_INVALID)",
        "refuse temperatures that are not above 0",
    )
