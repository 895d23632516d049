"""Whole batches through a model without gradients, in micro-batches, in the batch's own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rolemesh.engine.batching import PaddedRows, micro_batches, pad_rows
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.value_model import ValueModel

Progress = Callable[[str, int, int], Any]
"""Called with (stage, rows done, rows)."""

INPUT_COLUMNS = ("tokens", "prompt_lengths")


def compute_logprobs(
    model: CausalLm,
    batch: Experience,
    *,
    temperature: float,
    with_entropy: bool = False,
    progress: Progress | None = None,
) -> Experience:
    """Scores the completion tokens of a batch.

    Args:
        model: the policy or reference.
        batch: with the columns tokens and prompt_lengths.
        temperature: of the softmax, > 0.
        with_entropy: whether the entropy is wanted too.
        progress: called after each micro-batch.

    Returns:
        On the CPU: column logprobs (float32, completion, natural log), and column entropy
        (float32, completion, nats) on request.
    """

    def score(rows: PaddedRows) -> dict[str, torch.Tensor]:
        logprobs_N, entropy_N = model.score(
            rows, temperature=temperature, with_entropy=with_entropy
        )
        return {"logprobs": logprobs_N} | ({} if entropy_N is None else {"entropy": entropy_N})

    names = ("logprobs", "entropy") if with_entropy else ("logprobs",)
    return _in_micro_batches(model, batch, score, names, "logprobs", progress)


def compute_values(
    model: ValueModel, batch: Experience, *, progress: Progress | None = None
) -> Column:
    """Values of the states before each completion token.

    Args:
        model: the critic.
        batch: with the columns tokens and prompt_lengths.
        progress: called after each micro-batch.

    Returns:
        On the CPU, float32, completion.
    """

    def score(rows: PaddedRows) -> dict[str, torch.Tensor]:
        return {"values": model(rows)}

    return _in_micro_batches(model, batch, score, ("values",), "values", progress)["values"]


def row_groups(batch: Experience, max_tokens: int) -> Iterator[torch.Tensor]:
    """Rows of each micro-batch, int64."""
    lengths = batch["tokens"].lengths().tolist()
    for group in micro_batches(lengths, max_tokens):
        yield torch.tensor(group, dtype=torch.int64)


def completion_lengths(batch: Experience) -> torch.Tensor:
    """int64 [B], completion tokens in each row."""
    return batch["tokens"].lengths() - batch["prompt_lengths"].values


@torch.no_grad()
def _in_micro_batches(
    model: CausalLm | ValueModel,
    batch: Experience,
    score: Callable[[PaddedRows], dict[str, torch.Tensor]],
    names: tuple[str, ...],
    stage: str,
    progress: Progress | None,
) -> Experience:
    batch = batch.require(INPUT_COLUMNS)
    empty = Column.ragged(ColumnKind.COMPLETION, [], torch.float32)
    parts = [Experience(dict.fromkeys(names, empty))]
    order = [torch.empty(0, dtype=torch.int64)]
    done = 0
    for rows in row_groups(batch, model.spec.micro_batch_tokens):
        part = batch.select(rows)
        outputs = score(pad_rows(part, model.device))
        parts.append(completion_columns(part, outputs))
        order.append(rows)
        done += len(rows)
        if progress is not None:
            progress(stage, done, batch.num_rows)
    return in_batch_order(parts, order)


def completion_columns(part: Experience, outputs: dict[str, torch.Tensor]) -> Experience:
    """Model outputs of a micro-batch as completion columns on the CPU, float32."""
    lengths = completion_lengths(part).tolist()
    return Experience(
        {
            name: Column.ragged(
                ColumnKind.COMPLETION,
                torch.split(output_N.detach().float().cpu(), lengths),
                torch.float32,
            )
            for name, output_N in outputs.items()
        }
    )


def in_batch_order(parts: list[Experience], order: list[torch.Tensor]) -> Experience:
    """Stacks micro-batches and puts their rows back where they were in the batch."""
    return Experience.concat(parts).select(torch.cat(order).argsort())
