"""Exponential noise for draws on a device: a function of seed, position and token, and of no state.

A token is drawn as the largest of p / noise, as torch.multinomial does it. torch's own generators
take a launch for each row of a GPU, and give other numbers on other GPUs; here all rows are a few
operations, and a row's numbers are the same whatever runs beside it.

The numbers are those of SplitMix64 (`engine/splitmix.py`).

Shape letters: B rows, V vocabulary, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rolemesh.engine.splitmix import GAMMA, mixed, shifted

BLOCK_NUMBERS = 1 << 24
"""Numbers that are made at a time: they are int64 on the way, so two tensors of 128 MiB."""

_LEAST = 2.0**-63
"""Smallest uniform number: no noise is 0, by which a probability would be divided."""
_MOST = 1 - 2.0**-24
"""Largest uniform number, the float32 before 1: no noise is infinite."""


def stream_starts(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """The start of a stream for each (seed, position), int64 [B] on the CPU.

    Args:
        seeds: B numbers, 0 <= seed < 2**63.
        positions: B numbers of tokens that each row has already.
    """
    starts_B = mixed(torch.tensor(seeds, dtype=torch.int64) + GAMMA)
    return mixed(starts_B + (torch.tensor(positions, dtype=torch.int64) + 1) * GAMMA)


def exponential_noise(starts_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Independent numbers of the exponential distribution with mean 1.

    Args:
        starts_B: int64 [B], of `stream_starts`, on the device that draws.
        vocab_size: V.

    Returns:
        float32 [B, V], each finite and at least 2^-63. Small ones, which decide a draw, have all
        of float32's digits.
    """
    noise_BV = torch.empty(len(starts_B), vocab_size, dtype=torch.float32, device=starts_B.device)
    steps_V = torch.arange(1, vocab_size + 1, device=starts_B.device) * GAMMA
    rows = max(1, BLOCK_NUMBERS // vocab_size)
    blocks = zip(torch.split(starts_B, rows), torch.split(noise_BV, rows), strict=True)
    for starts_R, noise_RV in blocks:
        bits_RV = mixed(starts_R[:, None] + steps_V)
        # The 63 high bits, as a number that is not negative.
        noise_RV.copy_(shifted(bits_RV, 1))
        noise_RV.mul_(_LEAST).clamp_(_LEAST, _MOST).neg_().log1p_().neg_()
    return noise_BV
