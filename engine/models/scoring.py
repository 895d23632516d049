"""Scoring of whole batches without gradients: in micro-batches, results in the batch's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import MicroBatch, RankModel, with_fillers
from rolemesh.engine.models.scoring_model import ScoringModel
from rolemesh.engine.packing.row_images import refuse_unseen_images
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.low_rank import adapters_off
from rolemesh.engine.specs.columns import IMAGES, INPUT_COLUMNS, ROUTES

Progress = Callable[[str, int, int], Any]
"""Called with (stage, rows done, rows)."""

Retold = Callable[[Experience], Experience]
"""Gives tokens and prompt_lengths of the same rows, with the same completions behind other prompts.
"""


def compute_logprobs(
    model: RankModel,
    batch: Experience,
    *,
    temperature: float,
    with_entropy: bool = False,
    without_adapter: bool = False,
    top_k: int = 0,
    retold: Retold | None = None,
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
        top_k: How many of the likeliest tokens at each place are wanted; not with an entropy.
        retold: Puts the completions behind other prompts before they are scored; None: they stand
            behind those of the batch.
        progress: Called after each micro-batch.

    Returns:
        On the CPU: column logprobs (float32, completion, natural log), and on request column
        entropy (float32, completion, nats), or columns top_ids (int32, completion, of width top_k)
        and top (float32, the same: their log-probs, the likeliest first). On the last pipeline
        stage, equal on all its slices; other stages return no rows.

    Raises:
        ValueError: The temperature is not above 0, top_k is more than the vocabulary or asked for
            with an entropy, or the rows of this rank, or of another one, cannot be used.
    """
    vocab_size = model.model.config.get_text_config().vocab_size
    if not 0 <= top_k <= vocab_size or (top_k and with_entropy):
        raise ValueError(
            f"top_k is {top_k} and with_entropy {with_entropy}: give 0 to {vocab_size}, the size "
            "of the vocabulary, and one of the two"
        )
    if temperature <= 0:
        # Checked on all ranks: the last stage alone divides by it, and if it raised alone, the
        # other stages would wait for it in vain.
        raise ValueError(f"temperature is {temperature}: give a positive number")
    arguments = {"temperature": temperature, "with_entropy": with_entropy, "top_k": top_k}
    names = {"logprobs": "logprobs_N"}
    if with_entropy:
        names["entropy"] = "entropy_N"
    if top_k:
        names |= {"top_ids": "top_ids_NK", "top": "top_NK"}
    with adapters_off() if without_adapter else nullcontext():
        return _in_micro_batches(
            model,
            batch,
            lambda scores: {name: getattr(scores, field) for name, field in names.items()},
            {name: top_k if name.startswith("top") else 1 for name in names},
            progress,
            arguments,
            retold,
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
        model, batch, lambda values_N: {"values": values_N}, {"values": 1}, progress, {}
    )["values"]


def completion_lengths(batch: Experience) -> torch.Tensor:
    """int64 [B], completion tokens in each row."""
    return batch["tokens"].lengths() - batch["prompt_lengths"].values


class Collector:
    """Gathers model outputs of micro-batches, and gives them back in the order of the batch."""

    def __init__(self, widths: Mapping[str, int], kind: ColumnKind = ColumnKind.COMPLETION) -> None:
        """Collects columns of these names and widths, of completions or of rows."""
        self._kind = kind
        self._widths = widths
        self._outputs: dict[str, list[torch.Tensor]] = {name: [] for name in widths}
        self._lengths: list[int] = []
        self._rows = [torch.empty(0, dtype=torch.int64)]

    def add(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keeps outputs, [N], [N, width] or [B] each, where they are, as float32 or int32."""
        if not len(micro_batch.rows):
            return
        for name, output in outputs.items():
            dtype = torch.float32 if output.is_floating_point() else torch.int32
            self._outputs[name].append(output.detach().to(dtype))
        if self._kind is ColumnKind.COMPLETION:
            self._lengths += completion_lengths(micro_batch.part).tolist()
        self._rows.append(micro_batch.rows)

    def in_batch_order(self) -> Experience:
        """The columns of all rows that were added, on the CPU, in one copy for each type."""
        flat: dict[str, torch.Tensor] = {}
        for dtype in (torch.float32, torch.int32):
            own = {
                name: torch.cat(parts).flatten()
                for name, parts in self._outputs.items()
                if parts and parts[0].dtype == dtype
            }
            if own:
                sizes = [len(values) for values in own.values()]
                parts = torch.split(torch.cat([*own.values()]).cpu(), sizes)
                flat |= zip(own, parts, strict=True)
        columns = {
            name: self._column(flat.get(name), width) for name, width in self._widths.items()
        }
        return Experience(columns).select(torch.cat(self._rows).argsort())

    def _column(self, flat: torch.Tensor | None, width: int) -> Column:
        # Without rows the type is not known; nor does anyone read it.
        values = torch.empty(0) if flat is None else flat
        if width > 1:
            values = values.view(len(values) // width, width)
        if self._kind is ColumnKind.ROW:
            return Column(self._kind, values)
        return Column(self._kind, values, offsets_of(torch.tensor(self._lengths)))


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


def columns_read(
    columns: Sequence[str], batch: Experience, model: CausalLm | ScoringModel
) -> tuple[str, ...]:
    """Columns that a model reads, and of a batch that has them its images and its routes.

    Raises:
        ImageInvalidError: Prompts show images, but the batch has none.
        ValueError: Routes are not those of this model's experts.
    """
    if IMAGES in batch:
        columns = (*columns, IMAGES)
    elif model.image_tokens is not None:
        refuse_unseen_images(batch, model.image_tokens)
    if ROUTES not in batch:
        return tuple(columns)
    width, routers = batch[ROUTES].width, model.routers
    if routers is None or width != routers.width:
        has = "no experts" if routers is None else f"{routers.width} numbers for each token"
        raise ValueError(
            f"column 'routes' has {width} numbers for each token, but the routes of this model "
            f"have {has}: leave the column out, or give rows that this model's sampler has made"
        )
    return (*columns, ROUTES)


def _in_micro_batches(
    model: RankModel,
    batch: Experience,
    named: Callable[[Any], dict[str, torch.Tensor]],
    widths: Mapping[str, int],
    progress: Progress | None,
    arguments: dict[str, Any],
    retold: Retold | None = None,
) -> Experience:

    def prepare() -> tuple[tuple[Experience, list[MicroBatch]], int]:
        told = batch if retold is None else retold(batch)
        inputs = told.require(columns_read(INPUT_COLUMNS, told, model.model))
        passes = model.micro_batches(inputs)
        return (inputs, passes), len(passes)

    (inputs, passes), numbers = prepare_together(prepare, model.mesh.parts, model.device)
    passes = with_fillers(passes, inputs, max(numbers), model.model)
    collector = Collector(widths)

    def collect(number: int, outputs: Any) -> None:
        collector.add(passes[number], named(outputs))

    model.run(
        passes,
        collect,
        trains=False,
        arguments=lambda _: arguments,
        done=RowProgress(progress, next(iter(widths)), passes, batch.num_rows),
    )
    return collector.in_batch_order()
