"""Shared memory segments: private, checked, never left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.services import segments_of

from rolemesh.engine.transport.slots import shm
from rolemesh.engine.transport.slots.shm import (
    Segment,
    SegmentInvalidError,
    host_identity,
    open_segment,
    remove_leftovers,
)
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(10_000)
    yield made
    made.unlink()


def test_a_peer_sees_what_the_producer_wrote(segment: Segment) -> None:
    written = torch.arange(10_000).to(torch.uint8)
    segment.tensor().copy_(written)
    assert torch.equal(open_segment(segment.name, 10_000), written)


def test_a_peer_cannot_change_the_producers_bytes(segment: Segment) -> None:
    open_segment(segment.name, 10_000).fill_(7)
    assert int(segment.tensor().sum()) == 0


def test_only_the_user_may_open_the_file(segment: Segment) -> None:
    status = (SHM_DIRECTORY / segment.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    # Every page is reserved: a full file system shows at create, not as SIGBUS.
    assert status.st_blocks * 512 >= 10_000


def test_mappings_outlive_the_name(segment: Segment) -> None:
    view = open_segment(segment.name, 10_000)
    segment.unlink()
    segment.unlink()
    assert int(view.sum()) == 0
    with pytest.raises(FileNotFoundError):
        open_segment(segment.name, 10_000)


def test_more_than_there_is_fails_at_once_and_leaves_nothing() -> None:
    free = os.statvfs(SHM_DIRECTORY)
    before = segments_of(os.getpid())
    with pytest.raises(OSError, match=r"No space|too large|Cannot allocate"):
        Segment.create(free.f_blocks * free.f_frsize * 4 + (1 << 40))
    assert segments_of(os.getpid()) == before


def test_a_link_is_not_followed(segment: Segment) -> None:
    name = segment.name[:-4] + "beef"
    link = SHM_DIRECTORY / name
    link.symlink_to(SHM_DIRECTORY / segment.name)
    try:
        with pytest.raises(OSError, match="Too many levels"):
            open_segment(name, 10_000)
    finally:
        link.unlink()


@pytest.mark.parametrize("num_bytes", [0, -1, 9_999, 10_001])
def test_a_size_that_does_not_fit_is_refused(segment: Segment, num_bytes: int) -> None:
    with pytest.raises(SegmentInvalidError):
        open_segment(segment.name, num_bytes)


def test_leftovers_of_the_dead_are_removed_and_segments_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of its own: services of other tests remove leftovers when they start.
    monkeypatch.setattr(shm, "SHM_DIRECTORY", tmp_path)
    program = (
        "import os, sys, pathlib; from rolemesh.engine.transport.slots import shm; "
        "shm.SHM_DIRECTORY = pathlib.Path(sys.argv[1]); "
        "print(shm.Segment.create(100).name, flush=True); os._exit(1)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    left = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    segment = Segment.create(100)
    assert set(os.listdir(tmp_path)) == {left, segment.name}
    assert remove_leftovers() == [left]
    assert os.listdir(tmp_path) == [segment.name]


def test_a_name_with_a_pid_that_no_process_can_have_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "SHM_DIRECTORY", tmp_path)
    (tmp_path / f"rolemesh-9999999999-{'0' * 32}").touch()
    assert remove_leftovers() == []


def test_host_identity_is_stable() -> None:
    assert host_identity() == host_identity()
    assert str(os.geteuid()) == host_identity().rpartition("/")[2]
