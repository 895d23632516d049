"""Tests of which transport ranks try, from what they say about where they are."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.engine.transport.selection import (
    Surroundings,
    TransportUnavailableError,
    possible_ways,
)

HOST = "gloo through host memory"
"""What is left when nothing else can be used."""


def at(**changes: Any) -> Surroundings:
    """A rank on a CPU of host a, with changes."""
    fields = {"device": "cpu", "uuid": "", "host": "a", "nccl_shares_devices": False}
    return Surroundings(**{**fields, **changes})


def gpu(uuid: str, **changes: Any) -> Surroundings:
    return at(device="cuda", uuid=uuid, **changes)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([at(), at()], ("process memory", "shared memory", "gloo")),
        ([at(), at(host="b")], ("gloo",)),
        # No shared memory, or no x86-64: an equal "" is no common host.
        ([at(host=""), at(host="")], ("gloo",)),
        ([gpu("1"), gpu("2")], ("NCCL", "torch's NCCL", HOST)),
        ([gpu("1"), gpu("2", host="b")], ("NCCL", "torch's NCCL", HOST)),
        ([gpu("1"), gpu("1")], ("CUDA IPC", HOST)),
        ([gpu("1", nccl_shares_devices=True)] * 2, ("CUDA IPC", "NCCL", HOST)),
        (
            [gpu("1", nccl_shares_devices=True)] * 2 + [gpu("2", nccl_shares_devices=True)],
            ("NCCL", HOST),
        ),
        ([gpu("1", host="", nccl_shares_devices=True)] * 2, ("NCCL", HOST)),
    ],
)
def test_ways_follow_from_hosts_and_devices(
    ranks: list[Surroundings], expected: tuple[str, ...]
) -> None:
    assert possible_ways(ranks) == expected


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([at(), gpu("1")], "lie on cpu, cuda: give all ranks a GPU, or none"),
        ([at(device="mps")] * 2, "lie on mps, mps"),
        ([gpu("1"), gpu("2"), gpu("1")], "ranks 0, 2 share device 1, which NCCL refuses"),
        ([gpu("1", host=""), gpu("1", host="")], "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        # One rank that was not told keeps all of them from it.
        ([gpu("1", host="a", nccl_shares_devices=True), gpu("1", host="b")], "ranks 0, 1 share"),
    ],
)
def test_ranks_without_a_way_are_told_what_is_wrong(
    ranks: list[Surroundings], complaint: str
) -> None:
    with pytest.raises(TransportUnavailableError, match=complaint):
        possible_ways(ranks)
