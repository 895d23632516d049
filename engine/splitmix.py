"""Bits that look random, as a function of a number and of no state.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
figure 16; their mix13 variant): number i of a stream is mix(start + i * GAMMA) modulo 2^64. Number
0 would be the start's own and is left out.
"""

from __future__ import annotations

import torch

# Constants of 64 bits, as the int64 numbers that have the same bits; products wrap.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_FACTOR_2 = 0x94D049BB133111EB - 2**64


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's mix of int64 numbers of any shape, in place."""
    bits ^= shifted(bits, 30)
    bits *= _FACTOR_1
    bits ^= shifted(bits, 27)
    bits *= _FACTOR_2
    bits ^= shifted(bits, 31)
    return bits


def shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Bits moved to the right, with zeros moved in: torch's int64 shift repeats the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)
