"""Plan of an update: which rows a data-parallel rank trains on, optimizer step by optimizer step.

It is arithmetic on the lengths of a whole batch; every rank makes its own, without asking others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.packing.batching import update_assignment
from rolemesh.engine.parallel.mesh import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """The rows of a batch that one rank holds, and its part of each optimizer step.

    Rows are numbers of rows of the whole batch; places are numbers of rows of what the rank holds.

    Example: of a batch of 8 rows a rank holds `rows` [1, 4, 6]. If rows 6 and 4 are its part of the
    first step and row 1 its part of the second, `steps` is [[2, 1], [0]].
    """

    lengths: Sequence[int]
    """Tokens in each row of the whole batch."""
    rows: Sequence[int]
    """The rows that this rank holds, in the order in which it holds them."""
    steps: Sequence[Sequence[int]]
    """For each optimizer step, the places of this rank's part; may be empty."""
    rows_of_steps: Sequence[int]
    """For each optimizer step, the rows of all ranks together; where it is 0 no rank has any."""
    rows_per_unit: int = 1
    """Neighbouring places that stay together down to the forward pass; 1: each for itself."""

    @classmethod
    def of_update(
        cls,
        lengths: Sequence[int],
        parts: RankGroup,
        *,
        epochs: int,
        mini_batch_rows: int,
        seed: int,
        rows_per_unit: int = 1,
        judged: Sequence[int] | None = None,
    ) -> UpdatePlan:
        """Plans an optimizer step for each mini-batch of shuffled rows; see `update_assignment`.

        Which rows a mini-batch has does not depend on the ranks.

        Args:
            lengths: Tokens in each row of the whole batch.
            parts: The ranks that divide each mini-batch among them (of a mesh `parts`), and which
                of them this one is.
            epochs: Passes over the batch.
            mini_batch_rows: Rows of one optimizer step, over all ranks; the last one of an epoch
                may have fewer.
            seed: Of the shuffles.
            rows_per_unit: Neighbouring rows that go to the same mini-batch, rank and forward pass;
                divides mini_batch_rows.
            judged: The rows that take part, ascending; None: all.

        Raises:
            ValueError: A number is out of range.
        """
        rows = range(len(lengths)) if judged is None else judged
        _check_rows("judged", rows, lengths)
        assignment = update_assignment(
            [lengths[row] for row in rows],
            epochs=epochs,
            mini_batch_rows=mini_batch_rows,
            seed=seed,
            num_parts=parts.size,
            rows_per_unit=rows_per_unit,
        )
        dealt = [[[rows[index] for index in part] for part in step] for step in assignment]
        return cls._of_parts(dealt, lengths, parts, rows_per_unit)

    @classmethod
    def dealt(cls, lengths: Sequence[int], parts: RankGroup, *, num_steps: int) -> UpdatePlan:
        """Plans to deal rows out over optimizer steps, in order; each row is in one step.

        Args:
            lengths: Tokens in each row of the whole batch. With fewer rows than steps, some steps
                have none.
            parts: The ranks that divide the rows of a step among them, and which of them this one
                is.
            num_steps: Optimizer steps of the update.
        """
        dealt = []
        for step in range(num_steps):
            first, stop = (at * len(lengths) // num_steps for at in (step, step + 1))
            cut = balanced_partition(lengths[first:stop], parts.size)
            dealt.append([[first + index for index in part] for part in cut])
        return cls._of_parts(dealt, lengths, parts)

    @classmethod
    def of_mini_batch(
        cls, lengths: Sequence[int], rows: Sequence[int], rows_per_unit: int = 1
    ) -> UpdatePlan:
        """Plans one step, in which this rank takes all that it holds.

        Args:
            lengths: Tokens in each row of the whole mini-batch.
            rows: This rank's part of them; other ranks have the rest.
            rows_per_unit: Neighbouring rows of the mini-batch that are in the same part, and share
                a forward pass.

        Raises:
            ValueError: The mini-batch has no rows, or `rows` has one that is not in it.
        """
        if not lengths:
            raise ValueError("the batch has 0 rows: give at least one")
        _check_rows("rows", rows, lengths)
        return cls(
            lengths=lengths,
            rows=rows,
            steps=[range(len(rows))],
            rows_of_steps=[len(lengths)],
            rows_per_unit=rows_per_unit,
        )

    def check(self, batch: Experience, *, num_steps: int) -> None:
        """Raises ValueError unless the plan is of this batch and of so many optimizer steps.

        Args:
            batch: What the rank holds, with the column tokens.
            num_steps: Optimizer steps that are to be made.
        """
        if len(self.steps) != num_steps:
            raise ValueError(
                f"the plan has {len(self.steps)} optimizer steps, but {num_steps} are made: plan "
                "as many (forward_backward makes one)"
            )
        held = batch["tokens"].lengths().tolist()
        if len(held) != len(self.rows):
            raise ValueError(
                f"the plan has {len(self.rows)} rows for this rank, but the batch has {len(held)}: "
                "give it the rows of the plan, in their order"
            )
        for row, length in zip(self.rows, held, strict=True):
            if self.lengths[row] != length:
                raise ValueError(
                    f"row {row} has {length} tokens, but {self.lengths[row]} in the plan's "
                    "lengths: give the rows of the plan, in their order"
                )

    @classmethod
    def _of_parts(
        cls,
        dealt: Sequence[Sequence[Sequence[int]]],
        lengths: Sequence[int],
        parts: RankGroup,
        rows_per_unit: int = 1,
    ) -> UpdatePlan:
        """Makes the plan from rows by optimizer step and part; a rank holds its own, ascending."""
        own = [step[parts.index] for step in dealt]
        rows = sorted({row for part in own for row in part})
        place_of = {row: place for place, row in enumerate(rows)}
        return cls(
            lengths=lengths,
            rows=rows,
            steps=[[place_of[row] for row in part] for part in own],
            rows_of_steps=[sum(map(len, step)) for step in dealt],
            rows_per_unit=rows_per_unit,
        )


def _check_rows(name: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
    for row in rows:
        if not 0 <= row < len(lengths):
            raise ValueError(
                f"{name} has row {row}, but lengths has {len(lengths)} entries: give rows of the "
                "whole batch"
            )
