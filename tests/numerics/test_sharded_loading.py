"""Tests of what a rank loads: its stage and slice of the folder, bit by bit; and its refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.slices import slice_box
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from transformers import AutoModel

from rolemesh.engine.layout.boxes import train_layout
from rolemesh.engine.layout.families import stage_tensors
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.specs import ModelSpec


def mesh_without_processes(layout: TrainLayout, rank: int) -> RankMesh:
    """The mesh of one rank of many, for what needs no message: loading, a stage of one slice."""
    at = layout.coordinates(rank)
    groups = {
        name: next(members for members in groups if rank in members)
        for name, groups in (
            ("tp", layout.tp_groups()),
            ("pp", layout.pp_groups()),
            ("world", (tuple(range(layout.world_size)),)),
        )
    }
    assert at.tp == groups["tp"].index(rank)
    return dataclasses.replace(
        RankMesh.single(),
        layout=HybridLayout(layout),
        rank=rank,
        **{name: RankGroup(members, members.index(rank), None) for name, members in groups.items()},
    )


def _spec(path: Path, **options: object) -> ModelSpec:
    return ModelSpec.model_validate({"path": path, "compute_dtype": "float32", **options})


def _rows() -> PackedRows:
    rows = pack_rows(token_batch(vocab_size=100), "cpu")
    rows.tokens_1S[0, 1] = 0  # The pad token in a prompt: a token like any other.
    return rows


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("pp", "tp", "max_shard_size", "tied"),
    # One file or an index.
    [(1, 2, "5GB", True), (3, 1, "20KB", False), (2, 2, "20KB", True), (2, 2, "5GB", False)],
)
def test_every_rank_loads_its_boxes_of_the_folder_and_nothing_else(
    tmp_path: Path, pp: int, tp: int, max_shard_size: str, tied: bool
) -> None:
    folder = write_tiny_decoder(
        tmp_path,
        "qwen3",
        num_hidden_layers=5,
        tie_word_embeddings=tied,
        max_shard_size=max_shard_size,
    )
    assert (folder / "model.safetensors.index.json").is_file() == (max_shard_size == "20KB")
    stored = _stored(folder)
    layout = TrainLayout(pp=pp, tp=tp)
    for rank in range(layout.world_size):
        mesh = mesh_without_processes(layout, rank)
        model = CausalLm(_spec(folder), mesh=mesh)
        weights = dict(model.named_weights())
        assert model.shape is not None
        tensors = stage_tensors(model.shape, pp=mesh.pp.index, size=pp)
        assert list(weights) == [tensor for tensor, _ in tensors]
        for tensor, parameter in tensors:
            box = slice_box(model.shape, parameter, tp=mesh.tp.index, size=tp)
            expected = stored[parameter][tuple(slice(*ends) for ends in box)]
            assert torch.equal(weights[tensor], expected), (rank, tensor)
            assert weights[tensor].is_contiguous()
        # The planner of weight transfer sees the same tensors.
        assert train_layout(model.shape, layout).ranks[rank].shapes == {
            name: tuple(weight.shape) for name, weight in weights.items()
        }


def test_bfloat16_files_are_loaded_as_float32_in_memory_of_their_own(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path, "llama")
    stored = {name: tensor.bfloat16() for name, tensor in _stored(folder).items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = CausalLm(_spec(folder), mesh=mesh_without_processes(TrainLayout(pp=2), 1))
    (folder / "model.safetensors").write_bytes(b"")
    weights = dict(model.named_weights())
    norm = weights["model.norm.weight"]
    assert norm.dtype == torch.float32
    assert torch.equal(norm, stored["model.norm.weight"].float())
    for weight in weights.values():
        assert weight.untyped_storage().nbytes() == weight.nbytes


def test_a_folder_of_a_bare_backbone_is_read_under_its_shorter_names(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path / "lm", "llama")
    AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "bare")
    model = ScoringModel(
        _spec(tmp_path / "bare"), VALUE_HEAD, mesh=mesh_without_processes(TrainLayout(tp=2), 1)
    )
    layer = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(dict(model.named_weights())[layer], _stored(folder)[layer][24:])
    assert model.missing == {"score.weight", "score.bias"}


@pytest.mark.parametrize(
    ("family", "recompute", "tied"),
    [
        *(("llama", "none", False), ("mistral", "selective", True), ("qwen2", "full", False)),
        *(("qwen2", "none", True), ("qwen3", "full", True)),
    ],
)
def test_stages_one_after_the_other_are_the_whole_model_bit_by_bit(
    tmp_path: Path, family: str, recompute: str, tied: bool
) -> None:
    # Windows of 4 tokens on the first stage alone: stages must keep the layers' own kinds.
    kinds = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    }
    folder = write_tiny_decoder(
        tmp_path,
        family,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        **(kinds if family.startswith("qwen") else {}),
    )
    spec = _spec(folder, recompute=recompute)
    whole = CausalLm(spec)
    layout = TrainLayout(pp=2)
    first, last = (CausalLm(spec, mesh=mesh_without_processes(layout, rank)) for rank in (0, 1))
    rows = _rows()
    hidden = first.stage_forward(rows, None)
    assert hidden.dtype == torch.float32
    # What arrives over the wire is a leaf; its gradient travels back.
    arrived = hidden.detach().requires_grad_()
    scores = last.finish(
        last.stage_forward(rows, arrived), rows, temperature=0.7, with_entropy=True
    )
    logprobs, entropy = scores.logprobs_N, scores.entropy_N
    expected, expected_entropy = score(whole, rows, temperature=0.7, with_entropy=True)
    assert torch.equal(logprobs, expected)
    assert entropy is not None
    assert expected_entropy is not None
    assert torch.equal(entropy, expected_entropy)

    expected.square().sum().backward()
    logprobs.square().sum().backward()
    assert arrived.grad is not None
    hidden.backward(arrived.grad)
    wanted = {name: weight.grad for name, weight in whole.named_weights()}
    copies = [model.tied_weight() for model in (first, last)]
    assert copies == (["model.embed_tokens.weight", "lm_head.weight"] if tied else [None, None])
    for model in (first, last):
        for name, weight in model.named_weights():
            assert weight.grad is not None
            if name != model.tied_weight():
                assert torch.equal(weight.grad, wanted[name]), name
    if tied:
        ends = [dict(m.named_weights())[n].grad for m, n in zip((first, last), copies, strict=True)]
        embedding = wanted["model.embed_tokens.weight"]
        torch.testing.assert_close(ends[0] + ends[1], embedding, rtol=1e-6, atol=1e-6)


def test_a_stage_refuses_hidden_states_that_do_not_belong_to_it(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path, "llama")
    layout = TrainLayout(pp=2)
    models: list[Decoder] = [
        ScoringModel(_spec(folder), VALUE_HEAD, mesh=mesh_without_processes(layout, rank))
        for rank in (0, 1)
    ]
    rows = _rows()
    hidden = models[0].stage_forward(rows, None)
    with pytest.raises(ValueError, match=r"hidden_1SD is given on stage 0: give None"):
        models[0].stage_forward(rows, hidden)
    with pytest.raises(ValueError, match=r"hidden_1SD is None on stage 1.*what the stage before"):
        models[1].stage_forward(rows, None)
    assert isinstance(models[0], ScoringModel)
    with pytest.raises(ValueError, match=r"stage 0 of 2: only the last stage has a head"):
        models[0].finish(hidden, rows)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path, "llama")
    with pytest.raises(LayoutError, match=r"pp 3 is more than the model's 2 layers"):
        CausalLm(_spec(folder), mesh=mesh_without_processes(TrainLayout(pp=3), 1))
    with pytest.raises(LayoutError, match=r"pp 2 is more than the model's 1 layers"):
        CausalLm(_spec(folder, num_layers=1), mesh=mesh_without_processes(TrainLayout(pp=2), 1))


def test_a_missing_weight_is_refused_by_every_rank(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path, "llama")
    stored = _stored(folder)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    layout = TrainLayout(pp=2)
    for rank in range(2):
        with pytest.raises(
            ModelFolderError, match=r"lacks the weights \['model\.layers\.1\.mlp\.up"
        ):
            CausalLm(_spec(folder), mesh=mesh_without_processes(layout, rank))


def test_a_weight_of_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(
        ModelFolderError, match=r"gate_proj\.weight' with shape \[48, 32\].*says \[64, 32\]"
    ):
        CausalLm(_spec(folder), mesh=mesh_without_processes(TrainLayout(tp=2), 0))
