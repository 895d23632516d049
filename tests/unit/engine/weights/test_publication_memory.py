"""Memory of publications is used again, and never while another process may read it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.fake_streams import FakeStreams
from support.services import segments_of

from rolemesh.engine.transport.slots import shm
from rolemesh.engine.transport.slots.shm import open_segment
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.weights.exchanges.publication_memory import HeldSegment, PublicationMemory

CPU = torch.device("cpu")
SIZE = 1 << 16


@pytest.fixture
def memory() -> Iterator[PublicationMemory]:
    before = segments_of(os.getpid())
    made = PublicationMemory()
    yield made
    made.close()
    assert segments_of(os.getpid()) == before


def inode(held: HeldSegment) -> int:
    return (SHM_DIRECTORY / held.segment.name).stat().st_ino


def publish(memory: PublicationMemory, version: int) -> HeldSegment:
    held = memory.take(SIZE, CPU)
    held.segment.tensor().fill_(version)
    return held


def drop(memory: PublicationMemory, held: HeldSegment) -> None:
    held.segment.rename()
    memory.give_back(held)


def test_memory_that_nobody_reads_serves_the_next_version(memory: PublicationMemory) -> None:
    inodes = set()
    for version in range(5):
        held = publish(memory, version)
        inodes.add(inode(held))
        mapped = open_segment(held.segment.name, SIZE)
        assert mapped.eq(version).all()
        del mapped
        drop(memory, held)
    assert len(inodes) == 1


def test_memory_that_is_read_stays_as_it_is_and_two_take_turns(memory: PublicationMemory) -> None:
    inodes, mapped = [], torch.empty(0)
    for version in range(6):
        held = publish(memory, version)
        # The reader keeps the version before until it has this one.
        assert mapped.eq(version - 1).all()
        inodes.append(inode(held))
        mapped = open_segment(held.segment.name, SIZE)
        drop(memory, held)
    assert inodes == inodes[:2] * 3
    assert inodes[0] != inodes[1]


def test_a_reader_that_stays_behind_costs_more_memory_and_no_byte(
    memory: PublicationMemory,
) -> None:
    readers = []
    for version in range(5):
        held = publish(memory, version)
        # A view of a part is a view.
        readers.append(open_segment(held.segment.name, SIZE)[100:200])
        drop(memory, held)
    assert len(segments_of(os.getpid())) == 2
    for version, part in enumerate(readers):
        assert part.eq(version).all()


def test_another_process_keeps_what_it_reads(memory: PublicationMemory) -> None:
    held = publish(memory, 1)
    code = (
        "import sys\n"
        "from rolemesh.engine.transport.slots.shm import open_segment\n"
        f"mapped = open_segment({held.segment.name!r}, {SIZE})\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(bool(mapped.eq(1).all()), flush=True)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdin is not None
    assert reader.stdout.readline() == "mapped\n"
    first = inode(held)
    drop(memory, held)
    second = publish(memory, 2)
    assert inode(second) != first
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "True\n"
    assert reader.wait(60) == 0
    reader.stdin.close()
    reader.stdout.close()
    # It has ended, and its lock with it.
    drop(memory, second)
    found = [memory.take(SIZE, CPU) for _ in range(2)]
    assert first in map(inode, found)
    for one in found:
        drop(memory, one)


def test_who_comes_late_finds_nothing(memory: PublicationMemory) -> None:
    held = publish(memory, 1)
    name = held.segment.name
    drop(memory, held)
    with pytest.raises(FileNotFoundError):
        open_segment(name, SIZE)


@pytest.mark.parametrize("by_hidden_name", [False, True])
def test_a_reader_that_is_overtaken_before_its_lock_finds_nothing(
    memory: PublicationMemory, by_hidden_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, lock = publish(memory, 1), shm._lock_reading
    if by_hidden_name:
        # As an answer to a fetch announces it that began before the version was dropped.
        drop(memory, held)

    def overtaken(descriptor: int, kind: int) -> bool:
        if kind == fcntl.F_RDLCK:
            if not by_hidden_name:
                drop(memory, held)
            again = publish(memory, 2)
            assert again.segment is held.segment
            memory.give_back(again)
        return lock(descriptor, kind)

    monkeypatch.setattr(shm, "_lock_reading", overtaken)
    with pytest.raises(FileNotFoundError):
        open_segment(held.segment.name, SIZE)


def test_readers_that_race_a_publisher_see_one_version_or_none(memory: PublicationMemory) -> None:
    announced, ends, torn, seen = [""], time.monotonic() + 2.0, [], set()

    def read() -> None:
        while time.monotonic() < ends:
            try:
                mapped = open_segment(announced[0], SIZE)
            except (FileNotFoundError, ValueError):
                continue
            version = int(mapped[0])
            seen.add(version)
            for _ in range(3):
                if not mapped.eq(version).all():
                    torn.append(version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    version = 0
    while time.monotonic() < ends:
        version = (version + 1) % 256
        held = publish(memory, version)
        announced[0] = held.segment.name
        if version % 8 == 0:
            time.sleep(0.001)
        drop(memory, held)
    for reader in readers:
        reader.join()
    assert not torn
    assert len(seen) > 3


def test_memory_of_another_size_is_let_go(memory: PublicationMemory) -> None:
    before = len(segments_of(os.getpid()))
    drop(memory, publish(memory, 1))
    held = memory.take(2 * SIZE, CPU)
    assert len(segments_of(os.getpid())) == before + 1
    # What comes back after the end is not kept.
    memory.close()
    drop(memory, held)
    assert len(segments_of(os.getpid())) == before


def test_a_gpus_memory_is_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, device = PublicationMemory(), torch.device("cuda", 0)
    with FakeStreams(monkeypatch) as cuda:
        for _ in range(4):
            drop(memory, memory.take(SIZE, device))
        assert (cuda.num_locks, len(cuda.locked)) == (1, 1)
        memory.close()
        assert not cuda.locked
