"""The likeliest tokens at each place and their log-probs, straight from hidden states, in chunks.

What a teacher tells of its distribution: a few numbers a token. The largest temporary is [C, V].

Shape letters: N tokens, C tokens of a chunk, D width, V vocabulary rows of this rank, K likeliest.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from rolemesh.engine.models.vocabulary.logprobs import default_chunk_tokens
from rolemesh.engine.models.vocabulary.matrix import Projection, VocabularySlice, scores_of_sums
from rolemesh.engine.parallel.mesh import RankGroup


@torch.no_grad()
def top_logprobs(
    hidden_ND: torch.Tensor,
    vocabulary_VD: torch.Tensor,
    targets_N: torch.Tensor,
    top_k: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
    group: RankGroup,
    first_row: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K likeliest tokens under softmax(hidden @ vocabulary.T / temperature), without gradients.

    Args as `token_logprobs`; top_k is at most the size of the whole vocabulary.

    Returns:
        Log-probs of the targets, float [N]; ids of the likeliest tokens, int64 [N, K], the
        likeliest first; their log-probs, float [N, K]. Equal on all ranks of the group.

    Example: logits [0, log 3] and K = 1 give the id 1 and the log-prob log 3/4.
    """
    project = Projection(vocabulary_VD, compute_dtype, temperature)
    rows = VocabularySlice(group, first_row, len(vocabulary_VD))
    num_tokens, num_own = len(hidden_ND), min(top_k, len(vocabulary_VD))
    sums_3N = hidden_ND.new_empty(3, num_tokens, dtype=project.accumulate_dtype)
    largest_N = torch.empty_like(sums_3N[0])
    # What a slice of fewer rows lacks is no token's log-prob, and never among the likeliest.
    logits_NK = sums_3N.new_full((num_tokens, top_k), -math.inf)
    ids_NK = torch.zeros_like(logits_NK, dtype=torch.int64)
    step = chunk_tokens or default_chunk_tokens(vocabulary_VD)
    with project.without_autocast():
        for at in range(0, num_tokens, step):
            chunk = slice(at, at + step)
            logits_CV = project(hidden_ND[chunk])
            if num_own:
                logits_NK[chunk, :num_own], index_CK = logits_CV.topk(num_own, 1)
                ids_NK[chunk, :num_own] = index_CK + first_row
            sums_3N[:, chunk], largest_N[chunk] = rows.sums(logits_CV, targets_N[chunk, None])
    if group.size > 1 and num_tokens:
        logits_NK, place_NK = _of_all(logits_NK, group).topk(top_k, 1)
        ids_NK = _of_all(ids_NK, group).gather(1, place_NK)
    logprobs_N1, lse_N, _ = scores_of_sums(sums_3N, largest_N, group)
    return logprobs_N1[:, 0], ids_NK, logits_NK - lse_N[:, None]


def _of_all(own_NK: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """What all slices found, one behind the other: [N, K * slices]."""
    parts = [torch.empty_like(own_NK) for _ in range(group.size)]
    dist.all_gather(parts, own_NK.contiguous(), group=group.process_group)
    return torch.cat(parts, 1)
