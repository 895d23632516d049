"""Scoring of whole batches without gradients: in micro-batches, results in the batch's order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.rank_model import MicroBatch, RankModel, with_fillers
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.low_rank import adapters_off
from rolemesh.engine.specs.columns import INPUT_COLUMNS

Progress = Callable[[str, int, int], Any]
"""Called with (stage, rows done, rows)."""


def compute_logprobs(
    model: RankModel,
    batch: Experience,
    *,
    temperature: float,
    with_entropy: bool = False,
    without_adapter: bool = False,
    progress: Progress | None = None,
) -> Experience:
    """Scores the completion tokens of a batch.

    With many ranks all of them call it: those of a data-parallel replica with the same rows,
    replicas with rows of their own (there may be none).

    Args:
        model: The policy or reference.
        batch: This rank's rows, with the columns tokens and prompt_lengths.
        temperature: Of the softmax, > 0.
        with_entropy: Whether the entropy is wanted too.
        without_adapter: Whether the base alone scores.
        progress: Called after each micro-batch.

    Returns:
        On the CPU: column logprobs (float32, completion, natural log), and column entropy
        (float32, completion, nats) on request. On the last pipeline stage, equal on all its
        slices; other stages return no rows.

    Raises:
        ValueError: The temperature is not above 0, or the rows of this rank, or of another one,
            cannot be used.
    """
    if temperature <= 0:
        # Checked on all ranks: the last stage alone divides by it, and if it raised alone, the
        # other stages would wait for it in vain.
        raise ValueError(f"temperature is {temperature}: give a positive number")
    names = ("logprobs", "entropy") if with_entropy else ("logprobs",)
    arguments = {"temperature": temperature, "with_entropy": with_entropy}
    with adapters_off() if without_adapter else nullcontext():
        return _in_micro_batches(
            model,
            batch,
            lambda outputs: dict(zip(names, outputs, strict=False)),
            names,
            progress,
            arguments,
        )


def compute_values(
    model: RankModel, batch: Experience, *, progress: Progress | None = None
) -> Column:
    """Values of the states before each completion token.

    With many ranks all of them call it; see `compute_logprobs`.

    Args:
        model: The critic.
        batch: This rank's rows, with the columns tokens and prompt_lengths.
        progress: Called after each micro-batch.

    Returns:
        On the CPU, float32, completion; without rows on all stages but the last.

    Raises:
        ValueError: The rows of this rank, or of another one, cannot be used.
    """
    return _in_micro_batches(
        model, batch, lambda values_N: {"values": values_N}, ("values",), progress, {}
    )["values"]


def completion_lengths(batch: Experience) -> torch.Tensor:
    """int64 [B], completion tokens in each row."""
    return batch["tokens"].lengths() - batch["prompt_lengths"].values


class Collector:
    """Gathers model outputs of micro-batches, and gives them back in the order of the batch."""

    def __init__(self, names: tuple[str, ...], kind: ColumnKind = ColumnKind.COMPLETION) -> None:
        """Collects columns of these names, of completions or of rows."""
        self._kind = kind
        self._outputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        self._lengths: list[int] = []
        self._rows = [torch.empty(0, dtype=torch.int64)]

    def add(self, micro_batch: MicroBatch, outputs: dict[str, torch.Tensor]) -> None:
        """Keeps outputs, float [N] (or [B]) each, where they are, as float32."""
        if not len(micro_batch.rows):
            return
        for name, output in outputs.items():
            self._outputs[name].append(output.detach().float())
        if self._kind is ColumnKind.COMPLETION:
            self._lengths += completion_lengths(micro_batch.part).tolist()
        self._rows.append(micro_batch.rows)

    def in_batch_order(self) -> Experience:
        """The columns of all rows that were added, on the CPU, in one copy."""
        parts = [part for parts in self._outputs.values() for part in parts]
        whole = torch.cat(parts).cpu() if parts else torch.empty(0)
        num_names = len(self._outputs)
        columns = zip(self._outputs, whole.view(num_names, len(whole) // num_names), strict=True)
        found = Experience({name: self._column(values) for name, values in columns})
        return found.select(torch.cat(self._rows).argsort())

    def _column(self, values: torch.Tensor) -> Column:
        if self._kind is ColumnKind.ROW:
            return Column(self._kind, values)
        return Column.ragged(self._kind, torch.split(values, self._lengths), torch.float32)


class RowProgress:
    """Counts rows as their micro-batches are done."""

    def __init__(
        self, progress: Progress | None, stage: str, passes: list[MicroBatch], num_rows: int
    ) -> None:
        self._progress = progress
        self._stage = stage
        self._passes = passes
        self._num_rows = num_rows
        self._done = 0

    def __call__(self, number: int) -> None:
        """Tells of a micro-batch, unless it was a filler."""
        num_rows = len(self._passes[number].rows)
        self._done += num_rows
        if self._progress is not None and num_rows:
            self._progress(self._stage, self._done, self._num_rows)


def _in_micro_batches(
    model: RankModel,
    batch: Experience,
    named: Callable[[Any], dict[str, torch.Tensor]],
    names: tuple[str, ...],
    progress: Progress | None,
    arguments: dict[str, Any],
) -> Experience:

    def prepare() -> tuple[tuple[Experience, list[MicroBatch]], int]:
        inputs = batch.require(INPUT_COLUMNS)
        passes = model.micro_batches(inputs)
        return (inputs, passes), len(passes)

    (inputs, passes), numbers = prepare_together(prepare, model.mesh.dp, model.device)
    passes = with_fillers(passes, inputs, max(numbers), model.device)
    collector = Collector(names)

    def collect(number: int, outputs: Any) -> None:
        collector.add(passes[number], named(outputs))

    model.run(
        passes,
        collect,
        trains=False,
        arguments=arguments,
        done=RowProgress(progress, names[0], passes, batch.num_rows),
    )
    return collector.in_batch_order()
