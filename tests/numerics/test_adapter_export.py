"""What a checkpoint of an adapter is exported as: PEFT's folder, or merged into its base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.adapters import ALPHA, RANK, write_adapter
from support.parallel_training import Job, near_policy
from support.rank_processes import RankPool
from support.sharded_checkpoints import export, save
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from transformers import AutoModelForCausalLM

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train import state as trainer_state
from rolemesh.engine.train.export import export_policy, main
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints.checkpoint import CheckpointMismatchError, open_checkpoint

EIGHT = TrainLayout(tp=2, pp=2, dp=2, fsdp=2)
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4, num_layers=3)


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"), base)
    section = {"rank": RANK, "alpha": ALPHA, "from": folder}
    job = Job(base, token_batch(), PpoPolicyLossSpec(), model={"adapter": section})
    logprobs = trainer_of(job).compute_logprobs(job.batch, temperature=1.0)["logprobs"]
    return replace(job, batch=near_policy(job.batch, logprobs))


def trainer_of(job: Job) -> Trainer:
    spec = {"path": job.folder, "compute_dtype": "float32", **job.model}
    return Trainer.policy(ModelSpec.model_validate(spec), OptimizerSpec())


@pytest.fixture(scope="module")
def checkpoint(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one rank, untrained: its factors are those of the folder."""
    return saved(job, tmp_path_factory.mktemp("saved") / "checkpoint")


def saved(job: Job, directory: Path) -> Path:
    trainer_of(job).save(directory)
    return directory


def merged_by_peft(base: Path, adapter: Path) -> Any:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(lm, adapter).merge_and_unload().eval()


@pytest.mark.parametrize(
    "config", [{}, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}]
)
def test_a_merged_model_is_that_of_peft_and_is_cast_once(
    base: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, **config)
    section: dict[str, Any] = {"rank": RANK, "alpha": ALPHA, "from": adapter}
    if config:
        section |= {"targets": config["target_modules"], "scaling": "rslora"}
    job = Job(base, token_batch(), PpoPolicyLossSpec(), model={"adapter": section})
    checkpoint = saved(job, tmp_path / "checkpoint")
    told = export_policy(checkpoint, base, tmp_path / "float32", "float32", merges=True)
    assert told == "policy_version 0, float32"
    assert export_policy(checkpoint, base, tmp_path / "model", merges=True).endswith("bfloat16")
    theirs = merged_by_peft(base, adapter)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.float32)
    stored = load_file(tmp_path / "float32" / "model.safetensors")
    narrow = load_file(tmp_path / "model" / "model.safetensors")
    expected = dict(theirs.named_parameters())
    assert stored.keys() == narrow.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(stored[name], weight), name
        assert torch.equal(narrow[name], weight.bfloat16()), name
    tokens_BT = torch.tensor([list(range(3, 20))])
    with torch.no_grad():
        logits_BTV = ours(input_ids=tokens_BT).logits
        torch.testing.assert_close(
            logits_BTV, theirs(input_ids=tokens_BT).logits, rtol=0, atol=1e-5
        )
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert (logits_BTV - plain(input_ids=tokens_BT).logits).abs().max() > 1e-3


def test_a_checkpoint_of_eight_ranks_is_exported_as_by_them_and_merged_as_by_peft(
    rank_pool: RankPool, job: Job, base: Path, tmp_path: Path
) -> None:
    many = replace(job, layout=EIGHT)
    rank_pool.run(save, 8, many, tmp_path / "checkpoint")
    # The same weights, saved by one rank.
    trainer = trainer_of(job)
    trainer.load(tmp_path / "checkpoint")
    trainer.save(tmp_path / "one")
    rank_pool.run(export, 8, many, tmp_path / "checkpoint", tmp_path / "theirs", None, 5000)
    for name in ("checkpoint", "one"):
        for merges in (False, True):
            export_policy(tmp_path / name, base, tmp_path / f"{name}-{merges}", merges=merges)
    for file in (FILE, "adapter_config.json"):
        found = (tmp_path / "checkpoint-False" / file).read_bytes()
        assert found == (tmp_path / "one-False" / file).read_bytes()
        assert found == (tmp_path / "theirs" / file).read_bytes()
    whole = (tmp_path / "checkpoint-True" / "model.safetensors").read_bytes()
    assert whole == (tmp_path / "one-True" / "model.safetensors").read_bytes()
    expected = merged_by_peft(base, tmp_path / "theirs")
    for name, weight in load_file(tmp_path / "one-True" / "model.safetensors").items():
        assert torch.equal(weight, expected.get_parameter(name).bfloat16()), name


def test_a_checkpoint_says_its_adapter_or_its_factors_tell(
    job: Job, base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_checkpoint(checkpoint).state["adapter"]
    assert (spec["rank"], spec["alpha"], "from" in spec) == (RANK, ALPHA, False)
    values = trainer_state.TrainerState.values
    monkeypatch.setattr(
        trainer_state.TrainerState,
        "values",
        lambda self: {key: one for key, one in values(self).items() if key != "adapter"},
    )
    older = saved(job, tmp_path / "older")
    assert "adapter" not in open_checkpoint(older).state
    for directory in (checkpoint, older):
        export_policy(directory, base, tmp_path / f"{directory.name}-adapter")
        export_policy(directory, base, tmp_path / f"{directory.name}-model", merges=True)
    for file in ("adapter/adapter_config.json", f"adapter/{FILE}", "model/model.safetensors"):
        found = (tmp_path / f"older-{file}").read_bytes()
        assert found == (tmp_path / f"checkpoint-{file}").read_bytes()


def test_an_adapters_folder_names_its_base_as_it_is_told(
    base: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--checkpoint", str(checkpoint), "--model", str(base)]
    assert main([*given, "--out", str(tmp_path / "here")]) == 0
    assert "policy_version 0, adapter in float32" in capsys.readouterr().out
    named = [*given, "--out", str(tmp_path / "hub"), "--base-name", "me/tiny"]
    assert main([*named, "--base-revision", "abc"]) == 0
    configs = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("here", "hub")
    ]
    assert configs[0]["base_model_name_or_path"] == str(base)
    assert configs[1] == configs[0] | {"base_model_name_or_path": "me/tiny", "revision": "abc"}
    lm = AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(lm, tmp_path / "hub")


def test_what_does_not_belong_together_is_refused(
    job: Job, base: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=5, num_layers=3)
    for merges in (False, True):
        with pytest.raises(CheckpointMismatchError) as caught:
            export_policy(checkpoint, other, tmp_path / "out", merges=merges)
        assert f"was trained on the base {str(base)!r}" in str(caught.value)
        assert f"not on {str(other)!r}" in str(caught.value)
    with pytest.raises(ValueError, match="has float32: leave it out, or give --merge"):
        export_policy(checkpoint, base, tmp_path / "out", "bfloat16")
    plain = saved(replace(job, model={}), tmp_path / "plain")
    given = ["--checkpoint", str(plain), "--model", str(base), "--out", str(tmp_path / "out")]
    assert main([*given, "--merge"]) == 1
    assert "is of a whole model, not of an adapter: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
