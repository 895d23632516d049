"""Layers in bfloat16 from end to end, against transformers' own bfloat16 models, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch

from rolemesh.engine.models import decoder
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.batching import PaddedRows, pad_rows
from rolemesh.engine.specs import ModelSpec, Numerics
from rolemesh.engine.specs.by_device import Device

TOLERANCE = 2e-5
"""float32 sums in another order, through two layers."""
GRADIENT_TOLERANCE = 0.02
"""Of a gradient's norm: bfloat16 products through two layers, against float32 ones."""

FAMILIES: dict[str, tuple[str, dict[str, bool]]] = {
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, norms of heads": ("qwen3", {}),
}
BFLOAT16 = Device("cpu", multiplies_bfloat16=True)
NO_BFLOAT16 = Device("cpu", multiplies_bfloat16=False)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, config = FAMILIES[request.param]
    return write_tiny_decoder(tmp_path / "model", family, **config)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes models as on a CPU with, or without, instructions for bfloat16."""

    def make(
        device: Device,
        folder: Path,
        *,
        numerics: Numerics = "fast",
        trainable: bool = True,
        **spec: Any,
    ) -> CausalLm:
        monkeypatch.setattr(decoder, "device_of", lambda _: device)
        return CausalLm(ModelSpec(path=folder, **spec), numerics=numerics, trainable=trainable)

    return make


def _rows() -> PaddedRows:
    return pad_rows(token_batch(vocab_size=100), "cpu")


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters()}


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_hidden_states_and_gradients_are_those_of_a_bfloat16_model(folder: Path, on: Any) -> None:
    model, peer = on(BFLOAT16, folder), load_trainer_model(folder).bfloat16()
    # Frequencies are no weights: transformers keeps those of a bfloat16 model in float32.
    peer.base_model.rotary_emb = model.lm.base_model.rotary_emb
    rows = _rows()
    states = model.stage_forward(rows, None)
    expected = peer.base_model(rows.tokens_BT, use_cache=False).last_hidden_state
    assert expected.dtype == torch.bfloat16
    assert torch.equal(states, expected.float())
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    direction[rows.tokens_BT == 0] = 0
    states.backward(direction)
    expected.backward(direction.bfloat16())
    theirs = _gradients(peer.base_model)
    for name, gradient in _gradients(model.lm.base_model).items():
        assert gradient.dtype == torch.float32, name
        if name != "embed_tokens.weight":  # theirs adds up rows in bfloat16
            assert torch.equal(gradient, theirs[name].float()), name


def test_weights_and_logits_stay_float32(folder: Path, on: Any) -> None:
    model = on(BFLOAT16, folder)
    logprobs, entropy = score(model, _rows(), temperature=0.8, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    exact, _ = score(on(BFLOAT16, folder, numerics="exact"), _rows(), temperature=0.8)
    # It is another computation, and not far off.
    assert not torch.equal(logprobs, exact)
    assert float((logprobs - exact).abs().mean().detach()) < 0.05


def test_without_instructions_for_bfloat16_every_product_is_float32(
    folder: Path, tmp_path: Path, on: Any
) -> None:
    load = load_trainer_model(folder)
    rounded_copy(load).save_pretrained(tmp_path / "rounded")
    plain = on(NO_BFLOAT16, tmp_path / "rounded", compute_dtype="float32")
    fast, exact = on(NO_BFLOAT16, folder), on(NO_BFLOAT16, folder, numerics="exact")
    scores = {}
    for name, model in (("plain", plain), ("fast", fast), ("exact", exact)):
        scores[name], _ = score(model, _rows(), temperature=1.0)
        scores[name].square().sum().backward()
    # The sampler's values, as in exact numerics, and gradients that nothing has rounded.
    torch.testing.assert_close(scores["fast"], scores["exact"], rtol=0, atol=TOLERANCE)
    for name, gradient in _gradients(plain.lm).items():
        assert _distance(_gradients(fast.lm)[name], gradient) < TOLERANCE, name
    far = [_distance(_gradients(exact.lm)[name], g) for name, g in _gradients(plain.lm).items()]
    assert max(far) > 10 * TOLERANCE
    assert max(far) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("device", "numerics"), [(BFLOAT16, "fast"), (BFLOAT16, "exact")], ids=["fast", "exact"]
)
def test_a_frozen_model_in_bfloat16_scores_as_the_one_that_is_trained(
    folder: Path, tmp_path: Path, on: Any, device: Device, numerics: Numerics
) -> None:
    # As model folders come: their weights are bfloat16.
    rounded_copy(load_trainer_model(folder)).save_pretrained(tmp_path / "model16")
    frozen = on(
        device, tmp_path / "model16", numerics=numerics, trainable=False, frozen_dtype="bfloat16"
    )
    trained = on(device, tmp_path / "model16", numerics=numerics)
    assert {w.dtype for w in frozen.parameters() if w.dim() > 1} == {torch.bfloat16}
    with torch.no_grad():
        left, _ = score(frozen, _rows(), temperature=1.0)
        right, _ = score(trained, _rows(), temperature=1.0)
    assert torch.equal(left, right)


def test_a_frozen_judge_keeps_its_head_in_float32(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path / "model", "llama")
    spec = ModelSpec(path=folder, frozen_dtype="bfloat16")
    judge = ScoringModel(spec, VALUE_HEAD, trainable=False)
    assert judge.head.weight.dtype == torch.float32
    assert judge.lm.base_model.embed_tokens.weight.dtype == torch.bfloat16
    assert judge(_rows()).dtype == torch.float32
