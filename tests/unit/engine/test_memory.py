"""The most memory that was held while something ran."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.fake_cuda import FakeCuda

from rolemesh.engine.hardware import memory as memory_module
from rolemesh.engine.hardware.memory import PhaseMemory

LARGE = 200_000_000
SLACK = 0.05 * LARGE
"""What the interpreter, and other threads of the test's process, may take or give back meanwhile;
the kernel counts resident pages in batches."""

needs_reset = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps its peak"
)


def hold(num_bytes: int) -> None:
    """Touches memory, and gives it back to the system.

    Not malloc's: that may hand out what an earlier test of the process has left resident.
    """
    with mmap.mmap(-1, num_bytes) as pages:
        touched = np.frombuffer(pages, dtype=np.uint8)
        touched.fill(1)
        assert touched[-1]
        del touched


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@needs_reset
def test_a_phase_sees_what_it_held_and_the_next_does_not() -> None:
    before = resident()
    with PhaseMemory() as first:
        hold(LARGE)
    with PhaseMemory() as second:
        hold(LARGE // 4)
    assert abs(first.peak_bytes - before - LARGE) < SLACK
    assert abs(second.peak_bytes - before - LARGE // 4) < SLACK
    assert first.is_of_phase
    assert first.source == "resident"


@needs_reset
def test_an_inner_phase_does_not_hide_what_the_outer_held() -> None:
    before = resident()
    with PhaseMemory() as outer:
        hold(LARGE)
        with PhaseMemory() as inner:
            hold(LARGE // 4)
    assert abs(outer.peak_bytes - before - LARGE) < SLACK
    assert abs(inner.peak_bytes - before - LARGE // 4) < SLACK

    with PhaseMemory() as outer:
        with PhaseMemory() as inner:
            hold(LARGE)
        with PhaseMemory() as last:
            pass
    assert abs(outer.peak_bytes - before - LARGE) < SLACK
    assert abs(inner.peak_bytes - before - LARGE) < SLACK
    assert abs(last.peak_bytes - before) < SLACK


@needs_reset
def test_phases_of_threads_may_overlap() -> None:
    before = resident()
    is_open, may_close = threading.Event(), threading.Event()
    other = PhaseMemory()

    def overlap() -> None:
        with other:
            is_open.set()
            may_close.wait(60)

    with PhaseMemory() as here:
        thread = threading.Thread(target=overlap)
        thread.start()
        is_open.wait(60)
        hold(LARGE)
    with PhaseMemory() as later:
        hold(LARGE // 4)
    may_close.set()
    thread.join()
    assert abs(here.peak_bytes - before - LARGE) < SLACK
    assert abs(later.peak_bytes - before - LARGE // 4) < SLACK
    assert abs(other.peak_bytes - before - LARGE) < SLACK


def test_a_system_that_keeps_its_peak_is_said_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_module, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    with PhaseMemory() as memory:
        hold(LARGE // 4)
    assert not memory.is_of_phase
    assert memory.peak_bytes >= LARGE // 4
    monkeypatch.setattr(memory_module, "_STATUS", tmp_path / "absent" / "status")
    with PhaseMemory() as memory:
        pass
    assert memory.peak_bytes >= LARGE // 4


def test_a_failed_phase_is_closed() -> None:
    with pytest.raises(RuntimeError, match="no"), PhaseMemory() as memory:
        raise RuntimeError("no")
    assert memory.peak_bytes > 0
    assert not memory._gauge._open


def test_a_device_without_a_meter_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'mps': give 'cpu', 'cuda'"):
        PhaseMemory("mps")


def test_a_gpu_is_measured_though_nothing_has_started_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's statistics raise until then, and ranks above 0 ask for nothing else before."""
    cuda = FakeCuda(monkeypatch, num_devices=2)
    monkeypatch.setattr(memory_module, "_gauges", {})
    cuda.used_bytes[1] = LARGE
    with PhaseMemory("cuda:1") as memory:
        pass
    assert memory.peak_bytes == LARGE
    assert memory.source == "cuda"
