"""Noise of draws on a device: its definition, its distribution, and what it may depend on."""

from __future__ import annotations

import math

import pytest
import torch

from rolemesh.engine.rollout import noise
from rolemesh.engine.rollout.noise import exponential_noise, stream_starts

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & WORD
    return number ^ number >> 31


def splitmix64(start: int, index: int) -> int:
    """Number `index` (from 1) of a stream, by Python's integers."""
    return mixed(start + index * GAMMA & WORD)


def noise_of(seeds: list[int], vocab_size: int, position: int = 0) -> torch.Tensor:
    return exponential_noise(stream_starts(seeds, [position] * len(seeds)), vocab_size)


def test_numbers_are_those_of_splitmix64() -> None:
    # Published for the seed 1234567, e.g. at rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
    assert [splitmix64(1234567, index) for index in (1, 2, 3)] == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
    ]
    for seed, position in ((0, 0), (2**63 - 1, 5), (1234567, 40_000)):
        start = splitmix64(splitmix64(seed, 1), position + 1)
        starts = stream_starts([seed], [position])
        assert starts.item() & WORD == start
        uniform = [(splitmix64(start, index) >> 1) / 2**63 for index in range(1, 200)]
        found = -torch.expm1(-exponential_noise(starts, 199)[0].double())
        torch.testing.assert_close(
            found, torch.tensor(uniform, dtype=torch.float64), rtol=3e-7, atol=0
        )


def test_a_row_draws_the_same_whatever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    together = noise_of([7, 8, 9, 10], 1000)
    assert torch.equal(together[2:3], noise_of([9], 1000))
    assert torch.equal(together[[3, 1]], noise_of([10, 8], 1000))
    # Also where rows are made in blocks, of one row each and of three and one.
    for numbers in (1, 3000):
        monkeypatch.setattr(noise, "BLOCK_NUMBERS", numbers)
        assert torch.equal(together, noise_of([7, 8, 9, 10], 1000))


def test_noise_is_exponential() -> None:
    """Chi-square over 64 cells of equal probability, for rows, positions and tokens.

    With 63 degrees of freedom a right generator exceeds 130 with odds of 1.3e-6.
    """
    many_tokens = noise_of([3], 100_000)[0]
    many_rows = noise_of(list(range(100_000)), 1)[:, 0]
    positions = exponential_noise(stream_starts([5] * 100_000, list(range(100_000))), 1)[:, 0]
    for numbers in (many_tokens, many_rows, positions):
        cells = (-torch.expm1(-numbers.double()) * 64).long()
        counts = torch.bincount(cells, minlength=64)
        expected = len(numbers) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 130
        assert abs(float(numbers.double().mean()) - 1) < 5 / math.sqrt(len(numbers))


def test_neighbours_are_independent() -> None:
    """Pairs of neighbours, in all three directions, over 8 x 8 cells of equal probability.

    63 degrees of freedom, see above; correlations have a standard error of 1/sqrt(number).
    """
    seeds = list(range(300))
    here = noise_of(seeds, 700)
    pairs = {
        "tokens": (here[:, :-1], here[:, 1:]),
        "rows": (here[:-1], here[1:]),
        "positions": (here, noise_of(seeds, 700, position=1)),
        "seed against position": (noise_of(seeds[:-1], 700, position=1), here[1:]),
    }
    for name, (left, right) in pairs.items():
        u, v = (-torch.expm1(-side.double().flatten()) for side in (left, right))
        cells = (u * 8).long() * 8 + (v * 8).long()
        counts = torch.bincount(cells, minlength=64)
        expected = len(u) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 130, name
        correlation = float(torch.corrcoef(torch.stack([u, v]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(len(u)), name


def test_draws_are_those_of_multinomial() -> None:
    """200,000 draws over 9 tokens against their probabilities, and torch.multinomial likewise.

    Chi-square with 8 degrees of freedom: above 45 with odds of 4e-7.
    """
    number = 200_000
    probabilities = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005, 1e-4])
    probabilities /= probabilities.sum()
    ours = (probabilities / noise_of(list(range(number)), 9)).argmax(-1)
    generator = torch.Generator().manual_seed(0)
    theirs = torch.multinomial(probabilities, number, replacement=True, generator=generator)
    for drawn in (ours, theirs):
        counts = torch.bincount(drawn, minlength=9)
        expected = number * probabilities
        assert float(((counts - expected) ** 2 / expected).sum()) < 45


def test_a_likely_token_among_very_many_unlikely_ones() -> None:
    """Half of the mass in 150,000 tokens, whose noise must be small to win: its digits count.

    500 draws: a standard error of 0.0224.
    """
    probabilities = torch.full((150_000,), 0.5 / 149_999)
    probabilities[77] = 0.5
    drawn = torch.cat(
        [
            (probabilities / noise_of(list(range(first, first + 20)), 150_000)).argmax(-1)
            for first in range(0, 500, 20)
        ]
    )
    assert abs(float((drawn == 77).double().mean()) - 0.5) < 5 * 0.0224
    # Some 250 of the others, of which two are alike with odds of 1 in 5.
    others = drawn[drawn != 77]
    assert len(others.unique()) > len(others) - 5


def test_no_noise_is_zero_or_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bits of 0 and of the largest number, which no search for a seed would find.
    monkeypatch.setattr(noise, "mixed", lambda bits: torch.tensor([[0, -1, 1 << 62]]))
    found = exponential_noise(torch.zeros(1, dtype=torch.int64), 3)
    assert found.tolist()[0] == pytest.approx([2.0**-63, 24 * math.log(2), -math.log1p(-0.25)])
