"""Tests of checkpoints as a person keeps them: listed, verified, pruned, without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rolemesh.coordinator.run.checkpoints import COMMITTED, checkpoint_folder, committed_steps
from rolemesh.coordinator.run.kept_checkpoints import kept_checkpoints, prune


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


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    assert prune(tmp_path, 2) == [2]
    assert committed_steps(tmp_path) == [4, 6]
    assert not checkpoint_folder(tmp_path, 2).exists()
    with pytest.raises(ValueError, match="keep 1 checkpoint at least"):
        prune(tmp_path, 0)
