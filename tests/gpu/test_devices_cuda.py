"""Each rank works on its own GPU, on every thread that selects it. Not run on a GPU yet."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.rank_processes import RankContext, run_ranks

from rolemesh.engine.hardware.devices import free_bytes, give_back_memory
from rolemesh.engine.hardware.memory import PhaseMemory
from rolemesh.services.runtime.ranks.device import rank_device, select_device

pytestmark = pytest.mark.gpu

TIMEOUT_S = 200.0
HELD = 256 << 20


def devices_of_threads(at: RankContext) -> list[int]:
    """The current device of this thread and of a new one, each after it has selected."""
    os.environ["LOCAL_RANK"] = str(at.rank)
    found: list[int] = []

    def look() -> None:
        select_device()
        found.append(torch.empty(1, device="cuda").device.index)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


def test_both_threads_of_each_rank_work_on_its_gpu() -> None:
    count = torch.cuda.device_count()
    found = run_ranks(devices_of_threads, count, timeout_s=TIMEOUT_S)
    assert found == [[rank, rank] for rank in range(count)]


def peak_of_a_first_phase(at: RankContext) -> int:
    """What a rank above 0 does first: it measures."""
    os.environ["LOCAL_RANK"] = str(at.rank)
    with PhaseMemory(str(rank_device())) as memory:
        torch.empty(HELD, dtype=torch.uint8, device=rank_device())
    return memory.peak_bytes


def test_memory_is_measured_though_nothing_has_started_cuda() -> None:
    for peak in run_ranks(peak_of_a_first_phase, torch.cuda.device_count(), timeout_s=TIMEOUT_S):
        assert peak >= HELD


def test_looking_for_the_ranks_device_starts_no_cuda() -> None:
    code = (
        "import torch\n"
        "from rolemesh.services.runtime.ranks.device import rank_device\n"
        "print(rank_device(), torch.cuda.is_initialized())\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    assert said.stdout.split() == ["cuda:0", "False"]


def test_given_back_memory_is_free_for_other_processes() -> None:
    device = torch.device("cuda", 0)
    give_back_memory(device)
    before = free_bytes(device)
    held = torch.empty(HELD, dtype=torch.uint8, device=device)
    assert free_bytes(device) <= before - HELD
    del held
    # Torch keeps it.
    assert free_bytes(device) <= before - HELD
    give_back_memory(device)
    assert free_bytes(device) > before - HELD // 2
