"""pass@k from several completions of a prompt (arXiv 2107.03374, eq. 1).

Shape letters: B rows, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rolemesh.engine.statistics import pass_chance


def pass_at(
    passes_B: torch.Tensor, prompt_ids_B: torch.Tensor, ks: Sequence[int]
) -> dict[str, float]:
    """The chance that at least one of k completions passes, averaged over prompts.

    See `rolemesh.engine.statistics.pass_chance` for the formula.

    Args:
        passes_B: bool [B], whether each row passes.
        prompt_ids_B: int64 [B]; rows with equal ids belong to one prompt.
        ks: Values of k, each at least 1.

    Returns:
        "pass@<k>" for each k.

    Raises:
        ValueError: A k is below 1, or a prompt has fewer rows than k.

    Example: 4 completions of one prompt of which 1 passes give pass@1 0.25 and pass@2 0.5.
    """
    prompt_ids, inverse_B, sizes_G = torch.unique(
        prompt_ids_B, return_inverse=True, return_counts=True
    )
    # The counts are integers, so the order of the sum does not matter.
    passed_G = torch.bincount(inverse_B[passes_B], minlength=len(prompt_ids))
    found = {}
    for k in ks:
        if k < 1:
            raise ValueError(f"pass_at has {k}: give numbers of at least 1")
        small = (sizes_G < k).nonzero().flatten()
        if len(small):
            group = int(small[0])
            raise ValueError(
                f"pass_at has {k}, but prompt {int(prompt_ids[group])} has {int(sizes_G[group])} "
                f"rows ({len(small)} such prompts): draw at least {k} samples a prompt"
            )
        chances = [
            pass_chance(size, passed, k)
            for size, passed in zip(sizes_G.tolist(), passed_G.tolist(), strict=True)
        ]
        found[f"pass@{k}"] = math.fsum(chances) / len(chances)
    return found
