"""Tensor slices of decoders against the whole model on one rank, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch

from rolemesh.engine.batching import PaddedRows, pad_rows
from rolemesh.engine.layout import HybridLayout, TrainLayout
from rolemesh.engine.mesh import RankMesh
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.classifier import SequenceClassifier, pad_token_rows
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.families import slice_box
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.models.tensor_parallel import sum_partial_gradients
from rolemesh.engine.models.value_model import ValueModel
from rolemesh.engine.specs import ModelSpec

TOLERANCE = 2e-5
"""float32 through two layers, with sums in another order because they are cut."""
GRADIENT_TOLERANCE = 2e-5
"""Of a gradient's largest entry: the same sums, backwards."""

TOKEN_ROWS = [[5, 6, 7, 8, 99], [9], [10, 11, 0], [63, 64, 65, 66, 67, 98]]


@dataclass(frozen=True)
class Pass:
    """What one rank made of a batch."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _spec(path: Path, **options: object) -> ModelSpec:
    return ModelSpec.model_validate({"path": path, "compute_dtype": "float32", **options})


def _rows(spec: ModelSpec) -> PaddedRows:
    return pad_rows(token_batch(vocab_size=read_config(spec).vocab_size), "cpu")


def run_pass(spec: ModelSpec, head: str, mesh: RankMesh | None, double: bool = False) -> Pass:
    """Loads a model, scores a batch, and sends a gradient back that differs for each token."""
    model: Decoder
    outputs: dict[str, torch.Tensor]
    if head == "lm_head":
        lm = CausalLm(spec, mesh=mesh)
        model = lm.double() if double else lm
        logprobs, entropy = lm.score(_rows(spec), temperature=0.8, with_entropy=True)
        assert entropy is not None
        outputs = {"logprobs": logprobs, "entropy": entropy}
    elif head == "values":
        critic = ValueModel(spec, mesh=mesh)
        model = critic.double() if double else critic
        outputs = {"values": critic(_rows(spec))}
    else:
        config = read_config(spec)
        classifier = SequenceClassifier(spec, config=config, mesh=mesh)
        classifier.lm.requires_grad_(True)
        model = classifier
        outputs = {"logits": classifier(pad_token_rows(TOKEN_ROWS)).flatten()}
    generator = torch.Generator().manual_seed(11)
    loss = sum(
        torch.randn(len(output), generator=generator).to(output) @ output
        for output in outputs.values()
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    if mesh is not None:
        sum_partial_gradients(model.named_weights(), model.partial_gradients(), mesh.tp)
    named = dict(model.named_weights())
    assert all(weight.grad is not None for weight in named.values())
    return Pass(
        {name: output.detach().clone() for name, output in outputs.items()},
        {name: weight.grad.clone() for name, weight in named.items() if weight.grad is not None},
        {name: weight.detach().clone() for name, weight in named.items()},
    )


def pass_of_rank(
    at: RankContext, spec: ModelSpec, head: str, layout: TrainLayout, double: bool = False
) -> Pass:
    """`run_pass` on a rank of a mesh."""
    with at.connect(HybridLayout(layout)) as mesh:
        return run_pass(spec, head, mesh, double)


def check_against_one_rank(
    whole: Pass,
    parts: list[Pass],
    spec: ModelSpec,
    head: str,
    tolerance: float = TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """Outputs equal on all ranks; each weight and gradient is the whole's box."""
    shape = (CausalLm(spec) if head == "lm_head" else _model(spec, head)).shape
    assert shape is not None
    for rank, part in enumerate(parts):
        for name, output in whole.outputs.items():
            torch.testing.assert_close(part.outputs[name], output, rtol=0, atol=tolerance)
        assert part.weights.keys() == whole.weights.keys()
        for name, weight in whole.weights.items():
            box = slice_box(shape, name, tp=rank, size=len(parts))
            cut = tuple(slice(start, stop) for start, stop in box)
            assert torch.equal(part.weights[name], weight[cut]), name
            wanted = whole.gradients[name]
            assert float(wanted.abs().max()) > 0, name
            torch.testing.assert_close(
                part.gradients[name],
                wanted[cut],
                rtol=0,
                atol=gradient_tolerance * float(wanted.abs().max()),
                msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
            )


def _model(spec: ModelSpec, head: str) -> Decoder:
    if head == "values":
        return ValueModel(spec)
    return SequenceClassifier(spec, config=read_config(spec))


CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "empty-vocabulary-slice": ("llama", {"vocab_size": 70, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_slices_score_and_learn_as_the_whole_model(
    rank_pool: RankPool, tmp_path: Path, case: str, tp: int
) -> None:
    family, config = CASES[case]
    spec = _spec(write_tiny_decoder(tmp_path, family, **config), logprob_chunk_tokens=5)
    whole = run_pass(spec, "lm_head", None)
    parts = rank_pool.run(pass_of_rank, tp, spec, "lm_head", TrainLayout(tp=tp))
    check_against_one_rank(whole, parts, spec, "lm_head")
