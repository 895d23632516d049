"""Every family that vLLM knows: what it samples after updates, with exports, and in two slices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, IN_VLLM, case_config
from support.family_jobs import LOSS, REQUESTS, VOCABULARY, family_job
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import load_trainer_model, logprob_differences, set_stop_tokens
from support.sampler_shards import PADDING, folder_weights, rank_shard, shard_tensors
from support.tiny_families import write_tiny_decoder
from support.updates import update_whole

from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SamplingSpec, VllmSpec
from rolemesh.engine.train.trainer import Trainer

VLLM_TOLERANCE = 1e-6
"""Mean abs difference of a token: float32 through three narrow layers, in two programs. Measured:
5.1e-7 at most (gemma3_text)."""
SLICES_TOLERANCE = 1e-6
"""The same with sums over two slices. Measured: 1.7e-7 to 4.9e-7."""
LEAST_MOVE = 1e-4
"""The same between the weights before and after an update: an update that was lost would show."""
LOAD_TIMEOUT_S = 300.0

SAMPLED = {"vocab_size": VOCABULARY, "head_dim": 32, "hidden_size": 128, "intermediate_size": 96}
"""Sizes that vLLM's kernels for a CPU take."""
NOT_IN_VLLM = {"qwen3": {"use_sliding_window": False, "layer_types": None}}
"""What it refuses by itself of a case: windows on some layers alone."""
FAST = ("ministral3", "phi3")
"""Those with which `make test` starts vLLM: a field that it lacks, and fused files."""


@dataclass
class Sampled:
    """What vLLM did with the weights of a trainer, before and after a step."""

    differences: list[float]
    moved: float
    """Between what was sampled after the step and the weights before it."""
    parameters: dict[str, tuple[int, ...]]
    """VLLM's own, by its names."""
    placed_is_equal: bool
    """Whether parts in vLLM's own shapes and names make of it what whole weights made."""
    padding: float
    """The largest number in the rows by which vLLM fills up its vocabulary."""
    export_is_equal: bool
    """Whether vLLM holds of the export what it held after the step; true where it was not asked."""


def sample_updates(at: RankContext, folder: Path, export: Path | None) -> Sampled:
    """Trains a step in the process of a sampler, and compares what is sampled."""
    from rolemesh.engine.rollout.vllm.weights.shards import weight_places

    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32"),
        OptimizerSpec(learning_rate=1e-3, max_grad_norm=100.0),
    )
    spec = VllmSpec(dtype="float32", max_model_len=48, max_num_seqs=8)
    backend = VllmBackend(spec, folder)
    try:
        differences = []
        moved = 0.0
        model = load_trainer_model(folder)
        for number in range(2):
            backend.update_weights(trainer.named_weights(), trainer.policy_version)
            sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
            if number:
                moved = float(logprob_differences(model, REQUESTS, sampled).mean())
                state = {key: one.clone() for key, one in trainer.named_weights()}
                assert not model.load_state_dict(state, strict=False).unexpected_keys
                model.tie_weights()
            differences.append(float(logprob_differences(model, REQUESTS, sampled).mean()))
            if not number:
                job = family_job(folder)
                update_whole(trainer, job.batch, LOSS, epochs=1, mini_batch_rows=8, seed=5)
        (places,) = backend.engine.apply_model(
            lambda model: {
                name: place.shape for name, place in weight_places(model, torch.float32).items()
            }
        )
        checksums = dict(backend.weight_checksums())
        weights = {key: one.clone() for key, one in trainer.named_weights()}
        backend.engine.apply_model(lambda model: padding_of(model).fill_(PADDING))
        backend.update_weights(((key, torch.zeros_like(one)) for key, one in weights.items()), 2)
        paddings = backend.engine.apply_model(largest_padding)
        backend.update_shard(shard_tensors(rank_shard(folder), weights), 3)
        placed_is_equal = dict(backend.weight_checksums()) == checksums
        paddings += backend.engine.apply_model(largest_padding)
    finally:
        backend.close()
    is_equal = True
    if export is not None:
        trainer.export(export, "float32")
        backend = VllmBackend(spec, export, folder_version=1)
        try:
            is_equal = dict(backend.weight_checksums()) == checksums
        finally:
            backend.close()
    return Sampled(differences, moved, places, placed_is_equal, max(paddings), is_equal)


def largest_padding(model: Any) -> float:
    """What stands in the embedding's padded rows."""
    return float(padding_of(model).abs().max())


def padding_of(model: Any) -> torch.Tensor:
    """The embedding's padded rows."""
    (weight,) = (one for name, one in model.named_parameters() if "embed_tokens.weight" in name)
    rows: torch.Tensor = weight.detach()[VOCABULARY:]
    return rows


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    # Not the session's: a process that has imported vLLM is two gigabytes larger.
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        # An engine more takes seconds: `make test` loads that export whose config vLLM completes.
        *((name, name == "ministral3") for name in FAST),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in IN_VLLM
            if name != "ministral3"
        ),
    ],
)
def test_vllm_computes_with_each_update_and_loads_the_export(
    process: RankPool, tmp_path: Path, name: str, loads: bool
) -> None:
    folder, export = _write_sampled(tmp_path / "model", name), tmp_path / "export"
    (found,) = process.run(
        sample_updates, 1, folder, export if loads else None, timeout_s=LOAD_TIMEOUT_S
    )
    assert max(found.differences) < VLLM_TOLERANCE
    assert found.moved > LEAST_MOVE
    assert found.export_is_equal
    # Its names and shapes are those to which ranks send their parts.
    shape = DecoderShape.from_config(json.loads((folder / "config.json").read_text()))
    one = generate_layout(shape, HybridLayout(TrainLayout(), GenerateLayout()), "float32")
    assert found.parameters == dict(one.ranks[0].shapes)
    assert found.placed_is_equal
    assert found.padding == 0.0 != PADDING


def sample_in_slices(at: RankContext, folder: Path) -> list[float]:
    """Differences of what two slices sample: with whole weights, and with parts of them."""
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    with at.connect(layout, timeout_s=LOAD_TIMEOUT_S) as mesh:
        spec = VllmSpec(dtype="float32", max_model_len=48, max_num_seqs=8)
        backend = VllmBackend(spec, folder, mesh)
        try:
            weights, model = folder_weights(folder), load_trainer_model(folder)
            differences = []

            def compare() -> dict[str, str]:
                sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
                differences.append(float(logprob_differences(model, REQUESTS, sampled).mean()))
                return dict(backend.weight_checksums())

            backend.update_weights(weights.items(), 1)
            loaded = compare()
            backend.update_weights(((key, torch.zeros_like(t)) for key, t in weights.items()), 2)
            shard = rank_shard(folder, layout, mesh.rank)
            backend.update_shard(shard_tensors(shard, weights), 3)
            assert compare() == loaded
            return differences
        finally:
            backend.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_VLLM)
def test_two_slices_of_vllm_sample_as_one_model(
    processes: RankPool, tmp_path: Path, name: str
) -> None:
    folder = _write_sampled(tmp_path, name)
    for found in processes.run(sample_in_slices, 2, folder, timeout_s=LOAD_TIMEOUT_S):
        assert max(found) < SLICES_TOLERANCE


def _write_sampled(directory: Path, name: str) -> Path:
    """The model of a case, with sizes and settings that vLLM takes."""
    config = {**case_config(name), **SAMPLED, **NOT_IN_VLLM.get(name, {})}
    if "moe_intermediate_size" in config:
        # No multiple of the 32 outputs that vLLM's kernel takes at a time: it pads them.
        config["moe_intermediate_size"] = 48 if name == "glm4_moe" else 64
    config["initializer_range"] = 0.05
    folder = write_tiny_decoder(directory, CASES[name][0], **config)
    set_stop_tokens(folder, (2, 3))
    return folder
