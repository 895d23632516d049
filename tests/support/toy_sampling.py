"""A toy in the place of a model: log-probs by the token before, tokens by seed and position."""

from __future__ import annotations

import hashlib

STOP = 2


def toy_logprob(before: int, token: int, scale: float) -> float:
    return -0.5 - 0.01 * ((7 * before + 13 * token) % 50) - scale


def toy_token(seed: int, position: int, before: int, vocab_size: int) -> int:
    digest = hashlib.sha256(f"{seed}:{position}:{before}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    return STOP if number % 23 == 0 else 3 + number % (vocab_size - 3)


def toy_tokens(seed: int, before: int, count: int, vocab_size: int) -> list[int]:
    """So many tokens after one, also where one of them stops."""
    tokens: list[int] = []
    for position in range(count):
        before = toy_token(seed, position, before, vocab_size)
        tokens.append(before)
    return tokens
