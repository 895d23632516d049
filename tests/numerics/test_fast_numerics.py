"""Layers in bfloat16 from end to end, against transformers' own bfloat16 models, bit by bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

from rolemesh.engine.models import decoder
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.layers.shared_attention import SHARING_ATTENTION, inputs_of
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.specs import ModelSpec, Numerics
from rolemesh.engine.specs.by_device import Device
from rolemesh.engine.specs.models.sections import ComputeDtype

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


def _rows() -> PackedRows:
    return pack_rows(token_batch(vocab_size=100), "cpu")


def _write_tiny_encoder(folder: Path) -> Path:
    """A judge that is no decoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=100, num_attention_heads=2, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


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
    peer.set_attn_implementation(SHARING_ATTENTION)
    inputs = inputs_of(rows.layout)
    expected = peer.base_model(rows.tokens_1S, use_cache=False, **inputs).last_hidden_state
    assert expected.dtype == torch.bfloat16
    assert torch.equal(states, expected.float())
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
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


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_without_instructions_for_bfloat16_every_product_is_float32(
    folder: Path, tmp_path: Path, on: Any, numerics: Numerics
) -> None:
    load = load_trainer_model(folder)
    rounded_copy(load).save_pretrained(tmp_path / "rounded")
    plain = on(NO_BFLOAT16, tmp_path / "rounded", compute_dtype="float32")
    model, usual = (
        on(device, folder, numerics=given)
        for device, given in ((NO_BFLOAT16, numerics), (BFLOAT16, "exact"))
    )
    scores = {}
    for name, scored in (("plain", plain), ("model", model), ("usual", usual)):
        scores[name], _ = score(scored, _rows(), temperature=1.0)
        scores[name].square().sum().backward()
    # The sampler's values, as on every CPU, and gradients that nothing has rounded.
    for name in ("plain", "usual"):
        torch.testing.assert_close(scores["model"], scores[name], rtol=0, atol=TOLERANCE)
    for name, gradient in _gradients(plain.lm).items():
        assert _distance(_gradients(model.lm)[name], gradient) < TOLERANCE, name
    far = [_distance(_gradients(usual.lm)[name], g) for name, g in _gradients(plain.lm).items()]
    assert max(far) > 10 * TOLERANCE
    assert max(far) < GRADIENT_TOLERANCE


class _Products(TorchDispatchMode):
    """Counts the matrix products in a block, by the type of their factors."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.types: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__ for word in self._names):
            self.types.update(
                {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1}
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("numerics", "activations"), [("exact", None), ("fast", None), ("exact", "bfloat16")]
)
@pytest.mark.parametrize("role", ["policy", "critic", "frozen policy", "frozen judge", "encoder"])
def test_no_product_is_of_bfloat16_where_the_machine_is_slow_in_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    numerics: Numerics,
    activations: ComputeDtype | None,
) -> None:
    if role == "encoder":
        folder = _write_tiny_encoder(tmp_path / "model")
    else:
        folder = write_tiny_decoder(tmp_path / "model", "llama")
    is_frozen = role not in ("policy", "critic")
    spec = ModelSpec(
        path=folder,
        activations=None if role == "encoder" else activations,
        frozen_dtype="bfloat16" if is_frozen and role != "encoder" else None,
    )
    # Attention takes the type of the activations, where a recipe gives it.
    names = ("mm", "linear", *(() if activations else ("attention",)))
    seen = {}
    for device in (BFLOAT16, NO_BFLOAT16):
        monkeypatch.setattr(decoder, "device_of", lambda _, device=device: device)
        model: Any
        if "policy" in role:
            model = CausalLm(spec, numerics=numerics, trainable=not is_frozen)
        else:
            head = ScoreHead(per="row") if role == "encoder" else VALUE_HEAD
            model = ScoringModel(spec, head, trainable=not is_frozen, numerics=numerics)
        with _Products(*names) as products:
            if "policy" in role:
                scores, _ = score(model, _rows(), temperature=1.0)
            else:
                scores = model(_rows())
            if not is_frozen:
                scores.square().sum().backward()
        seen[device] = products.types
    assert torch.bfloat16 not in seen[NO_BFLOAT16]
    assert seen[NO_BFLOAT16][torch.float32]
    if not is_frozen:  # and the count sees them where there are some
        assert seen[BFLOAT16][torch.bfloat16]


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
