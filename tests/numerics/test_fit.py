"""Tests that the estimate of a rank's memory is what the real trainer takes on a CPU."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.fitted_work import TOLERANCE, measure, really, work_of
from support.public_models import config_folder
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama

from rolemesh.engine.fit.rank_memory import RankMemory, RankWork, counted, estimated
from rolemesh.engine.fit.tally import Tally
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import (
    AnyOptimizerSpec,
    BradleyTerryLossSpec,
    MuonSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.specs.models.activations import (
    Arithmetic,
    LayerWidths,
    adapted_layer_bytes,
    layer_bytes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


ADAPTER: dict[str, Any] = {"adapter": {"rank": 8}}

_SLOW_WORKS = ("float32", "entropy", "adapter", "adapter, recomputed", "critic with an adapter")

WORKS: dict[str, dict[str, Any]] = {
    "policy": {},
    "recomputed": {"model": {"recompute": "full"}},
    "float32": {"model": {"compute_dtype": "float32"}},
    "entropy": {"loss": PpoPolicyLossSpec(entropy_coefficient=0.01)},
    "critic": {"kind": "critic", "loss": PpoValueLossSpec()},
    "adapter": {"model": ADAPTER},
    "adapter over bfloat16": {"model": {**ADAPTER, "frozen_dtype": "bfloat16"}},
    "adapter, recomputed": {"model": {**ADAPTER, "recompute": "full"}},
    "muon": {"optimizer": MuonSpec()},
    "critic with an adapter": {"kind": "critic", "loss": PpoValueLossSpec(), "model": ADAPTER},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[pytest.mark.slow] if name in _SLOW_WORKS else [])
        for name, changes in WORKS.items()
    ],
)
def test_the_estimate_is_the_peak_of_the_allocator(folder: Path, changes: dict[str, Any]) -> None:
    work = work_of(folder, **changes)
    assert estimated(work, "cpu").peak == pytest.approx(
        really(work, RankMesh.single()), rel=TOLERANCE
    )


LAYOUTS: dict[str, tuple[TrainLayout, dict[str, Any]]] = {
    "fsdp": (TrainLayout(dp=2, fsdp=2), {}),
    "tensor slices": (TrainLayout(tp=2), {}),
    "fsdp, adapter": (TrainLayout(dp=2, fsdp=2), ADAPTER),
    "tensor slices, adapter": (TrainLayout(tp=2), ADAPTER),
}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        # The next test estimates and measures slices too.
        pytest.param(*case, id=name, marks=[] if name == "fsdp" else pytest.mark.slow)
        for name, case in LAYOUTS.items()
    ],
)
def test_the_estimate_holds_for_a_rank_of_several(
    folder: Path, layout: TrainLayout, changes: dict[str, Any], rank_pool: RankPool
) -> None:
    model = {"recompute": "full", **changes}
    work = work_of(folder, layout=HybridLayout(layout), model=model)
    found = estimated(work, "cpu").peak
    for measured in rank_pool.run(measure, 2, work):
        assert found == pytest.approx(measured, rel=TOLERANCE)


def count(at: RankContext, work: RankWork) -> RankMemory:
    with at.connect(work.layout) as mesh, Tally() as tally:
        return counted(work, mesh, tally)


@pytest.mark.slow
def test_sharing_the_tokens_saves_what_is_estimated(folder: Path, rank_pool: RankPool) -> None:
    """To the byte, of the tensors of the code: gloo takes copies of its own where it sums."""
    layout, model = HybridLayout(TrainLayout(tp=2)), {"recompute": "full"}
    whole = work_of(folder, layout=layout, model=model)
    shared = work_of(folder, layout=layout, model=model | {"sequence_parallel": True})
    found = estimated(whole, "cpu").peak - estimated(shared, "cpu").peak
    assert found > 0
    with_all, with_shares = (rank_pool.run(count, 2, work) for work in (whole, shared))
    for one, other in zip(with_all, with_shares, strict=True):
        assert one.peak - other.peak == found


def test_what_is_estimated_is_what_is_counted_of_real_tensors(folder: Path) -> None:
    """Each purpose alike, to the byte of what grows with the model."""
    work = work_of(folder, average=0.99)
    with Tally() as tally:
        real = counted(work, RankMesh.single(), tally)
    found = estimated(work, "cpu")
    for purpose in ("weights", "gradients", "optimizer"):
        assert found.at_peak[purpose] == pytest.approx(real.at_peak[purpose], rel=0.01)
    assert found.peak == pytest.approx(real.peak, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("optimizer", "spared", "average"), [(OptimizerSpec(), 0, 0.99), (MuonSpec(), 4, None)]
)
def test_parts_are_what_arithmetic_says(
    tmp_path: Path, optimizer: AnyOptimizerSpec, spared: int, average: float | None
) -> None:
    """Of a model of p parameters: 4 p of weights, 4 p of gradients, 8 p of moments.

    Of m that lie in matrices of layers, Muon needs 4 m less. A moving average of the weights takes
    as much as they do.
    """
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    found = estimated(work_of(folder, optimizer=optimizer, average=average))
    matrices = 2 * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864)
    parameters = 151936 * 896 + matrices + 2 * ((896 + 2 * 128) + 2 * 896) + 896
    moments = 8 * parameters - spared * matrices
    each = 4 if average is None else 8
    assert found.at_rest["weights"] == pytest.approx(each * parameters, rel=1e-4)
    assert found.at_rest["optimizer"] == pytest.approx(moments, rel=1e-4)
    assert found.at_peak["gradients"] == pytest.approx(4 * parameters, rel=1e-4)


@pytest.mark.parametrize(("device", "frozen"), [("cuda", 2), ("cpu", 4)])
def test_an_adapter_takes_what_arithmetic_says(
    tmp_path: Path, device: Literal["cpu", "cuda"], frozen: int
) -> None:
    """Of f numbers in factors: 4 f of weights, 4 f of gradients, 8 f of moments; the base once."""
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    found = estimated(work_of(folder, model=ADAPTER), device)
    wide, narrow, inner = 896, 128, 4864
    matrices = 151936 * wide + 2 * (2 * wide * (wide + narrow) + 3 * wide * inner)
    factors = 2 * 8 * (2 * (wide + wide) + 2 * (wide + narrow) + 3 * (wide + inner))
    assert found.at_rest["weights"] == pytest.approx(frozen * matrices + 4 * factors, rel=1e-3)
    assert found.at_rest["optimizer"] == pytest.approx(8 * factors, rel=1e-3)
    assert found.at_peak["gradients"] == pytest.approx(4 * factors, rel=1e-3)


def test_what_an_adapter_begins_with_and_its_base_are_not_read(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=1)
    # Nobody could read it: the identity of the base would fail.
    (folder / "model.safetensors").mkdir()
    new = estimated(work_of(folder, model=ADAPTER, passes=1))
    model = {"adapter": {"rank": 8, "from": tmp_path / "nowhere"}}
    assert estimated(work_of(folder, model=model, passes=1)) == new
    assert not [one for one in threading.enumerate() if "base-identity" in one.name]


def test_pairs_are_trained_on_whole(folder: Path) -> None:
    """Of a reward, also where a micro-batch has room for one row."""
    policy = estimated(work_of(folder, model=ADAPTER, passes=1))
    for tokens in (64, 512):
        model = {**ADAPTER, "micro_batch_tokens": tokens}
        work = work_of(folder, kind="reward", loss=BradleyTerryLossSpec(), model=model, passes=1)
        # Its score head more.
        assert estimated(work).at_rest["optimizer"] > policy.at_rest["optimizer"] > 0


def test_the_first_of_two_stages_is_estimated(tmp_path: Path) -> None:
    """It has no loss of its own."""
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    layout = HybridLayout(TrainLayout(pp=2))
    first, last = (estimated(work_of(folder, layout=layout, rank=rank)) for rank in (0, 1))
    # Each has an embedding and a layer, the last one the last norm more.
    assert first.rest == pytest.approx(last.rest, rel=1e-3)
    assert first.at_peak["head"] == 0 < last.at_peak["head"]


_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
_ADAPTED = {"adapter": {"rank": 16}}
_FLOAT32 = {"compute_dtype": "float32"}
_SHARED = {"sequence_parallel": True}
_LAYERS: dict[str, tuple[Arithmetic, dict[str, Any], dict[str, Any]]] = {
    "exact": ("autocast", {}, {}),
    "exact, queries and keys normed": ("autocast", {}, _QWEN3),
    "bfloat16, wide heads": ("bfloat16", {}, _QWEN3),
    "float32": ("float32", _FLOAT32, _QWEN3),
    "slices": ("autocast", {}, {}),
    "slices that share tokens": ("bfloat16", _SHARED, {}),
    "adapter, exact": ("autocast", _ADAPTED, {}),
    "adapter, exact, over float32": ("autocast", {**_ADAPTED, "frozen_dtype": "float32"}, {}),
    "adapter, some matrices": (
        "autocast",
        {"adapter": {"targets": ["q_proj", "v_proj", "up_proj"]}},
        {},
    ),
    "adapter, bfloat16": ("bfloat16", {"adapter": {"targets": ["k_proj", "down_proj"]}}, _QWEN3),
    "adapter, float32": ("float32", {**_ADAPTED, **_FLOAT32}, _QWEN3),
    "slices, adapter": ("autocast", _ADAPTED, {}),
    "slices that share tokens, adapter": ("bfloat16", {**_ADAPTED, **_SHARED}, {}),
}
"""Arithmetic, and fields of the ModelSpec and of config.json."""
_QUICK_LAYERS = (
    # Normed queries and keys are in two others, and slices in those that share tokens.
    *("exact", "bfloat16, wide heads", "float32", "slices that share tokens"),
    *("adapter, exact", "adapter, bfloat16"),
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in _QUICK_LAYERS else pytest.mark.slow)
        for name in _LAYERS
    ],
)
def test_a_layer_keeps_what_the_formula_says(case: str, tmp_path: Path) -> None:
    arithmetic, model, config = _LAYERS[case]
    num_slices = 2 if "slices" in case else 1
    found = []
    for num_layers in (1, 2):
        folder = config_folder(
            tmp_path / str(num_layers),
            "Qwen2.5-0.5B-Instruct",
            **{"num_hidden_layers": num_layers, "vocab_size": 512, "hidden_size": 512},
            **{"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
            **{"intermediate_size": 4864 if "adapter" in case else 1152, **config},
        )
        tokens = {"micro_batch_tokens": 1024, "logprob_chunk_tokens": 1024}
        work = work_of(
            folder,
            row_tokens=512,
            # The first pass keeps as much as the second one.
            passes=1,
            model={**tokens, "recompute": "none", **model},
            layout=HybridLayout(TrainLayout(tp=num_slices)),
            numerics="fast" if arithmetic == "bfloat16" else "exact",
        )
        found.append(estimated(work).at_peak["activations"])
    widths = LayerWidths.of_config(json.loads((folder / "config.json").read_text()))
    assert widths is not None
    cut: dict[str, Any] = {
        "num_slices": num_slices,
        "shares_tokens": work.model.sequence_parallel,
    }
    expected = layer_bytes(widths, 1024, arithmetic, **cut)
    if (adapter := work.model.adapter) is not None:
        expected = adapted_layer_bytes(
            widths,
            1024,
            arithmetic,
            rank=adapter.rank,
            targets=adapter.targets,
            frozen_bytes=4 if "frozen_dtype" in model else 2,
            **cut,
        )
    assert found[1] - found[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_a_cut_and_a_frozen_model_hold_their_share(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    whole = estimated(work_of(folder))
    cut = estimated(work_of(folder, layout=HybridLayout(TrainLayout(dp=8, fsdp=8))))
    assert cut.rest == pytest.approx(whole.rest / 8, rel=0.01)
    assert cut.at_peak["gathers"] > 4 * 151936 * 896 * 0.9  # the embedding is whole for a pass
    frozen = estimated(work_of(folder, optimizer=None, loss=None))
    assert frozen.at_peak["gradients"] == frozen.at_peak["optimizer"] == 0
    assert frozen.rest <= whole.at_rest["weights"]


@pytest.mark.slow
def test_recomputation_and_shorter_passes_take_less(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=10)

    def activations(**model: Any) -> int:
        found: RankMemory = estimated(
            work_of(folder, row_tokens=512, model={"micro_batch_tokens": 4096} | model)
        )
        return found.at_peak["activations"]

    kept = activations(recompute="none")
    # A layer that is computed again, with the temporaries of its backward pass, is there whole.
    assert activations(recompute="full") < kept / 2
    assert activations(recompute="none", micro_batch_tokens=1024) < kept / 3


@pytest.mark.slow
def test_offloaded_moments_leave_the_device(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    held = estimated(work_of(folder))
    moved = estimated(work_of(folder, optimizer=OptimizerSpec(offload=True)))
    assert moved.at_rest["optimizer"] == 0
    assert held.rest - moved.rest == held.at_rest["optimizer"]
    assert moved.peak < held.peak


def test_a_tally_forgets_what_has_ended() -> None:
    with Tally() as tally:
        with tally.purpose("weights"):
            weight = torch.zeros(1024)
        for _ in range(3):
            _ = weight * 2
            del _
        assert tally.held["weights"] == tally.total == 4096
        assert tally.peak == 8192
        weight.untyped_storage().resize_(0)
        assert tally.total == 0
        weight.untyped_storage().resize_(8192)
        assert tally.held["weights"] == 8192
