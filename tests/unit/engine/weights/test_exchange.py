"""Exchanges between the ranks of two services, as threads: by shared memory, by a fake of NCCL."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fake_nccl import FakeFabric, FakeNccl, FakeQueue
from support.planned_bytes import planned_received
from support.published_layouts import GENERATE, TRAIN, shape_of
from support.transport_ranks import run_threads
from support.weight_ranks import Weights, assert_equal, cut, random_weights

from rolemesh.engine.layout.families import DecoderShape, UnsupportedFamilyError
from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.transport.groups.nccl import NcclTransport
from rolemesh.engine.transport.rendezvous import OfferInvalidError
from rolemesh.engine.transport.selection import Surroundings, TransportUnavailableError
from rolemesh.engine.weights.exchanges import exchange
from rolemesh.engine.weights.exchanges.exchange import ExchangeEnd, exchange_plan
from rolemesh.engine.weights.exchanges.published import (
    Publication,
    plan_taking,
    source_layout,
    target_layout,
)
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.transfer import TransferMismatchError

CPU = torch.device("cpu")


def plan_of(
    train: TrainLayout, generate: TrainLayout, dtype: DtypeName, shape: DecoderShape | None = None
) -> Plan:
    known = shape or shape_of()
    return exchange_plan(known.manifest("float32"), known, train, generate, dtype)


def on_gpu(rank: int, **changes: Any) -> Surroundings:
    """Of a rank with a GPU of its own."""
    usual = {"device": "cuda", "uuid": f"GPU-{rank}", "host": "h", "nccl_shares_devices": False}
    return Surroundings(**{**usual, **changes})


@contextlib.contextmanager
def ends_of(
    plan: Plan, kind: str, surroundings: Callable[[int], Surroundings] = on_gpu
) -> Iterator[list[ExchangeEnd]]:
    """An end for each rank, not connected yet."""
    size, fabric = plan.world_size, FakeFabric()
    with contextlib.ExitStack() as stack:
        ends = []
        for rank in range(size):
            if kind == "shm":
                end = ExchangeEnd(plan, rank, CPU)
            else:
                transport = NcclTransport(rank, size, queue=FakeQueue(), nccl=FakeNccl(fabric))
                end = ExchangeEnd(
                    plan, rank, CPU, surroundings=surroundings(rank), transport=transport
                )
            ends.append(stack.enter_context(end))
        yield ends
        assert fabric.breaches == []


def connect(ends: list[ExchangeEnd]) -> None:
    offers = [end.offer for end in ends]
    run_threads(len(ends), lambda rank: ends[rank].connect(offers, timeout_s=20))


def part(end: ExchangeEnd, held: list[Weights], rank: int, version: int) -> Weights:
    """A rank's part of a transfer: what it takes, nothing where it gives."""
    if rank < len(held):
        end.send(held[rank], policy_version=version)
        return {}
    return dict(end.receive(policy_version=version))


def moved(ends: list[ExchangeEnd], held: list[Weights], version: int) -> list[Weights]:
    """What the taking ranks get, when the others send what they hold."""
    found = run_threads(len(ends), lambda rank: part(ends[rank], held, rank, version))
    return found[len(held) :]


def held_by(plan: Plan, num_givers: int, seed: int) -> list[Weights]:
    whole = random_weights(plan.source.manifest, seed)
    return [cut(plan.source, rank, whole) for rank in range(num_givers)]


def taken_today(
    held: list[Weights], shape: DecoderShape, train: TrainLayout, generate: HybridLayout, dtype: Any
) -> list[Weights]:
    """What the takers fetch of publications."""
    manifest = shape.manifest("float32")
    source = source_layout(manifest, train, dtype, shape)
    target = target_layout(manifest, generate, dtype, shape)
    publications = [
        Publication(source, rank, weights, policy_version=0, memory=None)
        for rank, weights in enumerate(held)
    ]
    taken = []
    for rank in range(len(target.ranks)):
        taking = plan_taking(source, target, rank)
        boxes = {
            giver: [publications[giver].view(copy.parameter, copy.box) for copy in copies]
            for giver, copies in taking.copies.items()
        }
        taken.append(dict(taking.tensors(boxes)))
    return taken


PAIRS = [
    # Every third pair over each transport, and the others as slow tests.
    pytest.param(
        train,
        generate,
        kind,
        id=f"{train} to {generate} by {kind}",
        marks=[] if (first + second + third) % 3 == 0 else pytest.mark.slow,
    )
    for first, train in enumerate(TRAIN)
    for second, generate in enumerate(GENERATE)
    for third, kind in enumerate(("shm", "nccl"))
]


@pytest.mark.parametrize(("train", "generate", "kind"), PAIRS)
def test_takers_get_the_bits_that_they_would_fetch(train: str, generate: str, kind: str) -> None:
    shape, givers, takers = shape_of(), TRAIN[train], GENERATE[generate]
    plan = plan_of(givers, takers.train, "bfloat16", shape)
    with ends_of(plan, kind) as ends:
        connect(ends)
        for version in (3, 4):
            held = held_by(plan, givers.world_size, version)
            found = moved(ends, held, version)
            expected = taken_today(held, shape, givers, takers, "bfloat16")
            for theirs, wanted in zip(found, expected, strict=True):
                assert_equal(theirs, wanted)
        received = sum(end.received_bytes for end in ends)
        assert received == sum(end.sent_bytes for end in ends)
        assert received == 2 * sum(planned_received(plan, rank) for rank in range(plan.world_size))
        assert {end.way for end in ends} == {"shared memory" if kind == "shm" else "NCCL"}


def test_both_ends_plan_alike_whatever_the_order_of_their_parameters() -> None:
    manifest = shape_of().manifest("float32")
    backwards = {name: manifest[name] for name in reversed(manifest)}
    one = TrainLayout()
    plans = [exchange_plan(known, None, one, one, "float32") for known in (manifest, backwards)]
    assert plans[0] == plans[1]
    with pytest.raises(UnsupportedFamilyError, match="2 slices"):
        exchange_plan(manifest, None, one, TrainLayout(tp=2), "float32")


def test_more_ranks_than_may_meet_are_refused_before_anything_is_planned() -> None:
    manifest, most = shape_of().manifest("float32"), exchange.MAX_RANKS
    with pytest.raises(LayoutError, match=f"1 and {most} ranks: at most {most}"):
        exchange_plan(manifest, None, TrainLayout(), TrainLayout(dp=most), "float32")


@pytest.mark.parametrize("kind", ["shm", "nccl"])
def test_another_version_moves_nothing_and_the_exchange_goes_on(kind: str) -> None:
    plan = plan_of(TRAIN["tp2"], TrainLayout(), "float32")
    held = held_by(plan, 2, 1)

    def work(rank: int) -> None:
        with pytest.raises(TransferMismatchError, match="policy_version"):
            part(ends[rank], held, rank, 8 if rank < 2 else 7)

    with ends_of(plan, kind) as ends:
        connect(ends)
        run_threads(3, work)
        assert sum(end.received_bytes for end in ends) == 0
        whole = random_weights(plan.source.manifest, 1)
        assert_equal(moved(ends, held, 8)[0], whole)


def test_a_taker_that_leaves_in_the_middle_ends_all_others_at_once() -> None:
    plan = plan_of(TRAIN["tp2"], TrainLayout(dp=2), "float32")
    held, left = held_by(plan, 2, 1), threading.Event()

    def work(rank: int) -> None:
        if rank == 3:
            ends[rank].close()
            left.set()
            return
        left.wait(20)
        with pytest.raises(TransferFailedError):
            part(ends[rank], held, rank, 1)

    with ends_of(plan, "shm") as ends:
        connect(ends)
        run_threads(4, work)


def test_a_rank_that_never_comes_to_a_transfer_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "TRANSFER_TIMEOUT_S", 0.3)
    plan = plan_of(TrainLayout(), TrainLayout(), "float32")
    with ends_of(plan, "nccl") as ends:
        connect(ends)
        with pytest.raises(TransferFailedError, match=r"rank 0 waited 0\.3 s"):
            ends[0].send(held_by(plan, 1, 1)[0], policy_version=1)
        # The other one, which comes later, hangs no longer than that.
        with pytest.raises(TransferFailedError, match=r"rank 1 waited 0\.3 s"):
            ends[1].receive(policy_version=1)


def test_an_end_that_is_aborted_by_another_thread_stops_waiting() -> None:
    plan = plan_of(TrainLayout(), TrainLayout(), "float32")
    with ends_of(plan, "nccl") as ends:
        connect(ends)
        timer = threading.Timer(0.2, ends[1].abort)
        timer.start()
        with pytest.raises(TransferFailedError, match="partial"):
            ends[1].receive(policy_version=1)


# --- what all ranks refuse alike, before any of them connects ---------------------------------


def refused(ends: list[ExchangeEnd], offers: list[bytes], kind: type[Exception]) -> list[str]:
    """Why each rank refuses."""

    def work(rank: int) -> str:
        with pytest.raises(kind) as caught:
            ends[rank].connect(offers, timeout_s=20)
        return str(caught.value)

    return run_threads(len(ends), work)


def changed(offer: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(offer), **fields}).encode()


PAIR = (TrainLayout(), TrainLayout(), "float32")


@pytest.mark.parametrize(
    ("surroundings", "words"),
    [
        (lambda rank: on_gpu(0), "all ranks are on one GPU"),
        (lambda rank: on_gpu(0, host=str(rank)), "share device GPU-0, which NCCL refuses"),
    ],
    ids=["one GPU", "one GPU, two containers"],
)
def test_ranks_on_one_device_are_refused(
    surroundings: Callable[[int], Surroundings], words: str
) -> None:
    with ends_of(plan_of(*PAIR), "nccl", surroundings) as ends:
        offers = [end.offer for end in ends]
        assert all(words in why for why in refused(ends, offers, TransportUnavailableError))


def test_an_actor_on_a_gpu_and_a_sampler_on_a_cpu_are_refused() -> None:
    plan = plan_of(*PAIR)
    with ends_of(plan, "nccl") as gpu, ends_of(plan, "shm") as cpu:
        ends = [gpu[0], cpu[1]]
        offers = [end.offer for end in ends]
        assert all("lie on cuda, cpu" in why for why in refused(ends, offers, RuntimeError))


def test_processors_of_two_hosts_are_refused() -> None:
    with ends_of(plan_of(*PAIR), "shm") as ends:
        offers = [ends[0].offer, changed(ends[1].offer, host="elsewhere")]
        whys = refused(ends, offers, TransportUnavailableError)
        assert all("different hosts" in why for why in whys)


def test_two_networks_need_an_interface_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    plan = plan_of(*PAIR)
    with ends_of(plan, "nccl") as ends:
        there = changed(ends[1].offer, network="elsewhere")
        whys = refused(ends, [ends[0].offer, there], TransportUnavailableError)
        assert all("kept to loopback on rank 0" in why for why in whys)
    with ends_of(plan, "nccl") as ends:
        connect(ends)  # one host: loopback is enough
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    with ends_of(plan, "nccl") as ends:
        offers = [ends[0].offer, changed(ends[1].offer, network="elsewhere")]
        run_threads(2, lambda rank: ends[rank].connect(offers, timeout_s=20))


def test_ranks_that_take_memory_in_different_ways_are_refused() -> None:
    plan = plan_of(*PAIR)
    with ends_of(plan, "nccl") as ends:
        offers = [ends[0].offer, changed(ends[1].offer, cumem="0")]
        whys = refused(ends, offers, TransportUnavailableError)
        assert all("NCCL_CUMEM_ENABLE is '' and '0'" in why for why in whys)
    with ends_of(plan, "shm") as ends:
        # No matter where there is no GPU.
        offers = [ends[0].offer, changed(ends[1].offer, cumem="0")]
        run_threads(2, lambda rank: ends[rank].connect(offers, timeout_s=20))


def test_another_version_of_nccl_is_refused() -> None:
    plan, fabric = plan_of(*PAIR), FakeFabric()
    ends = [
        ExchangeEnd(
            plan,
            rank,
            CPU,
            surroundings=on_gpu(rank),
            transport=NcclTransport(
                rank, 2, queue=FakeQueue(), nccl=FakeNccl(fabric, version=version)
            ),
        )
        for rank, version in enumerate((22705, 23007))
    ]
    whys = refused(ends, [end.offer for end in ends], OfferInvalidError)
    assert all("install the same version" in why for why in whys)
    assert not fabric.members


def test_a_plan_of_another_model_is_refused_at_the_meeting() -> None:
    plans = [plan_of(*PAIR), plan_of(*PAIR, shape_of(num_hidden_layers=3))]
    with ends_of(plans[0], "shm") as one, ends_of(plans[1], "shm") as other:
        assert one[0].plan_digest != other[0].plan_digest
        ends = [one[0], other[1]]
        whys = refused(ends, [end.offer for end in ends], TransferMismatchError)
        assert all("has plan" in why for why in whys)


def test_an_offer_of_something_else_is_refused() -> None:
    with ends_of(plan_of(*PAIR), "shm") as ends:
        offers = [ends[0].offer, b'{"kind": "exchange"}']
        with pytest.raises(OfferInvalidError, match="offer of rank 1 has fields"):
            ends[0].connect(offers)
        with pytest.raises(OfferInvalidError, match="1 offers for 2 ranks"):
            ends[0].connect(offers[:1])
