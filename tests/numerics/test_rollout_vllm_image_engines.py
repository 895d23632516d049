"""Images in prompts of engines of vLLM that are made in other ways; each test has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.image_prompts import (
    LARGE_HEADS,
    differences,
    pictures_of_rows,
    request,
    text_weights,
    whole_model,
)
from support.rank_processes import RankContext, run_ranks
from support.rollout_checks import set_stop_tokens, tokens_by_row
from support.sampler_shards import rank_shard, shard_tensors
from support.slow_cases import mostly_slow
from support.tiny_images import write_tiny_image_model

from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.layout.adapters import factor_name
from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import AdapterSpec, SamplingSpec, VllmSpec

LOGPROB = 3e-6
"""Largest difference of a log-prob near -6, float32: some of its 5e-7 steps. Measured 7e-7."""
FAR = 0.02
"""Mean difference where an adapter is left out. Measured 1.6."""
LOAD_TIMEOUT_S = 400.0
"""For two loads of vLLM at once on a machine that does other work."""
SPEC = VllmSpec(dtype="float32", max_model_len=128, max_num_seqs=16)
SAMPLING = SamplingSpec(max_new_tokens=12)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)


def write_folder(directory: Path, **text: Any) -> Path:
    path = write_tiny_image_model(directory, **LARGE_HEADS, **text)
    set_stop_tokens(path, range(300, 330))
    return path


def requests_of(folder: Path) -> list[RolloutRequest]:
    processor = ImageProcessor(folder)
    return [request(processor, row, shown) for row, shown in pictures_of_rows().items()]


@contextmanager
def engine(folder: Path, **arguments: Any) -> Iterator[VllmBackend]:
    backend = make_backend(arguments.pop("spec", SPEC), folder, **arguments)
    assert isinstance(backend, VllmBackend)
    try:
        yield backend
    finally:
        backend.close()


def largest_difference(backend: VllmBackend, model: Any, folder: Path) -> float:
    requests = requests_of(folder)
    found = list(backend.generate(requests, SAMPLING))
    assert len(found) == len(requests)
    processor = ImageProcessor(folder)
    return float(differences(model, processor, requests, pictures_of_rows(), found).max())


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_PARTS)
def test_a_folder_whose_embedding_is_tied_begins_with_its_own_weights(
    tmp_path: Path, family: str
) -> None:
    folder = write_folder(tmp_path / "tied", family=family, tie_word_embeddings=True)
    model = whole_model(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with engine(folder, folder_version=7) as backend:
        assert backend.policy_version == 7
        assert largest_difference(backend, model, folder) < LOGPROB
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        backend.update_weights(text_weights(model), 8)
        assert largest_difference(backend, model, folder) < LOGPROB


def test_rounded_weights_meet_features_that_are_not_rounded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    model = whole_model(folder)
    with engine(folder, spec=SPEC.model_copy(update={"dtype": "bfloat16"})) as backend:
        backend.update_weights(text_weights(model), 1)
        with torch.no_grad():
            for _, weight in text_weights(model):
                weight.copy_(weight.bfloat16())
        assert largest_difference(backend, model, folder) < LOGPROB


@pytest.mark.slow
def test_a_folder_with_the_names_of_newer_files_is_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "newer")
    model = whole_model(folder)
    file = folder / "model.safetensors"
    older = load_file(file)
    newer = {newer_name(name): weight.clone() for name, weight in older.items()}
    assert "model.norm.weight" in older
    assert "model.language_model.norm.weight" in newer
    save_file(newer, file, metadata={"format": "pt"})
    with engine(folder, folder_version=0) as backend:
        assert largest_difference(backend, model, folder) < LOGPROB


def newer_name(name: str) -> str:
    """That of a class of transformers since 4.52, of one that the hub's files have."""
    outer, _, rest = name.partition(".")
    prefix = {"model": "model.language_model", "visual": "model.visual"}.get(outer, outer)
    return f"{prefix}.{rest}"


@pytest.mark.parametrize(
    ("way", "family"),
    # Each way, and each family, once.
    mostly_slow((0, 3), [(way, family) for way in ("merged", "slots") for family in TEXT_PARTS]),
)
def test_an_adapter_of_the_text_is_served(tmp_path: Path, family: str, way: str) -> None:
    folder = write_folder(tmp_path / "base", family=family)
    adapter = AdapterSpec(rank=4, alpha=8.0, targets=("self_attn.v_proj", "gate_proj"))
    model = whole_model(folder)
    generator = torch.Generator().manual_seed(1)
    factors: dict[str, torch.Tensor] = {}
    for layer in range(model.config.text_config.num_hidden_layers):
        for own in ("self_attn.v_proj", "mlp.gate_proj"):
            weight = model.get_parameter(f"model.language_model.layers.{layer}.{own}.weight")
            a = 0.1 * torch.randn(4, weight.shape[1], generator=generator)
            b = 0.5 * torch.randn(weight.shape[0], 4, generator=generator)
            name = f"model.layers.{layer}.{own}"
            factors |= {factor_name(name, "A"): a, factor_name(name, "B"): b}
            with torch.no_grad():
                weight += 2.0 * b @ a
    base = whole_model(folder)
    with engine(folder, adapter=adapter, spec=SPEC.model_copy(update={"adapters": way})) as backend:
        for version in (1, 2):
            backend.update_weights(factors.items(), version)
            assert largest_difference(backend, model, folder) < LOGPROB
        assert largest_difference(backend, base, folder) > FAR


def sampled_by_a_slice(at: RankContext, folder: Path, layout: HybridLayout) -> Any:
    """What a rank gives with its own parts, and then with whole weights."""
    weights = {name: weight.detach() for name, weight in text_weights(whole_model(folder))}
    with at.connect(layout) as mesh:
        backend = VllmBackend(SPEC, folder, mesh)
        backend.update_shard(shard_tensors(rank_shard(folder, layout, mesh.rank), weights), 1)
        found = [list(backend.generate(requests_of(folder), SAMPLING))]
        backend.update_weights(weights.items(), 2)
        found.append(list(backend.generate(requests_of(folder), SAMPLING)))
        backend.close()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_PARTS)
def test_two_slices_show_the_images_alike(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path / "model", family=family)
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    first, second = run_ranks(sampled_by_a_slice, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    model, processor = whole_model(folder), ImageProcessor(folder)
    for own, others in zip(first, second, strict=True):
        assert tokens_by_row(own) == tokens_by_row(others)
        found = differences(model, processor, requests_of(folder), pictures_of_rows(), own)
        assert float(found.max()) < LOGPROB
