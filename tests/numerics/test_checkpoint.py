"""Checkpoints and exported folders: whole or absent, and the same bits after a resume."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.audit import CODE, UNPICKLING, recording
from support.hostile_folders import plant
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rolemesh.engine.experience import Experience
from rolemesh.engine.models.scoring_model import ScoringModel
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints import checkpoint as checkpoint_files
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing
from rolemesh.engine.weights.checkpoints.checkpoint import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    digest_of,
    open_checkpoint,
)
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_folder
from rolemesh.engine.weights.checkpoints.writing import write_checkpoint
from rolemesh.engine.weights.sharded_tensors import ShardedTensors


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=6, tied=request.param)


OPTIMIZER = OptimizerSpec(learning_rate=1e-3, warmup_steps=4)


def _policy(folder: Path, **options: object) -> Trainer:
    spec = {"path": folder, "compute_dtype": "float32", **options}
    return Trainer.policy(ModelSpec.model_validate(spec), OPTIMIZER)


def _critic(folder: Path) -> Trainer:
    return Trainer.critic(ModelSpec(path=folder, compute_dtype="float32"), OPTIMIZER)


def _train(trainer: Trainer, seed: int) -> dict[str, float]:
    batch = token_batch(seed=seed)
    if trainer.kind == "critic":
        return update_whole(
            trainer, batch, PpoValueLossSpec(), epochs=1, mini_batch_rows=3, seed=seed
        )
    scored = trainer.compute_logprobs(batch, temperature=1.0)
    return update_whole(
        trainer, batch | scored, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=3, seed=seed
    )


def _bytes(trainer: Trainer) -> dict[str, bytes]:
    return {name: weight.numpy().tobytes() for name, weight in trainer.named_weights()}


def _draws() -> tuple[object, ...]:
    return (torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal())


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_resumed_run_continues_with_the_same_bits(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    make = _policy if kind == "policy" else _critic
    trainer = make(folder)
    _train(trainer, seed=1)
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    np.random.normal()
    random.gauss(0, 1)
    trainer.save(tmp_path / "checkpoint", {"kl_coefficient": 0.25})
    draws = _draws()
    metrics = _train(trainer, seed=2)

    resumed = make(folder)
    assert resumed.load(tmp_path / "checkpoint") == {"kl_coefficient": 0.25}
    assert resumed.policy_version == 3
    assert draws == (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
    )
    assert _train(resumed, seed=2) == metrics
    assert resumed.policy_version == trainer.policy_version == 6
    assert _bytes(resumed) == _bytes(trainer)


def test_a_checkpoint_before_the_first_step_can_be_loaded(folder: Path, tmp_path: Path) -> None:
    trainer = _policy(folder)
    trainer.save(tmp_path / "checkpoint")
    other = _policy(folder)
    _train(other, seed=3)
    assert other.load(tmp_path / "checkpoint") == {}
    assert other.policy_version == 0
    assert _bytes(other) == _bytes(trainer)
    assert _train(other, seed=4) == _train(trainer, seed=4)


def test_large_tensors_and_groups_are_cut_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writing, "SHARD_BYTES", 100)
    tensors = {f"t{index}": torch.full((5,), float(index)) for index in range(7)}
    tensors["large"] = torch.arange(90.0).view(9, 10)
    groups = {"weights": ShardedTensors.whole(tensors), "none": ShardedTensors.whole({})}
    write_checkpoint(tmp_path / "c", groups, {})
    reader = open_checkpoint(tmp_path / "c")
    for name in reader.files("weights"):
        with safe_open(tmp_path / "c" / name, framework="pt") as content:
            assert sum(content.get_tensor(key).nbytes for key in content.keys()) <= 100  # noqa: SIM118
    assert len(reader.files("weights")) == 2 + 5  # 5 tensors a file; 2 of 9 rows of 40 bytes
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    shard = ShardedTensors.whole(read).layout.ranks[0]
    reader.read("weights", reader.copies("weights", shard), read)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert reader.files("none") == []
    with pytest.raises(CheckpointMismatchError, match="has no 'moments'"):
        reader.parameters("moments")


FILES = (
    "manifest.json",
    "state.json",
    "weights-rank00000-00001.safetensors",
    "optimizer-exp_avg-rank00000-00001.safetensors",
    "optimizer-step-rank00000-00001.safetensors",
    "random-rank00000-00001.safetensors",
    "random-rank00000.json",
)


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, which nobody changes."""
    trainer = _policy(folder, num_layers=1)
    _train(trainer, seed=1)
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    trainer.save(directory)
    return directory


@pytest.fixture(scope="module")
def other(folder: Path) -> Trainer:
    """Which no damaged checkpoint changes."""
    return _policy(folder, num_layers=1)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_changes_no_weight(
    saved: Path, other: Trainer, tmp_path: Path, name: str, damage: str
) -> None:
    shutil.copytree(saved, tmp_path / "checkpoint")
    before = _bytes(other)
    path = tmp_path / "checkpoint" / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    expected = (
        ValueError if (name, damage) == ("manifest.json", "remove") else CheckpointCorruptError
    )
    with pytest.raises(expected, match=name.replace(".", r"\.")):
        other.load(tmp_path / "checkpoint")
    assert _bytes(other) == before
    assert other.policy_version == 0


def test_a_manifest_that_reads_well_and_was_changed_is_damaged(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_mine": 1}))
    with pytest.raises(CheckpointCorruptError, match="does not match its own SHA-256"):
        open_checkpoint(tmp_path / "checkpoint")


def test_a_file_that_the_disk_does_not_give_is_damaged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _policy(folder, num_layers=1)
    trainer.save(tmp_path / "checkpoint")

    def refuse(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint_files, "sha256_of", refuse)
    with pytest.raises(CheckpointCorruptError, match=r"state\.json cannot be read \(Input/output"):
        trainer.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_role_or_model_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = _policy(folder)
    policy.save(tmp_path / "policy")
    with pytest.raises(CheckpointMismatchError, match="is of a policy, not of a critic"):
        _critic(folder).load(tmp_path / "policy")
    short = _policy(folder, num_layers=1)
    before = _bytes(short)
    with pytest.raises(CheckpointMismatchError, match=r"another model: 'model\.layers\.1"):
        short.load(tmp_path / "policy")
    assert _bytes(short) == before
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        policy.load(tmp_path / "nowhere")


def test_an_existing_folder_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    trainer = _policy(folder)
    trainer.save(tmp_path / "checkpoint")
    with pytest.raises(FolderExistsError, match="exists already"):
        trainer.save(tmp_path / "checkpoint")


def test_state_that_json_cannot_hold_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    trainer = _policy(folder)
    with pytest.raises(ValueError, match="not JSON compliant"):
        trainer.save(tmp_path / "checkpoint", {"kl": float("nan")})
    assert list(tmp_path.iterdir()) == []


KILLED_SAVE = """
import os, signal, sys
import torch
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing
from rolemesh.engine.weights.checkpoints import folders
from rolemesh.engine.weights import sharded_tensors

# Everything is written; the process dies just before the rename.
folders._move_into_place = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
weights = sharded_tensors.ShardedTensors.whole({"a": torch.ones(1000)})
checkpoint_writing.write_checkpoint(sys.argv[1], {"weights": weights}, {"step": 1})
"""


def test_a_process_killed_before_the_rename_leaves_no_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    result = subprocess.run(
        [sys.executable, "-c", KILLED_SAVE, str(target)], capture_output=True, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    assert not target.exists()
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith("checkpoint.tmp-")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        open_checkpoint(target)
    write_checkpoint(target, {"weights": ShardedTensors.whole({"a": torch.ones(3)})}, {"step": 2})
    assert open_checkpoint(target).state == {"step": 2}


def test_a_failed_block_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_folder(target) as temporary:
        (temporary / "a").write_text("old")

    def fail() -> None:
        with whole_folder(target, replace=True) as temporary:
            (temporary / "a").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with whole_folder(target, replace=True) as temporary:
        (temporary / "b").write_text("new")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert os.stat(target / "b").st_mode & 0o444 == 0o444


def test_a_folder_that_appears_meanwhile_is_refused_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write() -> None:
        with whole_folder(target) as temporary:
            (temporary / "a").write_text("ours")
            target.mkdir()
            (target / "a").write_text("theirs")

    with pytest.raises(FolderExistsError, match="has appeared meanwhile"):
        write()
    assert (target / "a").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_policy_gives_the_same_logits_in_transformers(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    trainer = _policy(folder)
    _train(trainer, seed=1)
    trainer.export(tmp_path / "model", dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.dtype == getattr(torch, dtype)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    tokens = torch.randint(4, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    # Parameters only: .to() would also round the rotary frequencies.
    rounded = trainer.model.lm
    for weight in rounded.parameters():
        weight.data = weight.data.to(getattr(torch, dtype))
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, rounded(tokens).logits)
    assert exported.generation_config.eos_token_id == 2
    before, after = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "model"))
    message = [{"role": "user", "content": "1 + 2 = ?"}]
    assert before.apply_chat_template(message) == after.apply_chat_template(message)


def test_an_export_replaces_an_older_one_whole(folder: Path, tmp_path: Path) -> None:
    trainer = _policy(folder)
    trainer.export(tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("old")
    trainer.export(tmp_path / "model")
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_replaces_nothing_but_an_export(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "models"
    (precious / "one").mkdir(parents=True)
    (precious / "config.json").write_text("{}")
    (precious / "model.safetensors").write_bytes(b"")
    trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec())
    # A model that is none of ours, and a link to an export.
    theirs = write_tiny_llama(tmp_path / "theirs", seed=2)
    trainer.export(tmp_path / "ours")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for directory in (precious, theirs, tmp_path / "link"):
        with pytest.raises(FolderExistsError, match="not the folder of one exported model"):
            trainer.export(directory)
    assert (precious / "one").is_dir()
    assert (theirs / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["../theirs", "{outside}", "link"])
def test_a_manifest_names_no_file_outside_of_its_folder(
    folder: Path, tmp_path: Path, name: str
) -> None:
    trainer = _policy(folder)
    trainer.save(tmp_path / "one", {})
    (tmp_path / "theirs").write_bytes((tmp_path / "one" / "state.json").read_bytes())
    (tmp_path / "one" / "link").symlink_to(tmp_path / "theirs")
    path = tmp_path / "one" / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    named = name.format(outside=tmp_path / "theirs")
    content["files"][named] = content["files"]["state.json"]
    path.write_text(json.dumps({**content, "sha256": digest_of(content)}))
    with pytest.raises(CheckpointCorruptError, match="leads out of the folder"):
        open_checkpoint(tmp_path / "one")
    # Nor does a group read a file that is not listed, and so not checked.
    del content["files"][named]
    content["groups"]["weights"]["files"][named] = {}
    path.write_text(json.dumps({**content, "sha256": digest_of(content)}))
    with pytest.raises(CheckpointCorruptError, match="does not list"):
        open_checkpoint(tmp_path / "one")


def test_pickles_in_the_folder_of_a_checkpoint_are_never_opened(
    folder: Path, tmp_path: Path
) -> None:
    trainer = _policy(folder)
    _train(trainer, seed=1)
    trainer.save(tmp_path / "one", {})
    planted = plant(tmp_path / "one", tmp_path / "ran")
    resumed = _policy(folder)
    with recording("open", *CODE) as events:
        resumed.load(tmp_path / "one")
    assert _bytes(resumed) == _bytes(trainer)
    assert planted.opened(events) == []
    assert [event for event in events if event.name in (UNPICKLING, "pickle.find_class")] == []
    assert not planted.mark.exists()


def test_an_exported_critic_keeps_its_head_and_its_cut(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer.critic(
        ModelSpec(path=folder, compute_dtype="float32", num_layers=1), OPTIMIZER
    )
    _train(trainer, seed=1)
    trainer.export(tmp_path / "critic", dtype="float32")
    batch = token_batch()
    values = trainer.compute_values(batch).values
    assert float(values.abs().max()) > 0

    reloaded = Trainer.critic(
        ModelSpec(path=tmp_path / "critic", compute_dtype="float32"), OPTIMIZER
    )
    assert isinstance(reloaded.model, ScoringModel)
    assert torch.equal(reloaded.compute_values(batch).values, values)

    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    tokens = next(batch["tokens"].rows())[None]
    prompt = int(batch["prompt_lengths"].values[0])
    with torch.no_grad():
        expected = plain(tokens).logits[0, prompt - 1 : -1, 0]
    first = values[: len(expected)]
    # One row alone against one among others: float32 sums in other blocks.
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_named_weights_are_the_models_parameters_once(folder: Path) -> None:
    trainer = _policy(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = list(trainer.named_weights())
    assert [name for name, _ in named] == [name for name, _ in expected.named_parameters()]
    for name, weight in named:
        assert weight.dtype == torch.float32
        assert not weight.requires_grad
        assert torch.equal(weight, expected.get_parameter(name))


def test_experience_of_a_scoring_joins_the_batch(folder: Path) -> None:
    batch = token_batch()
    joined = batch | _policy(folder).compute_logprobs(batch, temperature=1.0)
    assert isinstance(joined, Experience)
    assert "logprobs" in joined
