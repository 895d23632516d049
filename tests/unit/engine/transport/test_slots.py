"""Slots of shared memory that outlive their process: marks, locks, room, leftovers."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolemesh.engine.transport.slots import slot_files
from rolemesh.engine.transport.slots.shm import remove_leftovers
from rolemesh.engine.transport.slots.slot_files import (
    PAGE_BYTES,
    SlotHeldError,
    SlotOwner,
    SlotRoomError,
    memory_of_slots,
)
from rolemesh.engine.transport.slots.slots import (
    LogUnavailableError,
    Slot,
    open_log,
    read_header,
    remove_old_slots,
    remove_slots,
)

SLOT_BYTES = 64 * PAGE_BYTES
DAY_S = 24 * 3600.0


@pytest.fixture
def owner(tmp_path: Path) -> SlotOwner:
    return SlotOwner("run", "actor", 0, 1, tmp_path)


def left_behind(owner: SlotOwner, text: bytes = b"{}", index: int = 0) -> Path:
    """A whole slot that no process holds."""
    slot = Slot.create(owner, index, SLOT_BYTES)
    slot.clear()
    slot.finish(text)
    slot.close()
    return owner.path(index)


def test_a_slot_outlives_its_process_with_all_that_was_written(owner: SlotOwner) -> None:
    program = (
        "import os; from pathlib import Path; "
        "from rolemesh.engine.transport.slots.slot_files import SlotOwner; "
        "from rolemesh.engine.transport.slots.slots import Slot; "
        f"slot = Slot.create(SlotOwner('run', 'actor', 0, 1, Path({str(owner.directory)!r})), 1, "
        f"{SLOT_BYTES}); slot.memory[-3:] = 7; slot.finish(b'told'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert read_header(owner, 1) == b"told"
    assert read_header(owner, 0) is None
    slot = Slot.open(owner, 1)
    assert slot is not None
    assert slot.memory[-4:].tolist() == [0, 7, 7, 7]
    slot.remove()
    assert not list(owner.directory.iterdir())


def test_a_slot_is_whole_only_from_its_mark_on(owner: SlotOwner) -> None:
    slot = Slot.create(owner, 0, SLOT_BYTES)
    assert slot.header() is None
    slot.finish(b"first")
    assert slot.header() == read_header(owner, 0) == b"first"
    slot.clear()
    assert slot.header() is read_header(owner, 0) is None
    slot.close()
    assert stat.S_IMODE(owner.path(0).stat().st_mode) == 0o600


def test_one_process_holds_a_slot_and_a_dead_one_none(
    owner: SlotOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "LOCK_WAIT_S", 0.1)
    held = Slot.create(owner, 0, SLOT_BYTES)
    for attempt in (Slot.open, lambda *at: Slot.create(*at, SLOT_BYTES)):
        with pytest.raises(SlotHeldError, match="still lives"):
            attempt(owner, 0)
    held.close()
    again = Slot.open(owner, 0)
    assert again is not None
    again.close()


def test_a_slot_that_was_removed_by_hand_is_noticed(owner: SlotOwner) -> None:
    slot = Slot.create(owner, 0, SLOT_BYTES)
    assert slot.is_named
    owner.path(0).unlink()
    assert not slot.is_named
    slot.close()
    assert Slot.open(owner, 0) is None


@pytest.mark.parametrize("make", [lambda owner: Slot.create(owner, 0, SLOT_BYTES).close(),
                                  lambda owner: os.close(open_log(owner, 0))])  # fmt: skip
def test_a_new_file_that_another_run_removes_to_make_room_is_made_again(
    make: Callable[[SlotOwner], None], owner: SlotOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        # Between the making of a file and its lock.
        if not removed:
            removed.extend(owner.directory.iterdir())
            for path in removed:
                path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    make(owner)
    assert list(owner.directory.iterdir()) == removed != []


def test_links_and_other_files_are_not_taken_for_slots(owner: SlotOwner) -> None:
    other = left_behind(SlotOwner("other", "actor", 0, 1, owner.directory))
    owner.path(0).symlink_to(other)
    assert Slot.open(owner, 0) is None
    assert read_header(owner, 0) is None
    owner.path(1).write_bytes(b"short")
    assert Slot.open(owner, 1) is None
    with pytest.raises(ValueError, match="not the name of a slot"):
        Slot.open(SlotOwner("run", "../actor", 0, 1, owner.directory), 0)


def test_dropping_removes_all_slots_of_a_role_in_a_run_and_no_others(owner: SlotOwner) -> None:
    directory = owner.directory
    own = [left_behind(SlotOwner("run", "actor", rank, 2, directory)) for rank in range(2)]
    kept = [
        left_behind(SlotOwner("run", "critic", 0, 1, directory)),
        left_behind(SlotOwner("other", "actor", 0, 1, directory)),
    ]
    assert sorted(remove_slots("run", "actor", directory)) == sorted(path.name for path in own)
    assert sorted(directory.iterdir()) == sorted(kept)


def test_memory_of_a_run_is_that_of_all_its_roles_and_of_no_other_run(owner: SlotOwner) -> None:
    directory = owner.directory
    assert memory_of_slots("run", directory) == 0
    left_behind(owner)
    left_behind(SlotOwner("run", "critic", 0, 1, directory), index=1)
    left_behind(SlotOwner("other", "actor", 0, 1, directory))
    # A slot is whole pages, and all of them are reserved.
    assert memory_of_slots("run", directory) == 2 * SLOT_BYTES


def test_what_is_old_and_free_is_removed_and_what_is_held_or_new_stays(owner: SlotOwner) -> None:
    old = left_behind(owner)
    new = left_behind(owner, index=1)
    held = Slot.create(SlotOwner("held", "actor", 0, 1, owner.directory), 0, SLOT_BYTES)
    past = time.time() - 2 * DAY_S
    for path in (old, held._path):
        os.utime(path, (past, past))
    assert remove_old_slots(DAY_S, owner.directory) == [(old.name, "run")]
    assert sorted(owner.directory.iterdir()) == sorted([new, held._path])
    held.remove()


def test_a_write_through_the_mapping_makes_a_slot_new(owner: SlotOwner) -> None:
    slot = Slot.create(owner, 0, SLOT_BYTES)
    os.utime(owner.path(0), (0, 0))
    slot.finish(b"{}")
    slot.close()
    assert remove_old_slots(DAY_S, owner.directory) == []


def test_leftovers_of_other_shared_memory_are_another_matter() -> None:
    owner = SlotOwner(f"leftover-{os.getpid()}", "actor", 0, 1)
    path = left_behind(owner)
    try:
        assert path.name not in remove_leftovers()
        assert path.exists()
    finally:
        path.unlink()


def test_a_log_stays_with_what_was_appended_and_is_held_by_one_process(
    owner: SlotOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "LOCK_WAIT_S", 0.1)
    held = open_log(owner, 2)
    assert os.fstat(held).st_size == PAGE_BYTES
    assert stat.S_IMODE(owner.log_path(2).stat().st_mode) == 0o600
    os.pwrite(held, b"told", PAGE_BYTES)
    with pytest.raises(LogUnavailableError, match="still lives"):
        open_log(owner, 2)
    os.close(held)
    again = open_log(owner, 2)
    assert os.pread(again, 10, PAGE_BYTES) == b"told"
    os.close(again)


def test_what_is_no_log_of_the_run_is_begun_anew_and_a_link_is_not_followed(
    owner: SlotOwner,
) -> None:
    for foreign in (b"", b"short", b"\xff" * 3 * PAGE_BYTES):
        owner.log_path(0).write_bytes(foreign)
        opened = open_log(owner, 0)
        assert os.fstat(opened).st_size == PAGE_BYTES
        os.close(opened)
    target = owner.directory / "elsewhere"
    target.write_bytes(b"precious")
    owner.log_path(1).symlink_to(target)
    with pytest.raises(LogUnavailableError, match="not to be had"):
        open_log(owner, 1)
    assert target.read_bytes() == b"precious"


def test_logs_go_with_the_slots_of_their_run_and_are_no_leftovers(owner: SlotOwner) -> None:
    log, mark = owner.log_path(0), time.time() - 2 * DAY_S
    os.close(open_log(owner, 0))
    assert remove_slots("run", "actor", owner.directory) == [log.name]
    os.close(open_log(owner, 0))
    os.utime(log, (mark, mark))
    assert remove_old_slots(DAY_S, owner.directory) == [(log.name, "run")]
    real = SlotOwner(f"leftover-{os.getpid()}", "reward", 0, 1)
    os.close(open_log(real, 0))
    try:
        remove_leftovers()
        assert real.log_path(0).exists()
    finally:
        real.log_path(0).unlink()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Shared memory with room for three slots."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = f"size={3 * SLOT_BYTES}"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_slots_of_other_runs_make_room_the_oldest_first(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [SlotOwner(name, "actor", 0, 1, small) for name in ("young", "oldest", "busy")]
    paths = [left_behind(other) for other in others]
    os.utime(paths[1], (1, 1))
    os.utime(paths[2], (0, 0))
    busy = Slot.open(others[2], 0)
    assert busy is not None
    with caplog.at_level(logging.WARNING):
        Slot.create(SlotOwner("run", "actor", 0, 1, small), 0, SLOT_BYTES).close()
    assert [path.exists() for path in paths] == [True, False, True]
    (record,) = caplog.records
    assert "run 'oldest'" in record.getMessage()
    busy.close()


def test_without_room_nothing_is_left_and_the_error_says_how_much_is_needed(small: Path) -> None:
    owner = SlotOwner("run", "actor", 0, 1, small)
    left_behind(owner)
    with pytest.raises(SlotRoomError) as caught:
        Slot.create(owner, 1, 3 * SLOT_BYTES)
    text = str(caught.value)
    assert f"2 slots of {3 * SLOT_BYTES} bytes" in text
    assert f"{2 * SLOT_BYTES} are free" in text
    assert "enlarge /dev/shm (Docker: shm_size)" in text
    assert "run.recovery.cuts=false" in text
    assert [path.name for path in small.iterdir()] == [owner.path(0).name]
