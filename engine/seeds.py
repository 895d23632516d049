"""Seeds that depend on what is drawn and on nothing else, so that a replay draws the same."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Mixes the parts into a seed.

    Args:
        parts: What is drawn, e.g. (run seed, step, prompt id, sample index). Order counts.

    Returns:
        A number n with 0 <= n < 2**63. Equal parts give equal seeds on every machine.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
