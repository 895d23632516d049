"""A model as one rank runs it: its stage, its slice and its cut, in step with the other ranks.

Shape letters: S packed tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.cpu_threads import largest_product, threads_worth
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring_model import ScoringModel
from rolemesh.engine.packing.batching import rectangles
from rolemesh.engine.packing.packed_rows import PackedRows, check_prompt_lengths, pack_rows
from rolemesh.engine.packing.pass_cost import APART
from rolemesh.engine.packing.planning import plan_passes
from rolemesh.engine.packing.row_images import RowImages
from rolemesh.engine.parallel.data_parallel import cut_over_data, forget_pass, gather_no_longer
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.parallel.pipeline import Pipeline
from rolemesh.engine.specs.columns import IMAGES

LastStage = Callable[[int, Any], torch.Tensor | None]
"""Takes a micro-batch's number and the model's outputs; gives the loss where one is wanted."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, ready for a forward pass."""

    rows: torch.Tensor
    """int64, their places in the batch; none for a filler."""
    part: Experience
    """The rows' columns."""
    packed: PackedRows
    """The rows as the model takes them."""

    @property
    def num_tokens(self) -> int:
        """S: those that are computed, by all ranks that cut the row."""
        return self.packed.tokens_1S.shape[1]

    @property
    def num_own_tokens(self) -> int:
        """Those of them that this rank computes, and sends to the next stage."""
        return self.packed.tokens_1L.shape[1]

    @property
    def shares(self) -> bool:
        """Whether some of its rows share tokens."""
        return self.num_tokens < len(self.part["tokens"].values)


class RankModel(nn.Module):
    """Runs micro-batches through the model of which this rank holds a part.

    Owned by the rank's compute thread. All ranks of the mesh make it, and make passes, together;
    ranks of one data-parallel replica with the same micro-batches, replicas with the same number
    of them. While it exists the model is called through it alone: what reads a weight must do so
    inside `forward`, where the parts of cut weights are gathered.

    Example::

        policy = RankModel(CausalLm(spec, mesh=mesh))
        compute_logprobs(policy, batch, temperature=1.0)
    """

    def __init__(self, model: CausalLm | ScoringModel) -> None:
        """Connects the stages and cuts the model's weights over the data axis, in place."""
        super().__init__()
        self.model = model
        self.pipeline = Pipeline(
            self.mesh,
            width=model.lm.config.get_text_config().hidden_size,
            device=model.device,
        )
        cut_over_data(self, self.mesh, self.device, model.layers_in)
        model.read_parts()

    @property
    def mesh(self) -> RankMesh:
        """This rank's place, which the model was loaded for."""
        return self.model.mesh

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.model.device

    def forward(
        self, rows: PackedRows, hidden_1SD: torch.Tensor | None, arguments: dict[str, Any]
    ) -> Any:
        """Runs this rank's layers.

        Args:
            rows: Of a micro-batch.
            hidden_1SD: float32, from the stage before; None on the first stage.
            arguments: Of the model's `finish`.

        Returns:
            On the last stage what `finish` gives, elsewhere hidden states [1, S, D].
        """
        hidden_1SD = self.model.stage_forward(rows, hidden_1SD)
        if not self.pipeline.is_last:
            return hidden_1SD
        return self.model.finish(hidden_1SD, rows, **arguments)

    def micro_batches(self, batch: Experience, rows_per_unit: int = 1) -> list[MicroBatch]:
        """Groups the rows of a batch. Uses no collective.

        Rows that begin alike share what they have in common where that saves (`planning`).

        Args:
            batch: With the columns tokens and prompt_lengths.
            rows_per_unit: Neighbouring rows that share a micro-batch; 1: each row for itself.

        Raises:
            ValueError: Rows cannot be laid out or are no whole units, or a token is not in the
                vocabulary.
        """
        return micro_batches(self.model, batch, rows_per_unit)

    def run(
        self,
        passes: Sequence[MicroBatch],
        at_the_end: LastStage,
        *,
        trains: bool,
        arguments: Callable[[MicroBatch], dict[str, Any]],
        done: Callable[[int], None],
    ) -> None:
        """Makes a pass over micro-batches.

        Args:
            passes: The micro-batches.
            at_the_end: Called on the last stage, for each.
            trains: Whether gradients are added to the parameters.
            arguments: Gives those of the model's `finish`, for a micro-batch.
            done: Called with a micro-batch's number when this rank is done with it.
        """
        has_begun = False

        def forward(number: int, hidden_1SD: torch.Tensor | None) -> torch.Tensor | None:
            nonlocal has_begun
            has_begun = True
            one = passes[number]
            given = arguments(one) if self.pipeline.is_last else {}
            outputs = self(one.packed, hidden_1SD, given)
            if not self.pipeline.is_last:
                hidden: torch.Tensor = outputs
                return hidden
            return at_the_end(number, outputs)

        sizes = [micro_batch.num_own_tokens for micro_batch in passes]
        make_pass = self.pipeline.train if trains else self.pipeline.score
        try:
            with threads_worth(self._largest_product(passes), self.device):
                make_pass(sizes, forward, done)
        except BaseException:
            if has_begun:
                forget_pass(self, drops_gradients=trains)
            raise
        gather_no_longer(self)

    def _largest_product(self, passes: Sequence[MicroBatch]) -> int:
        """Multiply-adds of the largest matrix product of these passes on this rank."""
        predicts = isinstance(self.model, CausalLm)
        return max(
            (
                largest_product(
                    self.model.config,
                    num_tokens=one.num_own_tokens,
                    longest=one.packed.longest,
                    num_predicted=len(one.packed.targets_V) if predicts else 0,
                    num_slices=self.mesh.tp.size,
                )
                for one in passes
            ),
            default=0,
        )


def micro_batches(
    model: CausalLm | ScoringModel, batch: Experience, rows_per_unit: int = 1
) -> list[MicroBatch]:
    """Groups the rows of a batch as a model takes them; see `RankModel.micro_batches`."""
    check_in_vocabulary(batch["tokens"].values, model.config)
    check_prompt_lengths(batch)
    max_tokens, cost = model.spec.micro_batch_tokens, model.packing
    images = RowImages.of(batch, model.image_tokens) if IMAGES in batch else None
    # Parsed once; passes take of them what they show.
    batch = batch.require(name for name in batch.columns if name != IMAGES)
    rows = list(batch["tokens"].rows())
    groups = (
        rectangles(batch["tokens"].lengths().tolist(), max_tokens, rows_per_unit)
        if cost is None
        else plan_passes(
            rows if images is None else images.keys(rows),
            max_tokens=max_tokens,
            cost=cost,
            rows_per_unit=rows_per_unit,
        )
    )
    found = []
    for group in groups:
        numbers = torch.tensor(group, dtype=torch.int64)
        part = batch.select(numbers)
        shown = None if images is None else images.select(group)
        packed = pack_rows(part, model.device, cost or APART, model.mesh.cp, shown)
        found.append(MicroBatch(numbers, part, packed))
    return found


def with_fillers(
    passes: list[MicroBatch], batch: Experience, number: int, model: CausalLm | ScoringModel
) -> list[MicroBatch]:
    """Appends micro-batches of one token and no completion, up to a number of passes.

    A replica with fewer micro-batches than another makes passes with them all the same, because
    gathering cut weights takes every replica. Their loss is 0, and so is each of their gradients.
    """
    if len(passes) >= number:
        return passes
    part = filler_rows(batch)
    packed = pack_rows(part, model.device, cp=model.mesh.cp)
    filler = MicroBatch(torch.empty(0, dtype=torch.int64), part, packed)
    return passes + [filler] * (number - len(passes))


def check_in_vocabulary(tokens: torch.Tensor, config: Any, column: str = "tokens") -> None:
    """Raises ValueError for a token that the model has no embedding of.

    Asked before a pass: of a cut vocabulary each slice takes an unknown token for another slice's,
    and computes on; of stages, the first alone would notice, and leave the others waiting.

    Args:
        tokens: Integers.
        config: transformers config of the whole model.
        column: Where they stand, for the error.
    """
    if not tokens.numel():
        return
    vocab_size = config.get_text_config().vocab_size
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"column {column!r} has token {token}, but the model's vocabulary has "
                f"{vocab_size}: give rows of this model's tokenizer"
            )


def filler_rows(batch: Experience) -> Experience:
    """One row with the columns of a batch: a prompt of one token, and nothing after it."""
    columns = {}
    for name, column in batch.columns.items():
        values = column.values
        if column.kind is ColumnKind.SEQUENCE:
            # Of routes, those of the first experts: any will do.
            one = values.new_zeros((1, *values.shape[1:]))
            columns[name] = Column(column.kind, one, torch.tensor([0, 1]))
        elif column.kind is ColumnKind.ROW:
            columns[name] = Column(column.kind, values.new_zeros(1))
        else:
            columns[name] = Column(column.kind, values[:0], torch.zeros(2, dtype=torch.int64))
    columns["prompt_lengths"] = Column(ColumnKind.ROW, torch.ones(1, dtype=torch.int64))
    return Experience(columns)
