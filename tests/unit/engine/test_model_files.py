"""Folders that no model can be loaded from are refused by their files, before and at a load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_classifier, write_tiny_llama

from rolemesh.coordinator.run.checks.model_folders import ModelFolder
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.layout.families import UnsupportedFamilyError
from rolemesh.engine.model_folders.model_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    ModelFolderError,
    check_sampled,
)
from rolemesh.engine.model_folders.model_files import check_model_files as check
from rolemesh.engine.model_folders.pretrained import NoTokenizerError, load_config, load_tokenizer
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.rollout.model_folder import read_model_folder
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import ModelSpec, ReasoningGymSpec, VllmSpec
from rolemesh.engine.specs.roles import ModelFolderSpec
from rolemesh.services.runtime.servicers.rollout import PromptSource

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same in two files and an index."""
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    files = {
        name: SECOND if "layers.1" in name else "model-00001-of-00002.safetensors"
        for name in tensors
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    put(folder / INDEX_FILE, {"metadata": {}, "weight_map": files})
    return folder


def put(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def change(file: Path, **values: Any) -> None:
    put(file, {**json.loads(file.read_text()), **values})


def cut(file: Path, num_bytes: int) -> None:
    """What a download that broke leaves."""
    with file.open("r+b") as stream:
        stream.truncate(num_bytes)


def header(length: int, text: bytes) -> bytes:
    return length.to_bytes(8, "little") + text


def refused(folder: Path, text: str) -> None:
    """One error, by a look at the files and by a load of the model."""
    with pytest.raises(ModelFolderError) as looked:
        check(folder)
    assert re.search(text, str(looked.value))
    with pytest.raises(ModelFolderError) as loaded:
        CausalLm(ModelSpec(path=folder))
    assert str(loaded.value) == str(looked.value)
    assert str(looked.value).startswith(f"model.path {str(folder)!r}")


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 600, 5000, -1])
def test_a_file_that_is_not_whole_is_named_with_its_bytes(folder: Path, num_bytes: int) -> None:
    file = folder / WEIGHTS_FILE
    whole = file.stat().st_size
    cut(file, num_bytes % whole if num_bytes else 0)
    has = file.stat().st_size
    asks = r"header alone asks for \d+" if has < 5000 else f"header asks for {whole}"
    refused(folder, rf"{WEIGHTS_FILE} has {has} bytes, but its {asks}: it is not whole; fetch it a")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS leaves .*: run `git lfs pull`"),
        (b"<!DOCTYPE html><html>", "no safetensors file: it begins with 5789751444030890300 as"),
        (header(4, b"text"), r"its header cannot be read \(JSONDecodeError"),
        (header(2, b"[]"), r"its header cannot be read \(AttributeError"),
        (header(9, b'{"a": {}}'), r"its header cannot be read \(KeyError: 'shape'"),
        (header(2, b"{}more"), "has 14 bytes, but its header asks for 10: it is damaged"),
    ],
    ids=["pointer", "page", "no JSON", "no object", "no tensor", "more"],
)
def test_a_file_that_is_no_safetensors_file_is_named(
    folder: Path, content: bytes, text: str
) -> None:
    (folder / WEIGHTS_FILE).write_bytes(content)
    refused(folder, rf": {WEIGHTS_FILE} .*{text}")


def test_tensors_that_overlap_are_refused(folder: Path) -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"a": tensor, "b": {**tensor, "data_offsets": [2, 6]}}).encode()
    (folder / WEIGHTS_FILE).write_bytes(header(len(text), text + bytes(6)))
    refused(folder, "a tensor lies at bytes 2 to 6, the one before to 4")


def test_shards_are_looked_at_one_by_one(sharded: Path) -> None:
    check(sharded)
    CausalLm(ModelSpec(path=sharded))
    file = sharded / SECOND
    whole = file.stat().st_size
    cut(file, whole - 1)
    refused(sharded, f"{SECOND} has {whole - 1} bytes, but its header asks for {whole}: it is not")
    file.unlink()
    refused(sharded, rf"lacks '{SECOND}' \(1 of 2 shards")


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map that names a file for each tensor"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "which is no file of the folder"),
    ],
)
def test_an_index_that_names_no_files_is_refused(sharded: Path, index: str, text: str) -> None:
    (sharded / INDEX_FILE).write_text(index)
    refused(sharded, f"{INDEX_FILE} .*{text}")


def test_an_index_that_names_a_tensor_where_it_is_not_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    change(sharded / INDEX_FILE, weight_map={**index, "model.norm.weight": SECOND})
    refused(sharded, r"lacks the weights \['model\.norm\.weight'\]")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{"model_type": ', "config.json is not JSON"),
        ("[]", "config.json holds no JSON object"),
        ('{"hidden_size": 64}', "config.json names no model_type"),
        ('{"model_type": 3}', "config.json names no model_type"),
    ],
)
def test_a_config_that_is_none_is_refused(folder: Path, config: str, text: str) -> None:
    (folder / "config.json").write_text(config)
    refused(folder, text)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parameters_that_a_family_needs_are_looked_for(tmp_path: Path, family: str) -> None:
    folder = write_tiny_decoder(tmp_path, family)
    check(folder, head="lm_head")
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS_FILE)
    refused(folder, r"lacks the weights \['model\.layers\.1\.mlp\.up_proj\.weight'\] \(1 in all\)")
    check(folder, num_layers=1)


def test_a_head_that_a_role_needs_is_looked_for(tmp_path: Path) -> None:
    judge = write_tiny_classifier(tmp_path / "judge")
    check(judge, head="score", has_tokenizer=True)
    with pytest.raises(ModelFolderError, match=r"lacks the weights \['lm_head\.weight'\] .*projec"):
        check(judge, head="lm_head")
    with pytest.raises(ModelFolderError, match=r"lacks the weights \['score\.weight'\] .*Sequence"):
        check(write_tiny_llama(tmp_path / "policy"), head="score")


def test_sizes_that_cannot_be_are_refused(folder: Path) -> None:
    change(folder / "config.json", num_key_value_heads=3)
    refused(folder, "cannot be right: num_key_value_heads 3 does not divide")
    change(folder / "config.json", num_key_value_heads=2, hidden_size="wide")
    refused(folder, "cannot be right: hidden_size is 'wide'")
    change(folder / "config.json", hidden_size=128)
    refused(folder, r"holds 'model\.embed_tokens\.weight' with shape \[512, 64\]")


LOADERS: dict[str, Callable[[Path], Any]] = {
    "config": load_config,
    "trainer": lambda folder: CausalLm(ModelSpec(path=folder)),
    "sampler": lambda folder: read_model_folder(folder, 64),
}


@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_a_family_that_transformers_does_not_know_is_named(folder: Path, loader: str) -> None:
    change(folder / "config.json", model_type="gemma99")
    with pytest.raises(
        ModelFolderError, match="has the model_type 'gemma99', which transformers 5"
    ):
        LOADERS[loader](folder)


def test_what_transformers_says_of_a_config_is_told_whole(folder: Path) -> None:
    change(folder / "config.json", hidden_act=3)
    with pytest.raises(
        ModelFolderError, match=r"none of a llama model .*: correct it, or fetch it"
    ):
        load_config(folder)
    with pytest.raises(ModelFolderError, match="expected str, got int"):
        load_config(folder)


def test_a_family_without_such_a_model_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    put(folder / "config.json", {"model_type": "vit", "num_hidden_layers": 2})
    with pytest.raises(
        ModelFolderError, match=r"cannot be loaded by AutoModelForCausalLM .*Unrecog"
    ):
        CausalLm(ModelSpec(path=folder))


def test_who_samples_needs_a_tokenizer_and_who_trains_the_weights_too(folder: Path) -> None:
    data = ReasoningGymSpec(task="chain_sum", train_size=4, held_out_size=2)
    (folder / WEIGHTS_FILE).unlink()
    PromptSource(ModelFolderSpec(path=folder), data, 0)
    with pytest.raises(ModelFolderError, match=r"has neither model\.safetensors nor"):
        PromptSource(ModelSpec(path=folder), data, 0)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"has no tokenizer\.json"):
        PromptSource(ModelFolderSpec(path=folder), data, 0)


@pytest.mark.parametrize("load", [load_tokenizer, load_light_tokenizer])
def test_a_tokenizer_that_is_missing_or_none_is_told_of_whole(
    folder: Path, load: Callable[[Path], Any]
) -> None:
    check(folder, has_tokenizer=True)
    for content in ('{"a": 1}', '{"version": "1.0", "added_tokens": [], "model": 3}', "{"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(NoTokenizerError, match="has no tokenizer that can be read"):
            load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NoTokenizerError, match=r"one of: \(1\) a `tokenizers` library .*\(3\) an"):
        load(folder)
    with pytest.raises(ModelFolderError, match=r"has no tokenizer\.json"):
        check(folder, has_tokenizer=True)


def test_a_family_that_vllm_cannot_be_given_weights_of_is_refused_at_the_start(
    folder: Path,
) -> None:
    """Before vLLM is imported, and before the actor loads its policy."""
    config = json.loads((folder / "config.json").read_text())
    put(folder / "config.json", {**config, "model_type": "gpt_oss"})
    told = (
        r"has the model_type 'gpt_oss', and rollout\.type is 'vllm': vLLM 0\.32 computes NaN "
        r".*; take a model of another family"
    )
    checked = ModelFolder(field="actor.model.path", path=folder, has_weights=False, sampler="vllm")
    with pytest.raises(ModelFolderError, match=r"^actor\.model\.path '.*' " + told):
        checked.check()
    with pytest.raises(ModelFolderError, match=told):
        VllmBackend(VllmSpec(max_model_len=48), folder)
    check_sampled(folder, "hf")


def test_a_setting_that_vllms_model_lacks_is_refused_before_vllm_is_imported(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    put(folder / "config.json", {**config, "model_type": "qwen3", "attention_bias": True})
    with pytest.raises(UnsupportedFamilyError, match=r"vLLM's has no o_proj\.bias: sample with"):
        VllmBackend(VllmSpec(max_model_len=48), folder)
