"""KL estimators, their gradients, and the controllers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles

from rolemesh.engine.algorithms.kl import KlController, kl_loss, kl_penalty
from rolemesh.engine.specs import AdaptiveKlSpec, FixedKlSpec, KlForm

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FORMS = pytest.mark.parametrize("form", ["k1", "k2", "k3"])
logprob = st.floats(-6, 0, width=32)


@FORMS
@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.tuples(logprob, logprob), max_size=12))
def test_every_form_has_its_value_and_its_gradient(
    form: KlForm, pairs: list[tuple[float, float]]
) -> None:
    for dtype, tolerance in TOLERANCE.items():
        policy = torch.tensor([p for p, _ in pairs], dtype=dtype, requires_grad=True)
        reference = torch.tensor([q for _, q in pairs], dtype=dtype, requires_grad=True)
        expected = torch.tensor([oracles.kl(form, p, q) for p, q in pairs], dtype=torch.float64)
        slopes = torch.tensor([oracles.kl_slope(form, p, q) for p, q in pairs], dtype=torch.float64)
        penalty, loss = kl_penalty(policy, reference, form), kl_loss(policy, reference, form)
        loss.sum().backward()
        for actual in (penalty, loss):
            torch.testing.assert_close(
                actual.detach().double(), expected, rtol=tolerance, atol=tolerance
            )
        assert policy.grad is not None
        torch.testing.assert_close(policy.grad.double(), slopes, rtol=tolerance, atol=tolerance)
        assert reference.grad is None


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_closed_form_slopes_agree_with_central_differences(form: KlForm) -> None:
    for p, q in ((-1.0, -1.3), (-2.0, -0.4), (-0.5, -0.5)):
        numeric = oracles.central_difference(lambda x, q=q: oracles.kl(form, x, q), p, 1e-5)
        assert oracles.kl_slope(form, p, q) == pytest.approx(numeric, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_of_an_absurd_log_ratio_is_bounded_above_and_exact_below(dtype: torch.dtype) -> None:
    ratios = [-300.0, -20.5, -1.0, 0.5, 19.5, 20.5, 89.0, 1e4]
    policy = torch.zeros(len(ratios), dtype=dtype, requires_grad=True)
    reference = torch.tensor(ratios, dtype=dtype)
    value = kl_loss(policy, reference, "k3")
    value.sum().backward()
    bounded = [min(r, 20.0) for r in ratios]
    expected = torch.tensor([math.expm1(r) - r for r in bounded], dtype=torch.float64)
    slopes = [-math.expm1(r) if r <= 20 else 0.0 for r in ratios]
    assert policy.grad is not None
    for actual, oracle in (
        (value.detach(), expected),
        (policy.grad, torch.tensor(slopes, dtype=torch.float64)),
    ):
        torch.testing.assert_close(actual.double(), oracle, rtol=TOLERANCE[dtype], atol=0)


def categorical(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, generator=generator)
    reference = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    return logits.requires_grad_(), reference


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(form: KlForm) -> None:
    """The expectation over all tokens, exactly, instead of a sampled mean."""
    logits, reference = categorical(seed=0)
    policy = logits.log_softmax(0)
    expected = (policy.exp() * (policy - reference)).sum()
    actual = (policy.exp() * kl_penalty(policy, reference, form)).sum()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("form", "direction"), [("k1", "reverse"), ("k2", "reverse"), ("k3", "forward")]
)
def test_expected_gradient_in_a_loss_is_that_of_a_kl(form: KlForm, direction: str) -> None:
    """k1 by its own derivative would give 0 here: no pull to the reference at all."""
    logits, reference = categorical(seed=1)
    policy = logits.log_softmax(0)
    weights = policy.detach().exp()  # samples come from the policy; no gradient through drawing
    (actual,) = torch.autograd.grad(
        (weights * kl_loss(policy, reference, form)).sum(), logits, retain_graph=True
    )
    if direction == "reverse":
        divergence = (policy.exp() * (policy - reference)).sum()
    else:
        divergence = (reference.exp() * (reference - policy)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_k3_keeps_its_digits_where_the_models_almost_agree() -> None:
    """exp(r) - 1 - r in float32 would be 0 or pure rounding noise at r = 1e-4."""
    policy, reference = torch.tensor([0.0]), torch.tensor([2.0**-13])
    exact = oracles.kl("k2", 0.0, 2.0**-13)  # k3 = r^2 / 2 + r^3 / 6 + ...
    assert float(kl_penalty(policy, reference, "k3")) == pytest.approx(exact, rel=2e-2)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_form is 'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_adaptive_controller_follows_the_paper(measured: float, error: float) -> None:
    controller = KlController(AdaptiveKlSpec(coefficient=0.1, target=6.0, horizon=1000))
    controller.update(measured, 50)
    assert controller.coefficient == pytest.approx(0.1 * (1 + error * 50 / 1000), rel=1e-12)


def test_fixed_controller_never_moves() -> None:
    controller = KlController(FixedKlSpec(coefficient=0.07))
    controller.update(100.0, 512)
    assert controller.coefficient == 0.07


def test_state_survives_json_and_the_controllers_go_on_alike() -> None:
    spec = AdaptiveKlSpec(coefficient=0.1, target=2.0, horizon=500)
    first, second = KlController(spec), KlController(spec)
    first.update(5.0, 64)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (first, second):
        controller.update(1.0, 64)
    assert first.coefficient == second.coefficient != 0.1
    fixed = KlController(FixedKlSpec(coefficient=0.3))
    fixed.load_state_dict(json.loads(json.dumps(fixed.state_dict())))
    assert fixed.coefficient == 0.3


def test_state_that_does_not_fit_is_refused() -> None:
    adaptive = KlController(AdaptiveKlSpec())
    fixed = KlController(FixedKlSpec())
    with pytest.raises(ValueError, match="asks for 'adaptive'"):
        adaptive.load_state_dict(fixed.state_dict())
    with pytest.raises(ValueError, match="asks for 'fixed'"):
        fixed.load_state_dict(adaptive.state_dict())
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="coefficient"):
            adaptive.load_state_dict({"type": "adaptive", "coefficient": bad})


@pytest.mark.parametrize("spec", [FixedKlSpec(), AdaptiveKlSpec()], ids=["fixed", "adaptive"])
def test_a_kl_that_is_not_finite_is_refused(spec: FixedKlSpec | AdaptiveKlSpec) -> None:
    with pytest.raises(ValueError, match="mean KL per row is nan"):
        KlController(spec).update(math.nan, 4)
    with pytest.raises(ValueError, match="num_rows is -1"):
        KlController(spec).update(1.0, -1)


def test_a_horizon_that_would_turn_the_sign_is_refused() -> None:
    controller = KlController(AdaptiveKlSpec(horizon=10))
    with pytest.raises(ValueError, match="horizon is 10 with 64 rows"):
        controller.update(0.0, 64)
