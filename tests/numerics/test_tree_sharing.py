"""Rows packed as a tree against each row by itself: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_cases import attended
from support.tiny_families import write_tiny_decoder
from support.token_batches import score
from support.tree_sharing import (
    BFLOAT16_TOLERANCE,
    DOUBLE_TOLERANCE,
    FAMILIES,
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    VOCAB,
    WHATEVER,
    assert_near,
    gradients_of,
    model_folder,
    outputs_of,
    scored_alone,
    shared_batch,
    sharing_model,
    states_and_gradients,
)

from rolemesh.engine.models.layers import shared_attention
from rolemesh.engine.packing.packed_rows import pack_rows

KINDS = [("policy", family) for family in FAMILIES] + [("critic", "qwen3")]


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_states_and_all_gradients_in_float64(tmp_path: Path, family: str, kind: str) -> None:
    model = sharing_model(model_folder(tmp_path, family), kind)
    model.lm.double()
    batch = shared_batch()
    shared, shared_gradients = states_and_gradients(model, pack_rows(batch, "cpu", WHATEVER))
    padded, padded_gradients = states_and_gradients(model, pack_rows(batch, "cpu"))
    assert float((shared - padded).norm() / padded.norm()) < DOUBLE_TOLERANCE
    assert_near(shared_gradients, padded_gradients, DOUBLE_TOLERANCE)


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_outputs_and_all_gradients(tmp_path: Path, family: str, kind: str) -> None:
    model = sharing_model(model_folder(tmp_path, family), kind)
    batch = shared_batch()
    found = [
        outputs_of(model, rows)
        for rows in (pack_rows(batch, "cpu", WHATEVER), pack_rows(batch, "cpu"))
    ]
    for shared, padded in zip(*found, strict=True):
        torch.testing.assert_close(shared, padded, rtol=0, atol=OUTPUT_TOLERANCE)
    gradients = [gradients_of(model, outputs) for outputs in found]
    assert_near(gradients[0], gradients[1], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_gradient(tmp_path: Path, mode: str, compute_dtype: str) -> None:
    folder = model_folder(tmp_path, "smollm2")
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    gradients = []
    for recompute in ("none", mode):
        model = sharing_model(folder, "policy", recompute=recompute, compute_dtype=compute_dtype)
        gradients.append(gradients_of(model, outputs_of(model, rows)))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_bfloat16_gradients_are_near(tmp_path: Path, kind: str) -> None:
    model = sharing_model(model_folder(tmp_path, "smollm2"), kind, compute_dtype="bfloat16")
    batch = shared_batch()
    found = [
        gradients_of(model, outputs_of(model, rows))
        for rows in (pack_rows(batch, "cpu", WHATEVER), pack_rows(batch, "cpu"))
    ]
    assert_near(found[0], found[1], BFLOAT16_TOLERANCE)


def test_prompts_without_any_completion_leave_no_trace(tmp_path: Path) -> None:
    model = sharing_model(model_folder(tmp_path, "smollm2"), "policy")
    rows = pack_rows(shared_batch([(0, 0), (0, 0), (1, 0)]), "cpu", WHATEVER)
    logprobs_N, _ = score(model, rows, temperature=1.0)  # type: ignore[union-attr]
    assert logprobs_N.shape == (0,)
    logprobs_N.sum().backward()
    for name, weight in model.named_weights():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) == 0, name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=str
)
def test_many_short_rows_attend_by_products_as_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    """Rows that share a prompt, and prompts by themselves; sums in another order."""
    found = {}
    asked = 0
    real = shared_attention._attend_by_products

    def counting(*args: Any) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return real(*args)

    monkeypatch.setattr(shared_attention, "_attend_by_products", counting)
    for least in (1, 10**9):
        monkeypatch.setattr(shared_attention, "MANY_HEADS", least)
        before = asked
        found[least] = attended("cpu", 2, 20, (5, 30, 1, 9), dtype=dtype)
        assert (asked > before) == (least == 1)
    for name, expected in found[10**9].items():
        error = (found[1][name] - expected).abs().max()
        assert error <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("autocasts", [False, True], ids=["bfloat16", "autocast"])
def test_attention_by_products_is_as_near_as_the_kernel(
    monkeypatch: pytest.MonkeyPatch, autocasts: bool
) -> None:
    """In bfloat16 on a CPU, against float64 on the same numbers."""

    def found(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return attended("cpu", 2, 20, (5, 30, 1, 9), dtype=dtype, rounded=torch.bfloat16)

    def narrow() -> dict[str, torch.Tensor]:
        # Under autocast rotated queries and keys are float32.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return found(torch.float32 if autocasts else torch.bfloat16)

    exact, by_products = found(torch.float64), narrow()
    assert by_products["attended"].dtype == torch.bfloat16
    monkeypatch.setattr(shared_attention, "MOST_SCORES", 0)
    for name, by_kernel in narrow().items():
        expected = exact[name]
        error, of_kernel = (
            float((one - expected).norm() / expected.norm())
            for one in (by_products[name], by_kernel)
        )
        # The kernel rounds the weights of the values, too. Under autocast both round the gradient
        # of a query last: 3.4e-3 and 3.3e-3.
        assert error < 1.1 * of_kernel < BFLOAT16_TOLERANCE
        assert not torch.equal(by_products[name], by_kernel)


# --- attention of other kinds -------------------------------------------------------------


_EVERY_OTHER = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}
"""Rows are longer than the window, and so are most prompts."""

OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, **_EVERY_OTHER},
    "olmo3": _EVERY_OTHER,
    "gemma3_text": _EVERY_OTHER,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}
"""With layers that look back only so far, and with experts; the last ones take rectangles alone."""

RECTANGLES = frozenset({"gpt2", "falcon_h1"})
"""The second carries a state from token to token, and says so in no list of its config."""


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_attention_is_that_of_each_row_by_itself(
    tmp_path: Path, family: str, shares: bool
) -> None:
    """The oracle is transformers' own pass over each row."""
    options = OTHERS[family]
    folder = write_tiny_decoder(tmp_path, family, vocab_size=VOCAB, **options)
    model = sharing_model(folder, "policy")
    assert (model.packing is None) == (family in RECTANGLES)
    batch = shared_batch()
    rows = pack_rows(batch, "cpu", replace(WHATEVER, shares=shares and family not in RECTANGLES))
    outputs = outputs_of(model, rows)[:1]
    gradients = gradients_of(model, outputs)
    expected = [scored_alone(model, batch)]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=OUTPUT_TOLERANCE)
    assert_near(gradients, gradients_of(model, expected), GRADIENT_TOLERANCE)
    if "sliding_window" in options:
        far = write_tiny_decoder(
            tmp_path / "far", family, vocab_size=VOCAB, **{**options, "sliding_window": 64}
        )
        difference = scored_alone(sharing_model(far, "policy"), batch) - expected[0]
        assert float(difference.detach().abs().max()) > 1e-2, "nothing is out of sight"
