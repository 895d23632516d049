"""Rounded weights with float32 activations, against plain products of values rounded before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.rollout_checks import load_trainer_model, rounded_copy
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from torch import nn
from transformers import PreTrainedModel

from rolemesh.engine.models import decoder
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.layers import rounding
from rolemesh.engine.models.layers.rounding import (
    narrow_layers,
    round_weights,
    rounded,
    rounded_product,
)
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.specs import AdapterSpec, ModelSpec
from rolemesh.engine.specs.by_device import Device

FLOAT32_TOLERANCE = 1e-6
"""Of a sum's largest entry: 64 float32 products, each exact to 6e-8."""
MODEL_TOLERANCE = 2e-5
"""float32 through two layers, with sums in another order."""
BFLOAT16_TOLERANCE = 1 / 128
"""Of a gradient's norm: two factors and a result, each rounded by at most 1/256 but at random."""
GRADIENT_TOLERANCE = 0.02
"""Of a gradient's norm over the model: such products through two layers."""

FAMILIES: dict[str, tuple[str, dict[str, bool]]] = {
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, norms of heads": ("qwen3", {}),
}


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, config = FAMILIES[request.param]
    return write_tiny_decoder(tmp_path / "model", family, **config)


def _narrow(folder: Path) -> CausalLm:
    return CausalLm(ModelSpec(path=folder, compute_dtype="bfloat16"))


def _gradients(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_the_product_rounds_the_weight_and_nothing_else() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 64, requires_grad=True), torch.randn(7, 64, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    exact_weight = weight.detach().bfloat16().double().requires_grad_()
    product, exact = rounded_product(x, weight), exact_x @ exact_weight.t()
    assert product.dtype == torch.float32
    error, largest = (product - exact).detach().abs().max(), exact.detach().abs().max()
    assert float(error) < FLOAT32_TOLERANCE * float(largest)
    direction = torch.randn(3, 5, 7)
    product.backward(direction)
    exact.backward(direction.double())
    for leaf, wanted in ((x, exact_x), (weight, exact_weight)):
        assert leaf.grad is not None
        assert wanted.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert _distance(leaf.grad, wanted.grad) < BFLOAT16_TOLERANCE


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    rounded_product(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    x = x.detach()
    rounded_product(x, weight.requires_grad_()).sum().backward()
    assert weight.grad is not None
    assert x.grad is None


def test_a_rounded_vector_has_bfloat16_values_and_passes_its_gradient_on() -> None:
    # bfloat16 has 8 bits of mantissa: 1 + 1/256 lies half way and goes to the even neighbour.
    vector = torch.tensor([1.0, 1 + 1 / 256, 1 + 3 / 256, -1000.0], requires_grad=True)
    result = rounded(vector)
    assert result.tolist() == [1.0, 1.0, 1 + 4 / 256, -1000.0]
    direction = torch.tensor([1.001, 2.001, 3.001, 4.001])
    result.backward(direction)
    assert vector.grad is not None
    assert torch.equal(vector.grad, direction)


def test_modules_of_any_kind_see_their_weights_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv1d(5, 2, 3))
    for weight in model.parameters():
        nn.init.normal_(weight)
    tokens = torch.tensor([[0, 3, 8, 3, 1]])
    with torch.no_grad():
        before = [weight.clone() for weight in model.parameters()]
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
        expected = model(tokens)
        for weight, whole in zip(model.parameters(), before, strict=True):
            weight.copy_(whole)
        plain = model(tokens)
        round_weights(model)
        found = model(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=MODEL_TOLERANCE)
    assert float((plain - expected).abs().max()) > 100 * MODEL_TOLERANCE


def test_a_bfloat16_policy_is_the_model_with_rounded_weights_in_float32(folder: Path) -> None:
    rounded_copy(load_trainer_model(folder)).save_pretrained(folder.with_name("rounded"))
    exact = CausalLm(ModelSpec(path=folder.with_name("rounded"), compute_dtype="float32"))
    model = _narrow(folder)
    before = {name: weight.detach().clone() for name, weight in model.named_weights()}
    rows = pack_rows(token_batch(vocab_size=100), "cpu")
    logprobs, _ = score(model, rows, temperature=0.8)
    expected, _ = score(exact, rows, temperature=0.8)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=MODEL_TOLERANCE)
    logprobs.square().sum().backward()
    expected.square().sum().backward()
    assert _distance(_gradients(model.lm), _gradients(exact.lm)) < GRADIENT_TOLERANCE
    # The weights themselves stay whole, and so do their gradients.
    for name, weight in model.named_weights():
        assert torch.equal(weight, before[name]), name
        assert weight.dtype == weight.grad.dtype == torch.float32, name


@pytest.mark.parametrize("multiplies_bfloat16", [True, False])
def test_a_reference_is_rounded_once_and_scores_as_the_policy_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, multiplies_bfloat16: bool
) -> None:
    machine = Device("cpu", multiplies_bfloat16=multiplies_bfloat16)
    monkeypatch.setattr(decoder, "device_of", lambda _: machine)
    policy = _narrow(folder)
    reference = CausalLm(ModelSpec(path=folder, compute_dtype="bfloat16"), trainable=False)
    for name, weight in reference.lm.base_model.named_parameters():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, policy.lm.base_model.get_parameter(name).bfloat16().float()), (
            name
        )
    monkeypatch.setattr(rounding, "rounded_product", None)
    rows = pack_rows(token_batch(vocab_size=100), "cpu")
    with torch.no_grad():
        found, _ = score(reference, rows, temperature=0.8)
        monkeypatch.undo()
        expected, _ = score(policy, rows, temperature=0.8)
    # Biases are added in the product here, and after it there.
    torch.testing.assert_close(found, expected, rtol=0, atol=MODEL_TOLERANCE)


def test_a_base_beneath_an_adapter_is_rounded_once_and_computes_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "device_of", lambda _: Device("cpu", multiplies_bfloat16=True))
    rows = pack_rows(token_batch(vocab_size=100), "cpu")
    found = []
    for is_rounded in (True, False):
        spec = ModelSpec(path=folder, compute_dtype="bfloat16", adapter=AdapterSpec(rank=2))
        if not is_rounded:
            monkeypatch.setattr(decoder, "round_for_good", lambda part: None)
            monkeypatch.setattr(decoder, "round_weights", _anew)
        model = CausalLm(spec)
        for name, weight in model.trained_weights():
            nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        base = model.lm.base_model.layers[0].mlp.down_proj.weight
        assert torch.equal(base, base.bfloat16().float()) == is_rounded
        logprobs, _ = score(model, rows, temperature=0.8)
        logprobs.square().sum().backward()
        gradients = [weight.grad for _, weight in model.trained_weights()]
        found.append((logprobs, *gradients))
    for once, anew in zip(*found, strict=True):
        assert torch.equal(once, anew)


def _anew(model: nn.Module, *, narrow_gradients: bool, are_rounded: bool) -> None:
    assert narrow_gradients
    assert are_rounded
    round_weights(model, narrow_gradients=True)


def test_an_autocast_around_the_caller_rounds_no_activation(folder: Path) -> None:
    model, rows = _narrow(folder), pack_rows(token_batch(vocab_size=100), "cpu")
    plain, _ = score(model, rows, temperature=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = score(model, rows, temperature=1.0)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize(
    ("multiplies_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_a_critic_has_no_sampler_and_multiplies_what_the_machine_is_fast_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    multiplies_bfloat16: bool,
    expected: torch.dtype,
) -> None:
    machine = Device("cpu", multiplies_bfloat16=multiplies_bfloat16)
    monkeypatch.setattr(decoder, "device_of", lambda _: machine)
    critic = ScoringModel(ModelSpec(path=folder, compute_dtype="bfloat16"), VALUE_HEAD)
    products: list[torch.dtype] = []
    critic.lm.base_model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _, arguments, result: products.append(result.dtype)
    )
    critic(pack_rows(token_batch(vocab_size=100), "cpu"))
    assert products == [expected]


class _Scaled(nn.Module):
    """A module with a weight of its own, as norms, routers and experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("round_model", [round_weights, narrow_layers])
@pytest.mark.parametrize("make", [_Scaled, lambda: nn.Linear(8, 8)], ids=["own weight", "linear"])
def test_a_forward_of_one_module_is_kept_and_sees_rounded_weights(
    make: Callable[[], nn.Module], round_model: Callable[[nn.Module], None]
) -> None:
    """So are the experts of one rank among several, which exchange tokens before they compute."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    x = torch.randn(3, 8)

    def added(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x + module.weight.sum()

    own: Any = model[1]
    own.forward = MethodType(added, own)
    round_model(model)
    torch.testing.assert_close(
        own(x), x + own.weight.bfloat16().to(own(x).dtype).sum(), rtol=0.02, atol=0.02
    )
    assert not torch.equal(own(x), x + own.weight.sum())


@pytest.mark.parametrize("round_model", [round_weights, narrow_layers])
def test_a_forward_that_would_not_see_rounded_weights_is_refused(
    round_model: Callable[[nn.Module], None],
) -> None:
    model = nn.Sequential(_Scaled(), _Scaled())
    own: Any = model[1]
    own.forward = lambda x: x + own.weight
    with pytest.raises(ValueError, match=r"module '1' \(_Scaled\) has a forward of its own"):
        round_model(model)
