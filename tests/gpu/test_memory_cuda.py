"""The most device memory that was held while something ran."""

from __future__ import annotations

import pytest
import torch

from rolemesh.engine.hardware.memory import PhaseMemory

pytestmark = pytest.mark.gpu

LARGE = 200_000_000


def test_a_phase_sees_what_it_held_and_the_next_does_not() -> None:
    before = torch.cuda.memory_allocated()
    with PhaseMemory("cuda") as outer:
        with PhaseMemory("cuda") as first:
            torch.empty(LARGE, dtype=torch.uint8, device="cuda")
        with PhaseMemory("cuda") as second:
            torch.empty(LARGE // 4, dtype=torch.uint8, device="cuda")
    # The allocator rounds up to 512 bytes.
    assert 0 <= first.peak_bytes - before - LARGE < 512
    assert 0 <= second.peak_bytes - before - LARGE // 4 < 512
    assert outer.peak_bytes == first.peak_bytes
    assert first.source == "cuda"
    assert first.is_of_phase
