"""Tests of checkpoints as a person keeps them: listed, verified, pruned, without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rolemesh.coordinator.run.saving.checkpoints import (
    COMMITTED,
    checkpoint_folder,
    committed_steps,
    folders_aside,
    set_aside,
)
from rolemesh.coordinator.run.saving.kept_checkpoints import best_kept, kept_checkpoints, prune


def write_checkpoint(directory: Path, step: int) -> Path:
    folder = checkpoint_folder(directory, step)
    roles = {}
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        content = f"{role} {step}".encode()
        (folder / role / "weights.safetensors").write_bytes(content)
        files = {"weights.safetensors": {"sha256": hashlib.sha256(content).hexdigest()}}
        manifest = json.dumps({"files": files}).encode()
        (folder / role / "manifest.json").write_bytes(manifest)
        roles[role] = {"manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    (folder / COMMITTED).write_text(json.dumps({"roles": roles}))
    return folder


def damages(directory: Path) -> list[str | None]:
    return [one.damage for one in kept_checkpoints(directory, verify=True)]


def test_whole_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for step in (8, 4):
        write_checkpoint(tmp_path, step)
    checkpoint_folder(tmp_path, 12).mkdir()  # one that was never committed
    listed = list(kept_checkpoints(tmp_path, verify=False))
    assert [(one.step, one.roles, one.damage) for one in listed] == [
        (4, ("actor", "critic"), None),
        (8, ("actor", "critic"), None),
    ]
    assert all(one.num_bytes > 0 for one in listed)
    assert damages(tmp_path) == ["", ""]


@pytest.mark.parametrize("file", ["weights.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damage_names_its_file(tmp_path: Path, file: str, damage: str) -> None:
    path = write_checkpoint(tmp_path, 4) / "critic" / file
    if damage == "changed":
        path.write_bytes(path.read_bytes().replace(b"c", b"d"))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    (found,) = damages(tmp_path)
    assert found is not None
    assert str(path) in found


def test_a_manifest_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = json.dumps({"files": {"../COMMITTED": {"sha256": "00"}}}).encode()
    (folder / "actor" / "manifest.json").write_bytes(manifest)
    marker = json.loads((folder / COMMITTED).read_text())
    marker["roles"]["actor"]["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    (folder / COMMITTED).write_text(json.dumps(marker))
    (found,) = damages(tmp_path)
    assert found is not None
    assert "'../COMMITTED', which is no file of its folder" in found


def pruned(directory: Path, keep: int, best: int | None = None) -> list[int]:
    gone, left = prune(directory, keep, kept_checkpoints(directory, verify=True, best=best))
    assert [one.step for one in left] == committed_steps(directory)
    return gone


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    assert pruned(tmp_path, 2) == [2]
    assert committed_steps(tmp_path) == [4, 6]
    assert not checkpoint_folder(tmp_path, 2).exists()
    assert pruned(tmp_path, 1, best=4) == []
    assert committed_steps(tmp_path) == [4, 6]
    with pytest.raises(ValueError, match="keep 1 checkpoint at least"):
        pruned(tmp_path, 0)


def test_pruning_neither_counts_nor_removes_what_is_damaged(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path, step)
    for step in (2, 8):
        (checkpoint_folder(tmp_path, step) / "actor" / "weights.safetensors").write_text("other")
    aside = set_aside(tmp_path, 2)
    assert pruned(tmp_path, 1) == [4]
    assert committed_steps(tmp_path) == [6, 8]
    assert folders_aside(tmp_path) == [aside]


def test_the_best_is_of_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path / "checkpoints", step)
    # A folder without a recipe keeps none as the best.
    assert best_kept(tmp_path) is None
    scores = {1: 0.9, 2: 0.3, 4: 0.2}
    lines = [json.dumps({"step": step, "held_out/score": score}) for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "held']))
    config = tmp_path / "config.yaml"
    for keep_best, best in (("null", None), ("{mode: max}", 2), ("{mode: min}", 4)):
        config.write_text(f"run: {{checkpoint: {{keep_best: {keep_best}}}}}\n")
        assert best_kept(tmp_path) == best
    # A run of an earlier version.
    config.write_text("run: {checkpoint: {keep: 2}}\n")
    assert best_kept(tmp_path) is None
    config.write_text("run: {checkpoint: {keep_best: {mode: most}}}\n")
    with pytest.raises(ValueError, match="does not say which checkpoint is the best one"):
        best_kept(tmp_path)
