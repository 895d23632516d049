"""NCCL's calls, held to its rules by a fake; and the offers that ranks exchange before."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from support.fake_nccl import FakeFabric, FakeNccl, FakeQueue
from support.transport_ranks import run_threads

from rolemesh.engine.transport.base import Message, TransferFailedError
from rolemesh.engine.transport.groups.nccl import (
    NcclTransport,
    decode_unique_id,
    load_nccl,
)
from rolemesh.engine.transport.rendezvous import OfferInvalidError, encode_offer

WAIT_S = 60.0
SHORT_S = 0.3


def make(
    count: int, *, versions: tuple[int, ...] = ()
) -> tuple[list[NcclTransport], list[FakeNccl], list[FakeQueue]]:
    fabric = FakeFabric()
    numbers = versions or (23007,) * count
    modules = [FakeNccl(fabric, version=each) for each in numbers]
    queues = [FakeQueue() for _ in range(count)]
    transports = [
        NcclTransport(rank, count, queue=queues[rank], launch_timeout_s=SHORT_S, nccl=module)
        for rank, module in enumerate(modules)
    ]
    return transports, modules, queues


def connect(transports: list[NcclTransport]) -> None:
    offers = [transport.offer for transport in transports]
    run_threads(len(transports), lambda rank: transports[rank].connect(offers, timeout_s=WAIT_S))


def zeros(size: int = 8) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_the_unique_id_of_cupy_makes_a_communicator() -> None:
    transports, modules, _ = make(2)
    connect(transports)
    assert len(modules[0].fabric.members) == 1


def test_a_unique_id_survives_the_way_and_no_other_text_is_taken_for_one() -> None:
    raw = bytes(range(128, 256))
    assert decode_unique_id(raw.hex()) == raw
    with pytest.raises(OfferInvalidError, match="has 2 bytes"):
        decode_unique_id("ffff")
    with pytest.raises(OfferInvalidError, match="not hex"):
        decode_unique_id("zz")


def test_versions_are_compared_before_anything_is_initialized() -> None:
    transports, modules, _ = make(2, versions=(23007, 22803))
    offers = [transport.offer for transport in transports]
    with pytest.raises(OfferInvalidError, match="rank 1 has NCCL 22803, rank 0 has 23007"):
        transports[0].connect(offers, timeout_s=WAIT_S)
    assert not modules[0].fabric.members


def test_an_initialization_that_hangs_ends_at_the_deadline_and_says_to_end_the_process() -> None:
    transports, _, _ = make(2)
    offers = [transport.offer for transport in transports]
    with pytest.raises(TransferFailedError, match="end this process"):
        transports[0].connect(offers, timeout_s=SHORT_S)
    with pytest.raises(TransferFailedError, match="failed before"):
        transports[0].exchange([], [Message(1, zeros())])


def test_a_round_is_one_group_behind_the_callers_work_and_before_its_mark() -> None:
    transports, modules, queues = make(3)
    connect(transports)

    def swap(rank: int) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        transports[rank].exchange(
            [Message(peer, zeros()) for peer in peers], [Message(peer, zeros()) for peer in peers]
        ).wait(WAIT_S)

    run_threads(3, swap)
    assert [module.num_groups for module in modules] == [1, 1, 1]
    assert all(queue.calls == ["wait_for_caller", "mark"] for queue in queues)
    modules[0].fabric.check_pairing()


def test_an_aborted_round_ends_without_an_error_of_nccl_and_is_an_error_here() -> None:
    transports, _, queues = make(2)
    connect(transports)
    into = zeros()
    exchange = transports[0].exchange([], [Message(1, into)])
    transports[0].abort()
    # As NCCL: the operation returns, and the mark is reached, with nothing received.
    while queues[0].num_done == 0:
        threading.Event().wait(0.001)
    with pytest.raises(TransferFailedError, match="partial"):
        exchange.wait(WAIT_S)
    assert transports[0].received_bytes == 0


def test_an_error_that_nccl_reports_ends_the_wait() -> None:
    transports, modules, _ = make(2)
    connect(transports)
    exchange = transports[0].exchange([], [Message(1, zeros())])
    modules[0].async_error = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
    with pytest.raises(TransferFailedError, match="remote process exited"):
        exchange.wait(WAIT_S)


def test_a_launch_that_blocks_is_aborted_by_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    transports, modules, _ = make(2)
    connect(transports)
    communicator = transports[0]._communicator
    end = modules[0].groupEnd

    def blocked() -> None:
        # As NCCL while it connects to a peer that is gone: until the communicator is aborted.
        with modules[0].fabric.changed:
            while not communicator.is_aborted:
                modules[0].fabric.changed.wait()
        end()

    monkeypatch.setattr(modules[0], "groupEnd", blocked)
    with pytest.raises(TransferFailedError, match="could not be started in time") as caught:
        transports[0].exchange([], [Message(1, zeros())], label="bucket 1 of 2")
    assert caught.value.peer == 1


def test_an_error_of_a_call_closes_the_group_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    transports, modules, _ = make(2)
    connect(transports)
    communicator = transports[0]._communicator

    def refuse(*_: object) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

    monkeypatch.setattr(communicator, "recv", refuse)
    with pytest.raises(TransferFailedError, match="invalid argument"):
        transports[0].exchange([], [Message(1, zeros())])
    assert modules[0].group is None
    assert communicator.is_aborted


def test_closing_destroys_the_communicator_once() -> None:
    transports, _, _ = make(2)
    connect(transports)
    communicator = transports[0]._communicator
    transports[0].close()
    transports[0].close()
    assert communicator.is_destroyed
    assert not communicator.is_aborted


@pytest.mark.parametrize(
    ("offer", "complaint"),
    [
        (b"{" + b" " * 5000, "at most 4096"),
        (b"\xff", "not JSON"),
        (b"[]", "not of kind"),
        (encode_offer("ring", {}), "not of kind"),
        (encode_offer("nccl", {"version": 23007}), "has fields"),
        (encode_offer("nccl", {"version": "2", "unique_id": ""}), "expected int"),
    ],
    ids=["long", "binary", "list", "other transport", "fields", "type"],
)
def test_offers_that_cannot_be_used_are_refused(offer: bytes, complaint: str) -> None:
    transports, _, _ = make(2)
    with pytest.raises(OfferInvalidError, match=complaint):
        transports[0].connect([transports[0].offer, offer], timeout_s=WAIT_S)
    with pytest.raises(OfferInvalidError, match="1 offers for 2 ranks"):
        transports[0].connect([transports[0].offer], timeout_s=WAIT_S)


def test_missing_cupy_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python says that a module cannot be imported.
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    with pytest.raises(OSError, match=r"install rolemesh\[gpu\]"):
        load_nccl()
