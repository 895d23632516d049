"""What scores over prompts say: means with standard errors, pass@k, and differences of two.

Prompts are drawn from all that could be asked, and samples of one prompt hang together. So each
prompt counts once, with the mean of its samples, and errors are over prompts (arXiv 2411.00640).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

Z_95 = 1.959964
"""Half the width of a 95 % interval of the normal distribution, in standard errors."""

_EXACT_SIGNS = 14
"""Up to so many prompts that differ, all 2**n signs are tried; of more, signs are drawn."""

_NUM_DRAWS = 10_000
_SEED = 20260
_TIE = 1e-12
"""Sums in another order may differ by so much, relative to the sum of sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    standard_error: float | None
    """Sample deviation over prompts / sqrt(num_prompts); None with one prompt."""
    num_prompts: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def told(self) -> str:
        """For people, e.g. "0.312 ± 0.041"."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:.3f}{error}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt, at least one, with its standard error.

    Example: (0, 0, 1, 1) has mean 0.5 and standard error sqrt(1/3) / 2 = 0.289.
    """
    number = len(values)
    mean = math.fsum(values) / number
    error = None
    if number > 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
        error = math.sqrt(variance / number)
    return Estimate(mean=mean, standard_error=error, num_prompts=number)


def pass_chance(size: int, passed: int, k: int) -> float:
    """The chance that at least one of k completions passes (arXiv 2107.03374, eq. 1).

    Of `size` completions of a prompt `passed` pass. Then k of them, drawn without replacement, all
    fail with probability

        C(size - passed, k) / C(size, k) = product over j < k of (size - passed - j) / (size - j)

    which is the unbiased estimate of the chance that k fresh ones all fail.

    Example: of 4 completions of which 1 passes: 0.25 with k = 1, 0.5 with k = 2.
    """
    return 1.0 - math.prod(max(size - passed - j, 0) / (size - j) for j in range(k))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """By how much one policy scores above another over the same prompts."""

    mean: float
    """Of the differences prompt by prompt, the second minus the first."""
    standard_error: float | None
    """Of that mean: sample deviation of the differences / sqrt(num_prompts). None with one."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval: mean -/+ 1.96 standard errors."""
    p_value: float
    """Of the two-sided sign-flip test: how often a mean at least as far from 0 comes about when
    each difference is given a sign by chance, as if the policies could be exchanged."""
    num_prompts: int
    """That both have scored."""
    num_others: int
    """That only one has, which do not count."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def told(self) -> str:
        """For people, e.g. "+0.125 [+0.031, +0.219], p 0.013"."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p {self.p_value:.3g}"


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> Difference | None:
    """Compares two policies over the prompts that both have scored; None where there is none.

    The error of a difference is that of its values prompt by prompt (arXiv 2411.00640, "paired
    differences"): what makes a prompt hard for both cancels. The test is Fisher's randomisation
    test of paired values, exact for few prompts and else by draws with a fixed seed.

    Args:
        one: A score by prompt, of the policy that is compared with.
        other: The same of the policy that is compared.

    Example: scores (0, 0, 0, 0) and (1, 1, 1, 1) differ by 1, and of 16 ways to give signs 2 are as
    far from 0: p is 0.125.
    """
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    values = [other[key] - one[key] for key in shared]
    found = estimate(values)
    error = found.standard_error
    return Difference(
        mean=found.mean,
        standard_error=error,
        low=None if error is None else found.mean - Z_95 * error,
        high=None if error is None else found.mean + Z_95 * error,
        p_value=_p_value([value for value in values if value != 0]),
        num_prompts=len(shared),
        num_others=len(one.keys() ^ other.keys()),
    )


def _p_value(values: Sequence[float]) -> float:
    """Two-sided, of the sum of values whose signs are given by chance."""
    if not values:
        return 1.0
    sizes = numpy.abs(numpy.array(values))
    least = abs(math.fsum(values)) - _TIE * float(sizes.sum())
    if len(values) <= _EXACT_SIGNS:
        signs = numpy.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
        return float((numpy.abs(signs @ sizes) >= least).mean())
    draws = numpy.random.default_rng(_SEED)
    reached = sum(
        int((numpy.abs(draws.choice((-1.0, 1.0), size=(100, len(values))) @ sizes) >= least).sum())
        for _ in range(_NUM_DRAWS // 100)
    )
    # What was found is one of the draws: an estimate of 0 would claim too much.
    return (1 + reached) / (1 + _NUM_DRAWS)
