"""Cuts that lie in memory: each run's are listed, and those of no live run are removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.commands.findings.cut_findings import check_cuts
from rolemesh.coordinator.commands.findings.findings import Level
from rolemesh.coordinator.run.folders.kept_cuts import CutsInUseError, KeptCuts, kept_cuts
from rolemesh.coordinator.run.folders.ownership import held
from rolemesh.engine.transport.slots.slot_files import PAGE_BYTES, SlotOwner
from rolemesh.engine.transport.slots.slots import Slot, remove_slots

SLOT_BYTES = 64 * PAGE_BYTES


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for cuts, beside the folders of runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def left_by(run_id: str, memory: Path, age_s: float = 0.0) -> None:
    """Cuts of two roles that no process holds."""
    for role in ("actor", "critic"):
        owner = SlotOwner(run_id, role, 0, 1, memory)
        slot = Slot.create(owner, 0, SLOT_BYTES)
        slot.finish(b"{}")
        slot.close()
        written = time.time() - age_s
        os.utime(owner.path(0), (written, written))


def folder_of(run_id: str, **summary: Any) -> Path:
    folder = Path("runs") / run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def only(memory: Path, named: str | None = None) -> KeptCuts:
    (found,) = kept_cuts(named, memory)
    return found


def test_the_cuts_of_a_failed_run_are_told_of_and_removed(memory: Path) -> None:
    left_by("mine", memory, age_s=7300)
    folder_of("mine", state="failed")
    found = only(memory)
    assert found.slots.roles == ("actor", "critic")
    assert found.slots.num_bytes == 2 * SLOT_BYTES
    assert found.state == "`rolemesh train --resume runs/mine` would use them"
    (finding,) = check_cuts(memory)
    assert finding.level is Level.WARN
    assert "of the run mine (actor, critic), written 2 h ago: `rolemesh train --res" in finding.text
    assert finding.remedy == "`rolemesh cuts --prune` removes them"
    found.remove()
    assert kept_cuts(memory=memory) == []
    assert list(check_cuts(memory)) == []


@pytest.mark.parametrize("sign", ["slot", "coordinator", "lock"])
def test_cuts_of_a_live_run_stay(memory: Path, sign: str) -> None:
    left_by("mine", memory)
    folder = folder_of("mine")
    owner = SlotOwner("mine", "critic", 0, 1, memory)
    if sign == "slot":
        slot = Slot.open(owner, 0)
        assert slot is not None
    elif sign == "coordinator":
        (folder / "coordinator.json").write_text(json.dumps({"pid": os.getpid()}))
    before = sorted(memory.iterdir())
    for named in (None, "mine", "runs/mine"):
        found = only(memory, named)
        if sign == "lock":
            with held(folder), pytest.raises(CutsInUseError, match="runs/mine goes on"):
                found.remove()
            continue
        assert found.is_live
        assert [one.level for one in check_cuts(memory)] == [Level.OK]
        with pytest.raises(CutsInUseError, match="the cuts of mine stay: "):
            found.remove()
    assert sorted(memory.iterdir()) == before


def test_a_slot_that_is_taken_after_the_look_keeps_all_of_its_run(memory: Path) -> None:
    left_by("mine", memory)
    folder_of("mine")
    found, before = only(memory), sorted(memory.iterdir())
    taken = Slot.open(SlotOwner("mine", "critic", 0, 1, memory), 0)
    assert taken is not None
    with pytest.raises(CutsInUseError, match="held by a process that lives"):
        found.remove()
    assert sorted(memory.iterdir()) == before


def test_of_a_run_that_is_not_found_the_cuts_stay_until_they_are_old_or_it_is_named(
    memory: Path,
) -> None:
    left_by("far", memory, age_s=80_000)
    found = only(memory)
    assert "its folder is not in runs/ here; the run may go on elsewhere" in found.state
    with pytest.raises(CutsInUseError, match="name it to remove them"):
        found.remove()
    (finding,) = check_cuts(memory)
    assert finding.remedy == "`rolemesh cuts --prune far` removes them"
    left_by("old", memory, age_s=90_000)
    (old,) = kept_cuts("old", memory)
    assert next(one for one in kept_cuts(memory=memory) if one.slots.run_id == "old").why_kept == ""
    old.remove()
    only(memory, "far").remove()
    assert list(memory.iterdir()) == []


def test_cuts_that_nothing_needs_and_damaged_folders_are_told_of(memory: Path) -> None:
    left_by("mine", memory)
    folder = folder_of("mine", state="succeeded")
    damaged = folder_of("other")
    (damaged / "run.json").write_text("{")
    (folder / "coordinator.json").write_text("[]")
    assert only(memory).state == "the run in runs/mine has succeeded: nothing needs them"
    assert kept_cuts("other", memory) == []


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A run whose cuts lie where services keep them."""
    run_id = f"test-cuts-{os.getpid()}"
    left_by(run_id, SlotOwner(run_id, "actor", 0, 1).directory)
    yield run_id
    for role in ("actor", "critic"):
        remove_slots(run_id, role)


def test_the_command_lists_and_prunes(in_memory: str) -> None:
    def called(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["cuts", *arguments])
        return done.exit_code, done.output

    code, listed = called(in_memory, "--json")
    assert code == 0
    assert json.loads(listed)["bytes"] == 2 * SLOT_BYTES
    assert f"{in_memory}: a resume of the run would use them" in called(in_memory)[1]
    taken = Slot.open(SlotOwner(in_memory, "actor", 0, 1), 0)
    assert taken is not None
    code, refused = called(in_memory, "--prune")
    assert code == 1
    assert "stay: a process that lives holds them" in refused
    taken.close()
    code, removed = called(in_memory, "--prune")
    assert code == 0
    assert f"removed 0.5 MiB of {in_memory}" in removed
    code, none = called(in_memory)
    assert code == 2
    assert "has no cuts in /dev/shm" in none
