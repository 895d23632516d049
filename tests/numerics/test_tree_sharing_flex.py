"""Rows packed as a tree, by FlexAttention as a GPU has it: against rectangles of scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex_attention
from support.kernel_cases import attended
from support.tree_sharing import (
    BFLOAT16_TOLERANCE,
    DOUBLE_TOLERANCE,
    FAMILIES,
    OUTPUT_TOLERANCE,
    ROWS,
    WHATEVER,
    assert_near,
    gradients_of,
    model_folder,
    outputs_of,
    shared_batch,
    sharing_model,
    states_and_gradients,
)
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from rolemesh.engine.models.layers import shared_attention, shared_flex
from rolemesh.engine.packing.packed_rows import pack_rows


@pytest.fixture
def by_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ROLEMESH_KERNELS=triton has it on a GPU, but computed plainly, with all scores.

    Torch 2.13 refuses gradients on a CPU, although it has the plain backward pass.
    """
    monkeypatch.setattr(shared_attention, "flex_serves", lambda device: True)
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *tensors: None)
    # Otherwise it warns that it was not compiled.
    monkeypatch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("by_flex")
def test_flex_attention_has_the_values_and_gradients_of_rectangles(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharing_model(model_folder(tmp_path, family), "policy")
    model.lm.double()
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    assert shared_attention.inputs_of(rows.layout)["tree"].block_mask is not None
    flex, flex_gradients = states_and_gradients(model, rows)
    monkeypatch.undo()
    assert shared_attention.inputs_of(rows.layout)["tree"].block_mask is None
    expected, gradients = states_and_gradients(model, rows)
    assert float((flex - expected).norm() / expected.norm()) < DOUBLE_TOLERANCE
    assert_near(flex_gradients, gradients, DOUBLE_TOLERANCE)


def test_the_mask_of_a_pass_is_traced_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is compiled, and each pass has its own number of tokens."""
    counter = CompileCounter()
    traced = torch.compile(shared_flex.create_block_mask, dynamic=True, backend=counter)
    for number in (1, 9, 3):
        rows = [(prompt, 1 + (11 * at) % 40) for at, (prompt, _) in enumerate(ROWS * number)]
        tree = pack_rows(shared_batch(rows), "cpu", WHATEVER).layout
        found = []
        for make in (create_block_mask, traced):
            monkeypatch.setattr(shared_flex, "create_block_mask", make)
            mask = shared_flex.with_block_mask(tree).block_mask
            assert mask is not None
            found.append([one for one in mask.as_tuple() if isinstance(one, torch.Tensor)])
        expected, compiled = found
        assert all(map(torch.equal, expected, compiled))
    assert counter.frame_count == 1


def test_flex_attention_over_many_blocks(by_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tokens each, of which some are whole, some cut and most empty."""
    found = attended("cpu", 2, 150, (300, 1, 70, 9))
    monkeypatch.undo()
    for name, expected in attended("cpu", 2, 150, (300, 1, 70, 9)).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flex_attention_under_autocast_and_recomputed(
    tmp_path: Path, recompute: str, by_flex: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path, "smollm2")
    model = sharing_model(folder, "policy", compute_dtype="bfloat16", recompute=recompute)
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    found = gradients_of(model, outputs_of(model, rows))
    monkeypatch.undo()
    assert_near(found, gradients_of(model, outputs_of(model, rows)), BFLOAT16_TOLERANCE)
