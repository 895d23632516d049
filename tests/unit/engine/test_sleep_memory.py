"""Tests of the memory of sleeping roles, on fake streams that are as late as they may."""

from __future__ import annotations

import pytest
import torch
from support.fake_streams import FakeStreams
from torch import nn

from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.sleep_memory import SleepMemory, move_module, replace_tensors

# No tensor can be made on a fake GPU: those of the CPU stand for its own.
GPU = torch.device("cpu")


def some_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(8, 6, generator=generator)
    return [
        wide[:, 1:4],  # strided, as a weight within a generation tensor is
        torch.randn(5, generator=generator).bfloat16(),
        torch.empty(0, 3),
        torch.tensor(seed),
    ]


def test_the_same_bits_come_back_through_memory_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, addresses = SleepMemory(), set()
    for seed in range(3):
        tensors = some_tensors(seed)
        with FakeStreams(monkeypatch) as cuda:
            asleep = memory.to_host(tensors)
        addresses.add(asleep[0].data_ptr())
        assert cuda.log == ["follow", *["copy"] * 4]
        for tensor, rested in zip(tensors, asleep, strict=True):
            # Already here, though nothing waited but the call itself.
            assert torch.equal(rested, tensor)
            assert rested.dtype == tensor.dtype
        with FakeStreams(monkeypatch) as cuda:
            awake = memory.to_device(asleep, GPU)
        assert cuda.log == ["follow", *["copy"] * 4]
        for rested in asleep:
            rested.zero_()
        assert all(map(torch.equal, awake, tensors))
    assert len(addresses) == 1


def test_what_sleeps_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SleepMemory()
    with FakeStreams(monkeypatch):
        first = memory.to_host(some_tensors(0))
        second = memory.to_host(some_tensors(1))
    for seed, asleep in enumerate((first, second)):
        assert all(map(torch.equal, asleep, some_tensors(seed)))


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))


def test_a_module_keeps_its_parameters_and_their_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    module, memory = Tied(), SleepMemory()
    weight, before = module.embed.weight, module.embed.weight.detach().clone()
    tensors = [weight, module.get_buffer("scale")]
    with FakeStreams(monkeypatch):
        asleep = memory.to_host([local_part(one.detach()) for one in tensors])
        replace_tensors(module, dict(zip(map(id, tensors), asleep, strict=True)), GPU)
    assert module.head.weight is module.embed.weight is weight
    assert weight.data_ptr() == asleep[0].data_ptr()
    assert torch.equal(weight, before)
    assert float(module.get_buffer("scale")) == 2.0


def test_nothing_moves_where_it_is_already() -> None:
    assert move_module(Tied(), torch.device("cpu"), SleepMemory()) == 0
