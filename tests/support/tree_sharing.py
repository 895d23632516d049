"""Rows that share prompts, models that compute them packed as a tree, and how near they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import score

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows
from rolemesh.engine.packing.pass_cost import PassCost
from rolemesh.engine.specs import ModelSpec

DOUBLE_TOLERANCE = 1e-6
"""Relative, of the norm. Weights and products are float64, but transformers computes norms and
rotations in float32 whatever the model is, whose rounding (6e-8) remains."""
GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient: float32 sums in another order, as between ranks
(test_parallel_training)."""
OUTPUT_TOLERANCE = 2e-5
"""float32 through two layers, as test_models_scoring."""
BFLOAT16_TOLERANCE = 2e-2
"""Relative, of the norm: backward products of bfloat16 numbers (2**-9 each) over other blocks."""

WHATEVER = PassCost(pairs_per_token=float("inf"), pairs_per_call=100.0, margin=float("inf"))
"""Shares all that rows have in common, in blocks of similar branches."""

VOCAB = 280
PROMPTS = (
    *([5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]),
    # Begins as prompt 2 does; then a second turn, after what the first prompt may be answered with.
    *([10, 11, 12, 40, 41], [5, 6, 7, 8, 4, 5, 30]),
)
ROWS = (
    *((0, 5), (1, 3), (0, 0), (2, 7), (0, 4), (1, 1), (0, 4), (2, 1), (2, 0)),
    *((3, 6), (4, 2), (3, 0), (4, 5), (0, 1), (2, 7)),
)
"""(prompt, completion tokens): ragged, a prompt of one token, completions of none and one."""

FAMILIES = ["smollm2", "qwen2", "qwen3"]
"""Heads of another width than the others', biases, and norms of queries and keys."""


def shared_batch(rows: Any = ROWS, seed: int = 0) -> Experience:
    """Rows with what the losses read."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for _, length in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = [
        # Few tokens: completions of one prompt begin alike, and some are equal.
        [*PROMPTS[number], *torch.randint(4, 7, (length,), generator=generator).tolist()]
        for number, length in rows
    ]

    def completion(scale: float, shift: float = 0.0) -> Column:
        values_N = shift + scale * torch.randn(int(offsets[-1]), generator=generator)
        return Column(ColumnKind.COMPLETION, values_N, offsets)

    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int64),
            "prompt_lengths": Column(
                ColumnKind.ROW, torch.tensor([len(PROMPTS[number]) for number, _ in rows])
            ),
            "loss_mask": Column(
                ColumnKind.COMPLETION,
                torch.rand(int(offsets[-1]), generator=generator) < 0.8,
                offsets,
            ),
            "advantages": completion(1.0),
            "logprobs": completion(0.3, -5.0),
            "returns": completion(1.0),
            "values": completion(0.1),
        }
    )


def sharing_model(folder: Path, kind: str, **options: Any) -> CausalLm | ScoringModel:
    """A policy, or a critic whose head is no longer zero."""
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **options})
    if kind == "policy":
        return CausalLm(spec)
    model = ScoringModel(spec, VALUE_HEAD)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def model_folder(directory: Path, family: str) -> Path:
    """A tiny model of the family."""
    if family == "smollm2":
        return write_tiny_llama(directory, seed=4, vocab_size=VOCAB)
    return write_tiny_decoder(directory, family, vocab_size=VOCAB, tie_word_embeddings=True)


def outputs_of(model: CausalLm | ScoringModel, rows: PackedRows) -> list[torch.Tensor]:
    """Values, or log-probs and entropy, of completion tokens."""
    if isinstance(model, ScoringModel):
        return [model(rows)]
    logprobs_N, entropy_N = score(model, rows, temperature=0.8, with_entropy=True)
    assert entropy_N is not None
    return [logprobs_N, entropy_N]


def gradients_of(model: Any, outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum with random weights, so that no two tokens' gradients cancel by chance."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    model.zero_grad()
    sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_weights()}


def states_and_gradients(
    model: CausalLm | ScoringModel, rows: PackedRows
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """States before completion tokens, float64, and gradients of a sum with random weights."""
    states_ND = rows.of_rows(rows.states(model.stage_forward(rows, None)))
    assert states_ND.dtype == torch.float64
    weights = torch.randn(
        states_ND.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    model.zero_grad()
    (states_ND * weights).sum().backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_weights()
        if weight.grad is not None
    }
    return states_ND.detach(), gradients


def scored_alone(model: Any, batch: Experience) -> torch.Tensor:
    """Log-probs of each row by transformers' own pass over it."""
    rows = zip(batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True)
    logprobs = [
        (model.lm(tokens[None]).logits[0, prompt - 1 : -1] / 0.8)
        .log_softmax(-1)
        .gather(1, tokens[prompt:, None])
        .squeeze(1)
        for tokens, prompt in rows
    ]
    return torch.cat(logprobs)


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Each gradient is near its own, and none is zero."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.norm()) > 0, name
        assert float((found[name] - gradient).norm() / gradient.norm()) < tolerance, name
