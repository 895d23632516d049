"""Work of a step: rows, their lengths, and how updates cut them."""

from __future__ import annotations

import math
from dataclasses import dataclass

_QUANTILES = 32
"""Lengths that stand for a distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of completions, as quantiles that are equally likely.

    Example: `Lengths.spread(100, 400)` has the mean 100 and nothing above 400.
    """

    quantiles: tuple[float, ...]
    """Ascending, above 0."""

    @classmethod
    def fixed(cls, tokens: float) -> Lengths:
        """All have the same."""
        if tokens <= 0:
            raise ValueError(f"completions have {tokens} tokens: give a number above 0")
        return cls((float(tokens),))

    @classmethod
    def spread(cls, mean: float, longest: float) -> Lengths:
        """An exponential distribution that is cut at the longest, with the mean that is given.

        Raises:
            ValueError: No such distribution has this mean: it is at most the longest.
        """
        if not 0 < mean <= longest:
            raise ValueError(
                f"completions have {mean:g} tokens in the mean and {longest:g} at most: give a "
                "mean above 0 that is not more than the most"
            )
        low, high = mean / 64, longest * 1e6
        for _ in range(80):
            # min(exponential of scale s, longest) has the mean s (1 - exp(-longest / s)).
            scale = math.sqrt(low * high)
            if _cut_mean(scale, longest) < mean:
                low = scale
            else:
                high = scale
        lengths = tuple(
            min(longest, -high * math.log1p(-(index + 0.5) / _QUANTILES))
            for index in range(_QUANTILES)
        )
        # Few quantiles have a slightly other mean.
        factor = mean * _QUANTILES / sum(lengths)
        return cls(tuple(min(longest, one * factor) for one in lengths))

    @property
    def mean(self) -> float:
        """Tokens in the mean."""
        return sum(self.quantiles) / len(self.quantiles)

    @property
    def longest(self) -> float:
        """Most tokens."""
        return self.quantiles[-1]

    def drawn(self, rows: int) -> list[float]:
        """So many lengths, spread evenly over the distribution, in an order without a trend.

        The longest one is always among them.
        """
        number = len(self.quantiles)
        places = sorted(range(rows), key=lambda row: (row * 0.6180339887498949) % 1.0)
        drawn = [0.0] * rows
        for index, place in enumerate(places):
            drawn[place] = self.quantiles[(2 * index + 1) * number // (2 * rows)]
        drawn[places[-1]] = self.longest
        return drawn


def _cut_mean(scale: float, longest: float) -> float:
    return -scale * math.expm1(-longest / scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step makes of its prompts."""

    prompts: int
    """Prompts of a step."""
    samples: int = 1
    """Completions of a prompt."""
    prompt_tokens: float
    """Tokens of a prompt, in the mean."""
    completions: Lengths
    """Tokens of completions."""
    mini_batch_rows: int
    """Rows of an optimizer step."""
    epochs: int = 1
    """Passes over the rows."""
    shares_prompts: bool = True
    """Whether the completions of a prompt are computed behind one copy of it."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "mini_batch_rows", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}: give 0 or more")

    @property
    def rows(self) -> int:
        """Trajectories."""
        return self.prompts * self.samples

    @property
    def row_tokens(self) -> float:
        """Tokens of a row, in the mean."""
        return self.prompt_tokens + self.completions.mean

    @property
    def longest_row(self) -> float:
        """Most tokens of a row."""
        return self.prompt_tokens + self.completions.longest

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of an update."""
        return self.epochs * -(-self.rows // self.mini_batch_rows)

    @property
    def context(self) -> float:
        """Positions that a token attends to, in the mean: half of its row (causal)."""
        return self.row_tokens / 2

    def computed_tokens(self, rows: float) -> float:
        """Tokens that a pass over neighbouring rows computes: a shared prompt counts once."""
        if not self.shares_prompts or self.samples == 1:
            return rows * self.row_tokens
        return rows * self.completions.mean + math.ceil(rows / self.samples) * self.prompt_tokens
