"""Seeds that depend on what is drawn and on nothing else, so that a replay draws the same."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str, lineage: int = 0) -> int:
    """Mixes the parts into a seed.

    Args:
        parts: What is drawn, e.g. (run seed, step, prompt id, sample index). Order counts.
        lineage: How often the run had gone back to draw it anew; 0 for the first draw.

    Returns:
        A number n with 0 <= n < 2**63. Equal parts give equal seeds on every machine.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    if lineage:
        text += f"/lineage:{lineage}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
