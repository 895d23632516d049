"""Tests of host memory that a GPU copies to and from, on fake streams."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from support.fake_streams import FakeStreams

from rolemesh.engine.hardware.pinned_memory import PinnedMemory, pin

GPU = torch.device("cuda", 0)
TENSORS = [
    torch.zeros(3, 5),
    torch.zeros(7, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.zeros((), dtype=torch.int64),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    return FakeStreams(monkeypatch)


def test_places_are_like_their_tensors_and_apart(cuda: FakeStreams) -> None:
    places = PinnedMemory(GPU).places(TENSORS)
    for number, place in enumerate(places):
        assert place.is_contiguous()
        place.fill_(number)
    for number, (place, tensor) in enumerate(zip(places, TENSORS, strict=True)):
        assert (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
        assert bool((place == number).all())


def test_memory_is_locked_once_and_unlocked_before_it_goes(cuda: FakeStreams) -> None:
    memory = PinnedMemory(GPU)
    first = memory.places(TENSORS)
    assert list(cuda.locked) == [first[0].data_ptr()]
    again = memory.places(TENSORS[:2])
    assert again[0].data_ptr() == first[0].data_ptr()
    assert cuda.num_locks == 1
    # More than there is: the old memory is unlocked, the new one locked.
    larger = memory.places([torch.zeros(1 << 16)])
    assert cuda.locked == {larger[0].data_ptr(): 4 << 16}
    larger[0].fill_(5)
    del memory
    gc.collect()
    assert not cuda.locked
    assert bool((larger[0] == 5).all())


def test_a_cpu_locks_nothing(cuda: FakeStreams) -> None:
    PinnedMemory(torch.device("cpu")).places(TENSORS)
    pin(torch.zeros(8, dtype=torch.uint8), torch.device("cpu"))()
    assert cuda.num_locks == 0


def test_memory_that_cannot_be_locked_is_used_all_the_same_and_the_error_taken_back(
    cuda: FakeStreams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def ones(size: int, *, device: torch.device) -> torch.Tensor:
        # What torch does after a kernel: it raises the error that CUDA has kept.
        asked.append(device)
        raise RuntimeError("CUDA error: fake error 2")

    monkeypatch.setattr(torch, "ones", ones)
    cuda.lock_error = 2
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(GPU)
        (place,) = memory.places([torch.zeros(4)])
    assert asked == [GPU]
    assert "could not be locked (fake error 2)" in caplog.text
    assert "memlock" in caplog.text
    place.fill_(1)
    del memory  # unlocks nothing, which would be an error of its own
