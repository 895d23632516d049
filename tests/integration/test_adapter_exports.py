"""`rolemesh export` of a run that trains an adapter: PEFT's folder, a merged model, the hub."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import peft
import pytest
import torch
from safetensors.torch import load_file
from support import warm_processes
from support.hf_hub import TOKEN, client_environment, serving_hub
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from transformers import AutoModelForCausalLM

from rolemesh.coordinator.run.checks.footprint import gib

RUN_S = 240


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose actor trains an adapter, and serves its base as the reference."""
    folder = tmp_path_factory.mktemp("work")
    model = tiny_model(folder / "base")
    recipe = tiny_recipe(model, run__evaluation__num_prompts=0)
    recipe["actor"]["model"]["adapter"] = {"rank": 4, "alpha": 8, "scaling": "rslora"}
    recipe["reference"] = {}
    del recipe["services"]["reference"]
    with contextlib.closing(CliRun(recipe, folder)) as made:
        assert made.wait(RUN_S) == 0, made.output
        # What it says of the disk is of the adapter and the critic, not of the actor's model.
        size = sum(one.numel() for one in load_file(model / "model.safetensors").values())
        factors = load_file(made.out / "model" / "adapter_model.safetensors").values()
        trained = sum(one.numel() for one in factors)
        assert f"{gib(12 * (size + trained))} of checkpoints" in made.output
        assert f"a model of {gib(4 * trained)}" in made.output
        return made.out


def export(run: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rolemesh", "export", str(run), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **warm_processes.everything(), **variables},
        timeout=RUN_S,
    )


def test_the_last_checkpoint_becomes_the_runs_adapter_or_a_whole_model(
    run: Path, tmp_path: Path
) -> None:
    ended = export(run, "--to", str(tmp_path / "adapter"))
    assert ended.returncode == 0, ended.stderr
    for file in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        assert (tmp_path / "adapter" / file).read_bytes() == (run / "model" / file).read_bytes()
    ended = export(run, "--merge", "--to", str(tmp_path / "whole"), "--dtype", "float32")
    assert ended.returncode == 0, ended.stderr
    base = json.loads((run / "model" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in lm.named_parameters()}
    theirs = peft.PeftModel.from_pretrained(lm, run / "model").merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, expected[name]), name
    assert any(not torch.equal(weight, expected[name]) for name, weight in before.items())


def test_the_merged_model_becomes_a_gguf_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    ended = export(run, "--merge", "--gguf", "f32", "--to", str(file))
    assert ended.returncode == 0, ended.stderr
    assert f"{file}: policy_version " in ended.stdout
    ended = export(run, "--merge", "--to", str(tmp_path / "whole"), "--dtype", "float32")
    assert ended.returncode == 0, ended.stderr
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    stored = {one.name: one.data for one in gguf.GGUFReader(file).tensors}
    assert len(stored) == len(weights)
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
    ):
        assert (stored[theirs] == weights[ours].numpy()).all()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--gguf", "q4_0"), "--gguf is 'q4_0': give one of f32, f16, bf16, q8_0"),
        (("--gguf", "f32"), "trains an adapter: give --merge, which adds it to its base"),
        (("--gguf", "f16", "--merge", "--dtype", "float32"), "which says the type: leave --dtype"),
        (("--gguf", "f16", "--merge", "--push", "me/it"), "sends a Hugging Face folder: write the"),
    ],
)
def test_what_does_not_go_with_a_gguf_file_is_refused(
    run: Path, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    ended = export(run, "--to", str(tmp_path / "model.gguf"), *flags)
    assert ended.returncode == 2
    assert why in ended.stderr
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_sent_to_the_hub_without_a_path_of_this_machine(
    run: Path, tmp_path: Path
) -> None:
    with serving_hub() as hub:
        variables = {**client_environment(hub, tmp_path / "home"), "HF_TOKEN": TOKEN}
        ended = export(run, "--push", "me/adapter", **variables)
        assert ended.returncode == 0, ended.stderr
        sent = hub.repos["models", "me/adapter"]
        files = sent.commits[sent.branches["main"]]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(files)
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "base"
    assert b"library_name: peft" in files["README.md"]
    assert not any(str(run.parent).encode() in content for content in files.values())


def test_a_run_of_a_whole_model_has_nothing_to_merge(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "step-00000002").symlink_to(run / "checkpoints" / "step-00000002")
    config = (run / "config.yaml").read_text()
    section = config[config.index("    adapter:\n") : config.index("    num_layers:")]
    (other / "config.yaml").write_text(config.replace(section, "    adapter: null\n"))
    ended = export(other, "--merge", "--to", str(tmp_path / "whole"))
    assert ended.returncode == 2
    assert "trains a whole model, without actor.model.adapter: leave it out" in ended.stderr
