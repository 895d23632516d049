"""Rows of a batch that a data-parallel rank trains on."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.batching import balanced_units, update_assignment
from rolemesh.engine.parallel.mesh import RankGroup


class HeldRows:
    """The rows of a batch that a rank holds, as rows of the whole one.

    Example: a rank holds rows 1, 4 and 6 of 8 as a batch of 3. If rows 4 and 6 are its part of a
    mini-batch, their places are 1 and 2.
    """

    def __init__(
        self, batch: Experience, rows: Sequence[int] | None, lengths: Sequence[int] | None
    ) -> None:
        """Looks at what is held.

        Args:
            batch: what the rank holds.
            rows: which rows of the whole batch they are; None: all, in order.
            lengths: tokens in each row of the whole batch, where `rows` is given.

        Raises:
            ValueError: the three do not fit together.
        """
        if (rows is None) != (lengths is None):
            raise ValueError("rows and lengths go together: give both, or neither")
        own_lengths: list[int] = batch["tokens"].lengths().tolist()
        self.lengths: Sequence[int] = own_lengths if lengths is None else lengths
        if rows is None:
            rows = range(batch.num_rows)
        elif len(rows) != batch.num_rows:
            raise ValueError(
                f"rows has {len(rows)} entries, but the batch has {batch.num_rows} rows: give "
                "the row of the whole batch for each"
            )
        self._place_of = {row: place for place, row in enumerate(rows)}
        for row, place in self._place_of.items():
            if not 0 <= row < len(self.lengths):
                raise ValueError(
                    f"rows has {row}, but lengths has {len(self.lengths)} entries: give the "
                    "length of each row of the whole batch"
                )
            if self.lengths[row] != own_lengths[place]:
                raise ValueError(
                    f"row {row} has {own_lengths[place]} tokens, but lengths says "
                    f"{self.lengths[row]}: give the lengths of the whole batch"
                )

    def of_mini_batch(self, dp: RankGroup, rows_per_unit: int = 1) -> list[int]:
        """Places of this rank's part, where the whole batch is one mini-batch; rows ascend.

        Raises:
            ValueError: there are no rows, they are no whole units, or one of the part's is not
                held.
        """
        if not self.lengths:
            raise ValueError("the batch has 0 rows: give at least one")
        return self._places(balanced_units(self.lengths, dp.size, rows_per_unit)[dp.index])

    def of_update(
        self,
        dp: RankGroup,
        *,
        epochs: int,
        mini_batch_rows: int,
        seed: int,
        rows_per_unit: int = 1,
    ) -> list[list[int]]:
        """Places of this rank's part of each mini-batch; see `batching.update_assignment`.

        Raises:
            ValueError: a number is out of range, or a row of a part is not held.
        """
        assignment = update_assignment(
            self.lengths,
            epochs=epochs,
            mini_batch_rows=mini_batch_rows,
            seed=seed,
            num_parts=dp.size,
            rows_per_unit=rows_per_unit,
        )
        return self.places([parts[dp.index] for parts in assignment])

    def places(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Places of rows of the whole batch.

        Raises:
            ValueError: a row is not held.
        """
        return [self._places(part) for part in parts]

    def _places(self, rows: Sequence[int]) -> list[int]:
        absent = [row for row in rows if row not in self._place_of]
        if absent:
            raise ValueError(
                f"this rank trains on row {absent[0]} ({len(absent)} such rows), but the batch "
                "does not hold it: give it the rows of `batching.update_assignment` (update) or "
                "`balanced_units` (forward_backward)"
            )
        return [self._place_of[row] for row in rows]
