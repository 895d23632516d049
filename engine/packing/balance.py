"""Rows cut into parts of nearly equal work. Pure: no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Cuts rows into parts whose sums of lengths are nearly equal.

    The largest differencing method of Karmarkar and Karp (Berkeley, UCB/CSD-82-113, 1982) for k
    parts. Begin with a partition for each row: that row and k - 1 empty parts. Join the two
    partitions with the largest spread, the heaviest part of one with the lightest of the other,
    until one is left. Joining never widens a spread, so in the end the heaviest part outweighs the
    lightest by no more than the longest row. Which of several rows of equal length goes where is
    settled last: in ascending order, part by part. So equal rows give contiguous parts.

    Args:
        lengths: Of each row, 0 or more.
        num_parts: K, at least 1.

    Returns:
        Rows of each part, ascending; each row in exactly one part, heavier parts first. With fewer
        rows than parts the last parts are empty, otherwise none is.

    Raises:
        ValueError: A length is negative, or num_parts is below 1.

    Example: lengths (8, 7, 6, 5, 4) in 2 parts give [[1, 3, 4], [0, 2]], sums 16 and 14; the method
    is a heuristic, the best would be 15 and 15.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}: give at least 1")
    for row, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"length of row {row} is {length}: give 0 or more")
    rows_by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows_by_length.setdefault(length, []).append(row)
    parts: list[list[int]] = []
    for part_lengths in _partition(lengths, num_parts):
        taken: list[int] = []
        for length in sorted(set(part_lengths)):
            rows, count = rows_by_length[length], part_lengths.count(length)
            taken += rows[:count]
            rows_by_length[length] = rows[count:]
        parts.append(sorted(taken))
    return parts


def _partition(lengths: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """The lengths in each part, heaviest part first."""
    # A partition in the heap: its spread (negative: the largest is taken first), then its parts,
    # heaviest first, as (-sum, -rows, lengths). Rows are counted so that a part with a row of
    # length 0 is not taken for an empty one. Equal entries are interchangeable, so no tie is left.
    empty = (0, 0, ())
    heap: list[tuple[int, list[tuple[int, int, tuple[int, ...]]]]] = [
        (-length, [(-length, -1, (length,)), *[empty] * (num_parts - 1)]) for length in lengths
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        joined = sorted(
            (a_sum + b_sum, a_rows + b_rows, (*a_lengths, *b_lengths))
            for (a_sum, a_rows, a_lengths), (b_sum, b_rows, b_lengths) in zip(
                left, reversed(right), strict=True
            )
        )
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], joined))
    return [part[2] for part in heap[0][1]] if heap else [()] * num_parts
