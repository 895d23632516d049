"""Rows of one prompt, wherever they stand in a batch, and statistics over them.

Shape letters: B rows, G groups. A group has one number a row, which is little: everything here
is on the CPU, where sums are taken in the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rolemesh.engine.experience import ColumnKind, Experience

SAMPLE_INDEXES = "sample_indexes"
"""Column that tells the completions of a prompt apart."""


def prompt_ids_of(experience: Experience) -> torch.Tensor:
    """int64 [B] on the CPU, the column prompt_ids; raises ValueError if it is anything else."""
    column = experience["prompt_ids"]
    if column.kind is not ColumnKind.ROW:
        raise ValueError(
            f"column 'prompt_ids' is a {column.kind.value} column: give one number a row"
        )
    if column.values.dtype != torch.int64:
        raise ValueError(f"column 'prompt_ids' has type {column.values.dtype}: give torch.int64")
    return column.values.cpu()


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows with equal prompt_ids, as far as they take part.

    Groups are numbered by their first row. A group has at least one member.

    Example: prompt_ids (9, 4, 9, 7) where the last row takes no part: group 0 has the rows 0 and
    2, group 1 the row 1; index_B is (0, 1, 0, -1).
    """

    index_B: torch.Tensor
    """int64, number of each row's group; -1 for a row that takes no part."""
    sizes_G: torch.Tensor
    """int64, members."""

    @staticmethod
    def of(experience: Experience, takes_part_B: torch.Tensor | None = None) -> Groups:
        """Groups the rows of a batch with the column prompt_ids.

        Args:
            experience: The batch.
            takes_part_B: bool [B]; None: all rows take part.
        """
        ids_B = prompt_ids_of(experience)
        rows = torch.arange(len(ids_B))
        if takes_part_B is not None:
            rows = rows[takes_part_B.cpu()]
        _, sorted_index, sizes = torch.unique(ids_B[rows], return_inverse=True, return_counts=True)
        first_rows = torch.full((len(sizes),), len(ids_B)).scatter_reduce(
            0, sorted_index, rows, "amin"
        )
        by_first_row = first_rows.argsort()
        index_B = torch.full_like(ids_B, -1)
        index_B[rows] = by_first_row.argsort()[sorted_index]
        return Groups(index_B=index_B, sizes_G=sizes[by_first_row])

    def __len__(self) -> int:
        """G."""
        return len(self.sizes_G)

    @property
    def is_member_B(self) -> torch.Tensor:
        """The rows that take part, bool [B]."""
        return self.index_B >= 0

    def to_rows(self, numbers_G: torch.Tensor) -> torch.Tensor:
        """[B], the number of each row's group; 0 for a row that takes no part."""
        if not len(numbers_G):
            return numbers_G.new_zeros(len(self.index_B))
        return numbers_G[self.index_B.clamp_min(0)].masked_fill(~self.is_member_B, 0)

    def any_of(self, flags_B: torch.Tensor) -> torch.Tensor:
        """Which groups have a member with the flag, bool [B]: bool [G]."""
        flags_G = torch.zeros(len(self), dtype=torch.bool)
        flags_G[self.index_B[flags_B & self.is_member_B]] = True
        return flags_G

    def means(self, numbers_B: torch.Tensor) -> torch.Tensor:
        """float64 [G]; exactly the number itself where all of a group are equal."""
        sums_G = self._sums(numbers_B.double())
        # Rounding may leave the mean of equal numbers a little beside them; then a group whose
        # rewards are all equal would have a deviation, and something to learn from.
        return (sums_G / self.sizes_G).clamp(*self.extremes(numbers_B))

    def stds(self, numbers_B: torch.Tensor) -> torch.Tensor:
        """float64 [G], standard deviation with n - 1 in the denominator; 0 in a group of one."""
        deviations_B = numbers_B.double() - self.to_rows(self.means(numbers_B))
        return (self._sums(deviations_B.square()) / (self.sizes_G - 1).clamp_min(1)).sqrt()

    def extremes(self, numbers_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [G] each: smallest and largest number of each group."""
        members, index = numbers_B.double()[self.is_member_B], self.index_B[self.is_member_B]
        smallest_G = torch.full((len(self),), torch.inf, dtype=torch.float64)
        return (
            smallest_G.scatter_reduce(0, index, members, "amin"),
            (-smallest_G).scatter_reduce(0, index, members, "amax"),
        )

    def _sums(self, numbers_B: torch.Tensor) -> torch.Tensor:
        zeros_G = torch.zeros(len(self), dtype=numbers_B.dtype)
        return zeros_G.index_add(0, self.index_B[self.is_member_B], numbers_B[self.is_member_B])


def trajectories_of(
    experience: Experience, rows: Groups, scores_B: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which rows are the first of a trajectory, and what each trajectory scores.

    Rows of one prompt with equal sample_indexes are one trajectory: its branches.

    Args:
        experience: The batch; without the column sample_indexes each row is a trajectory.
        rows: Those that take part.
        scores_B: [B], of each row.

    Returns:
        bool [B], the first row that takes part of each trajectory, or None where each has one row;
        and [B], the mean score of the trajectory that the row belongs to.
    """
    if SAMPLE_INDEXES not in experience:
        return None, scores_B
    indexes_B = experience[SAMPLE_INDEXES].values.cpu()
    members = rows.is_member_B.nonzero().squeeze(1)
    keys = torch.stack((prompt_ids_of(experience)[members], indexes_B[members]))
    _, trajectory, sizes_T = torch.unique(keys, dim=1, return_inverse=True, return_counts=True)
    if bool((sizes_T == 1).all()):
        return None, scores_B
    sums_T = torch.zeros(len(sizes_T), dtype=scores_B.dtype)
    sums_T = sums_T.index_add(0, trajectory, scores_B[members])
    means_B = scores_B.clone()
    means_B[members] = (sums_T / sizes_T)[trajectory]
    first_T = torch.full((len(sizes_T),), len(indexes_B)).scatter_reduce(
        0, trajectory, members, "amin"
    )
    leads_B = torch.zeros(len(indexes_B), dtype=torch.bool)
    leads_B[first_T] = True
    return leads_B, means_B


@dataclass(frozen=True, slots=True)
class ComparedScores:
    """Scores of rows beside those of their groups; float64, on the CPU.

    The members of a group are trajectories. Where one has several rows, as an agent's session has
    that went several ways, it counts once, with the mean of its rows' scores; each of its rows is
    then compared with the group by its own score.
    """

    rows: Groups
    """Of rows."""
    groups: Groups
    """Of trajectories; each stands at its first row."""
    scores_B: torch.Tensor
    """Of each row."""
    trajectory_scores_B: torch.Tensor
    """Of the trajectory that the row belongs to."""

    @staticmethod
    def of(
        experience: Experience, takes_part_B: torch.Tensor, scores_B: torch.Tensor
    ) -> ComparedScores:
        """Groups the rows of a batch that take part.

        Args:
            experience: With the column prompt_ids; sample_indexes is read where it is there.
            takes_part_B: bool [B].
            scores_B: float64 [B]; what a row has that takes no part is not read.
        """
        rows, scores_B = Groups.of(experience, takes_part_B), scores_B.cpu()
        leads_B, trajectory_scores_B = trajectories_of(experience, rows, scores_B)
        groups = rows if leads_B is None else Groups.of(experience, leads_B)
        return ComparedScores(rows, groups, scores_B, trajectory_scores_B)

    @property
    def centred_B(self) -> torch.Tensor:
        """[B], score less the mean of the group; 0 for a row that takes no part."""
        means_B = self.rows.to_rows(self.groups.means(self.trajectory_scores_B))
        return (self.scores_B - means_B).masked_fill(~self.rows.is_member_B, 0)

    @property
    def stds_G(self) -> torch.Tensor:
        """[G], deviation of each group's trajectories, n - 1 in the denominator; 0 of one."""
        return self.groups.stds(self.trajectory_scores_B)

    @property
    def differs_B(self) -> torch.Tensor:
        """Whether the row's group has scores that are not all equal, bool [B]."""
        smallest_G, largest_G = self.rows.extremes(self.scores_B)
        return self.rows.to_rows(smallest_G < largest_G)
