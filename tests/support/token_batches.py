"""Random token batches for models: ragged prompts and completions, masks with holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience

if TYPE_CHECKING:
    from rolemesh.engine.models.causal_lm import CausalLm
    from rolemesh.engine.packing.packed_rows import PackedRows

PROMPT_LENGTHS = (3, 5, 1, 7, 2, 4, 9, 6)
COMPLETION_LENGTHS = (4, 6, 1, 9, 2, 12, 3, 5)
FIRST_PLAIN_TOKEN = 4
"""Ids below are the special tokens of the tiny tokenizer."""


def score(
    model: CausalLm, rows: PackedRows, *, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropy of completion tokens, by a model of one stage."""
    hidden_1SD = model.stage_forward(rows, None)
    scores = model.finish(hidden_1SD, rows, temperature=temperature, with_entropy=with_entropy)
    return scores.logprobs_N, scores.entropy_N


def token_batch(
    *,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    completion_lengths: Sequence[int] = COMPLETION_LENGTHS,
    seed: int = 0,
    vocab_size: int = 512,
) -> Experience:
    """Tokens with what every loss reads; a fifth of the completion tokens is masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(FIRST_PLAIN_TOKEN, vocab_size, (prompt + completion,), generator=generator)
        for prompt, completion in zip(prompt_lengths, completion_lengths, strict=True)
    ]
    lengths = torch.tensor(completion_lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(lengths.sum())

    def completion(values_N: torch.Tensor) -> Column:
        return Column(ColumnKind.COMPLETION, values_N, offsets)

    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor(prompt_lengths)),
            "loss_mask": completion(torch.rand(num_tokens, generator=generator) < 0.8),
            "advantages": completion(torch.randn(num_tokens, generator=generator)),
            "returns": completion(torch.randn(num_tokens, generator=generator)),
            "values": completion(0.1 * torch.randn(num_tokens, generator=generator)),
        }
    )


def with_shared_prompts(batch: Experience, group: int) -> Experience:
    """The same rows, but `group` neighbours begin with the prompt of the first of them.

    Args:
        batch: of `token_batch`, in which neighbours have prompts of one length.
        group: rows of one prompt; the last ones may be fewer.
    """
    rows = list(batch["tokens"].rows())
    lengths = batch["prompt_lengths"].values.tolist()
    found = []
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        first = number // group * group
        assert lengths[first] == length
        found.append(torch.cat([rows[first][:length], row[length:]]))
    return batch | Experience({"tokens": Column.ragged(ColumnKind.SEQUENCE, found, torch.int64)})
