"""One suite for all transports: what is received is what was sent, counted, or a clear error."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankContext, RankPool
from support.transport_ranks import (
    SLOT_BYTES,
    THREADED,
    cluster,
    process_transport,
)

from rolemesh.engine.transport.base import Message, TransferFailedError, Transport
from rolemesh.engine.transport.rings.process_memory import MemorySlots

WAIT_S = 240.0
"""What is right ends long before, also where forty others want the same two cores."""
PROMPT_S = 30.0
SHORT_S = 0.5
LARGE = 5 * SLOT_BYTES + 3
SIZES = (1, 7, SLOT_BYTES, SLOT_BYTES + 1, LARGE)


def content(round_: int, source: int, target: int, num_bytes: int) -> torch.Tensor:
    """What `source` sends to `target` in a round; differs in every byte's neighbourhood."""
    start = 31 * source + 17 * target + 7 * round_
    return ((torch.arange(num_bytes) * 3 + start) % 251).to(torch.uint8)


def size_of(round_: int, source: int, target: int) -> int:
    return SIZES[(round_ + source + 2 * target) % len(SIZES)]


def takes_part(round_: int, source: int, target: int) -> bool:
    """Every pair in some rounds, and rounds in which a rank has nothing to do."""
    return source != target and (round_ + source * target) % 3 != 0


# --- what each rank does; also run in processes of their own --------------------------------


def many_rounds(transport: Transport, num_rounds: int) -> tuple[int, int]:
    """All pairs, uneven sizes; returns the payload bytes (sent, received) by its own count."""
    rank, size = transport.rank, transport.world_size
    sent_bytes = received_bytes = 0
    for round_ in range(num_rounds):
        sends = [
            Message(peer, content(round_, rank, peer, size_of(round_, rank, peer)))
            for peer in range(size)
            if takes_part(round_, rank, peer)
        ]
        receives = [
            Message(peer, torch.zeros(size_of(round_, peer, rank), dtype=torch.uint8))
            for peer in range(size)
            if takes_part(round_, peer, rank)
        ]
        transport.exchange(sends, receives, label=f"round {round_}").wait(WAIT_S)
        for message in receives:
            expected = content(round_, message.peer, rank, message.buffer.numel())
            assert torch.equal(message.buffer, expected)
        sent_bytes += sum(message.buffer.numel() for message in sends)
        received_bytes += sum(message.buffer.numel() for message in receives)
    assert (transport.sent_bytes, transport.received_bytes) == (sent_bytes, received_bytes)
    return sent_bytes, received_bytes


def overlapping_rounds(transport: Transport) -> None:
    """The second round starts before the first is waited for; two messages to each peer."""
    rank = transport.rank
    peers = [peer for peer in range(transport.world_size) if peer != rank]
    rounds = []
    for round_ in range(2):
        receives = [
            Message(peer, torch.zeros(LARGE + part, dtype=torch.uint8))
            for peer in peers
            for part in range(2)
        ]
        sends = [
            Message(peer, content(2 * round_ + part, rank, peer, LARGE + part))
            for peer in peers
            for part in range(2)
        ]
        rounds.append((transport.exchange(sends, receives), receives))
    for round_, (exchange, receives) in enumerate(rounds):
        exchange.wait(WAIT_S)
        for number, message in enumerate(receives):
            part = number % 2
            expected = content(2 * round_ + part, message.peer, rank, LARGE + part)
            assert torch.equal(message.buffer, expected)


def control_round(transport: Transport) -> None:
    peer = 1 - transport.rank
    out, into = torch.ones(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    transport.exchange([Message(peer, out)], [Message(peer, into)], is_control=True).wait(WAIT_S)
    assert torch.equal(into, out)
    assert (transport.sent_bytes, transport.received_bytes) == (0, 0)


# --- ranks as threads -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", THREADED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_arrives_is_what_was_sent_and_every_byte_is_counted(
    kind: str, world_size: int
) -> None:
    with cluster(kind, world_size) as ranks:
        totals = ranks.run(many_rounds, 10)
        assert sum(sent for sent, _ in totals) == sum(received for _, received in totals) > 0
        ranks.fabric.check_pairing()


@pytest.mark.parametrize("kind", THREADED)
def test_rounds_may_overlap_and_messages_to_a_peer_keep_their_order(kind: str) -> None:
    with cluster(kind, 3) as ranks:
        ranks.run(overlapping_rounds)
        ranks.fabric.check_pairing()


@pytest.mark.parametrize("kind", THREADED)
def test_control_rounds_are_counted_apart(kind: str) -> None:
    with cluster(kind, 2) as ranks:
        ranks.run(control_round)


@pytest.mark.parametrize("kind", THREADED)
def test_a_round_without_messages_ends_at_once(kind: str) -> None:
    with cluster(kind, 2) as ranks:
        ranks.transports[0].exchange([], []).wait(WAIT_S)


@pytest.mark.parametrize("kind", THREADED)
@pytest.mark.parametrize(
    ("peer", "buffer", "complaint"),
    [
        (0, torch.ones(4, dtype=torch.uint8), "this rank itself"),
        (2, torch.ones(4, dtype=torch.uint8), "give 0 to 1"),
        (1, torch.ones(0, dtype=torch.uint8), "leave it out"),
        (1, torch.ones(4), "give contiguous uint8"),
        (1, torch.ones(8, dtype=torch.uint8)[::2], "give contiguous uint8"),
    ],
    ids=["itself", "nobody", "empty", "other dtype", "strided"],
)
def test_a_message_that_cannot_travel_is_refused(
    kind: str, peer: int, buffer: torch.Tensor, complaint: str
) -> None:
    with cluster(kind, 2) as ranks, pytest.raises(ValueError, match=complaint):
        ranks.transports[0].exchange([Message(peer, buffer)], [])


@pytest.mark.parametrize("kind", THREADED)
def test_a_peer_that_does_nothing_is_named_when_the_time_is_over(kind: str) -> None:
    with cluster(kind, 3) as ranks:
        transport = ranks.transports[0]
        into = torch.zeros(LARGE, dtype=torch.uint8)
        exchange = transport.exchange([], [Message(2, into)], label="bucket 3 of 7")
        with pytest.raises(TransferFailedError, match="bucket 3 of 7 with rank 2") as caught:
            exchange.wait(SHORT_S)
        assert (caught.value.rank, caught.value.peer) == (0, 2)
        assert caught.value.seconds >= SHORT_S
        assert (into == 0).all()
        with pytest.raises(TransferFailedError, match="failed before"):
            transport.exchange([], [Message(2, into)])


@pytest.mark.parametrize("kind", ["local", "memory", "shm", "cuda_ipc"])
def test_a_peer_that_gives_up_ends_the_wait_at_once(kind: str) -> None:
    with cluster(kind, 2) as ranks:
        into = torch.zeros(LARGE, dtype=torch.uint8)
        exchange = ranks.transports[0].exchange([], [Message(1, into)])
        ranks.transports[1].abort()
        with pytest.raises(TransferFailedError, match=r"with rank 1 .*gave up") as caught:
            exchange.wait(WAIT_S)
        assert caught.value.seconds < PROMPT_S


@pytest.mark.parametrize("kind", ["local", "memory", "shm", "cuda_ipc"])
def test_a_message_of_another_size_is_an_error_and_not_data(kind: str) -> None:
    def rank(transport: Transport) -> str:
        if transport.rank == 1:
            exchange = transport.exchange([Message(0, torch.ones(9, dtype=torch.uint8))], [])
        else:
            exchange = transport.exchange([], [Message(1, torch.zeros(8, dtype=torch.uint8))])
        with pytest.raises(TransferFailedError) as caught:
            exchange.wait(WAIT_S)
        return str(caught.value)

    with cluster(kind, 2) as ranks:
        messages = ranks.run(rank)
    assert "it sent 9 bytes where 8 are expected" in messages[0]


# --- out of the sender's own memory ---------------------------------------------------------


def bytes_of(*shape: int) -> torch.Tensor:
    """uint8 of a shape, none like its neighbours."""
    return content(0, 0, 1, int(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # More rows than one call takes, of other lengths on either side.
        (bytes_of(3000, 6)[:, 1:5], bytes_of(2500, 9)[:2000, 3:]),
        (bytes_of(4, 9, 5)[1:3, 2:7, :4], bytes_of(40)),
        (bytes_of(1 << 20), bytes_of(1025, 1028)[:1024, :1024]),
        (bytes_of(2, 3)[:, :1], bytes_of(1, 2, 1)),
    ],
    ids=["rows", "boxes", "one run to many", "single bytes"],
)
def test_views_of_rows_travel_without_being_packed(
    source: torch.Tensor, target: torch.Tensor
) -> None:
    before = target.clone()
    whole = target if target._base is None else target._base
    around = whole.clone()
    with cluster("memory", 2) as ranks:
        sent = ranks.transports[1].exchange([Message(0, source)], [])
        ranks.transports[0].exchange([], [Message(1, target)]).wait(WAIT_S)
        sent.wait(WAIT_S)
        copied = [transport.copied_bytes for transport in ranks.transports]
    assert torch.equal(target.reshape(-1), source.reshape(-1))
    assert copied == [source.numel(), 0]
    target.copy_(before)
    assert torch.equal(whole, around)  # nothing beside the view was written


@pytest.mark.parametrize("kind", ["local", "shm"])
def test_other_transports_refuse_views(kind: str) -> None:
    with cluster(kind, 2) as ranks, pytest.raises(ValueError, match="give contiguous uint8"):
        ranks.transports[0].exchange([Message(1, bytes_of(4, 4)[:, :2])], [])


@pytest.mark.parametrize("is_freed", [False, True])
def test_what_was_read_while_the_sender_gave_up_is_no_message(
    is_freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster("memory", 2) as ranks:
        read = MemorySlots.read

        def read_late(slots: MemorySlots, peer: int, slot: int, target: torch.Tensor) -> None:
            ranks.transports[1].abort()
            if is_freed:
                raise OSError(errno.EFAULT, "Bad address")
            read(slots, peer, slot, target)

        monkeypatch.setattr(MemorySlots, "read", read_late)
        ranks.transports[1].exchange([Message(0, bytes_of(8))], [])
        exchange = ranks.transports[0].exchange([], [Message(1, bytes_of(8))])
        with pytest.raises(TransferFailedError, match=r"with rank 1 .*gave up"):
            exchange.wait(WAIT_S)
        assert ranks.transports[0].received_bytes == 0


# --- ranks as processes ---------------------------------------------------------------------


def all_patterns(context: RankContext, kind: str) -> tuple[int, int]:
    with process_transport(context, kind) as transport:
        counted = many_rounds(transport, 10)
        overlapping_rounds(transport)
        return counted


def lose_a_rank(context: RankContext, kind: str) -> str:
    """Rank 2 is killed between two rounds; the others' error."""
    with process_transport(context, kind) as transport:
        many_rounds(transport, 2)
        if context.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(TransferFailedError) as caught:
            megabytes_to_all(transport, 20)
        assert caught.value.seconds < PROMPT_S
        return f"{caught.value.peer} {caught.value}"


def process_id(context: RankContext) -> int:
    return os.getpid()


def megabytes_to_all(transport: Transport, num_rounds: int) -> None:
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    for number in range(num_rounds):
        transport.exchange(
            [Message(peer, torch.ones(1 << 20, dtype=torch.uint8)) for peer in peers],
            [Message(peer, torch.zeros(1 << 20, dtype=torch.uint8)) for peer in peers],
            label=f"bucket {number}",
        ).wait(WAIT_S)


@pytest.mark.parametrize("kind", ["gloo", "memory", "shm", "host memory", "pairs"])
def test_processes_exchange_over_many_rounds(kind: str, rank_pool: RankPool) -> None:
    totals = rank_pool.run(all_patterns, 4, kind)
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals) > 0


def silent_rank_of_pairs(context: RankContext) -> str:
    """Rank 1 stays away for longer than rank 0's deadline."""
    with process_transport(context, "pairs") as transport:
        store = context.store("turns")
        if context.rank == 1:
            store.get("rank 0 is done")
            return ""
        exchange = transport.exchange([], [Message(1, torch.zeros(LARGE, dtype=torch.uint8))])
        with pytest.raises(TransferFailedError, match="torch reports") as caught:
            exchange.wait(SHORT_S)
        with pytest.raises(TransferFailedError, match="failed before"):
            transport.exchange([], [Message(1, torch.zeros(1, dtype=torch.uint8))])
        store.set("rank 0 is done", "1")
        assert caught.value.seconds < PROMPT_S
        return str(caught.value)


def test_a_round_of_torch_ends_at_its_deadline(rank_pool: RankPool) -> None:
    assert "its peers over torch's NCCL" in rank_pool.run(silent_rank_of_pairs, 2)[0]


def silent_rank(context: RankContext, kind: str) -> str:
    """Rank 1 stays away for longer than rank 0's deadline."""
    with process_transport(context, kind) as transport:
        store = context.store("turns")
        if context.rank == 1:
            store.get("rank 0 is done")
            return ""
        exchange = transport.exchange([], [Message(1, torch.zeros(LARGE, dtype=torch.uint8))])
        with pytest.raises(TransferFailedError, match="did not do its part in time") as caught:
            exchange.wait(SHORT_S)
        store.set("rank 0 is done", "1")
        return str(caught.value)


def send_that_breaks_late(context: RankContext) -> str:
    """Torch's send takes longer than a second and then says that the connection broke."""

    def broken_send(*_: object, **__: object) -> None:
        time.sleep(SHORT_S + 1.0)
        raise RuntimeError("Connection reset by peer")

    with (
        process_transport(context, "gloo") as transport,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(dist, "isend", broken_send)
        sends = [Message(1 - context.rank, torch.zeros(1, dtype=torch.uint8))]
        with pytest.raises(TransferFailedError) as caught:
            transport.exchange(sends, [])
    return str(caught.value)


def test_a_send_that_breaks_late_is_told_as_broken(rank_pool: RankPool) -> None:
    for message in rank_pool.run(send_that_breaks_late, 2):
        assert "the connection broke" in message
        assert "Connection reset by peer" in message


@pytest.mark.parametrize("kind", ["gloo", "memory", "shm"])
def test_the_deadline_of_a_wait_holds_between_processes(kind: str, rank_pool: RankPool) -> None:
    assert "with rank 1" in rank_pool.run(silent_rank, 2, kind)[0]


@pytest.mark.parametrize("kind", ["gloo", "memory", "shm"])
def test_a_killed_rank_is_named_and_leaves_nothing_in_shared_memory(
    kind: str, rank_pool: RankPool
) -> None:
    pids = rank_pool.run(process_id, 3)
    outcomes = rank_pool.outcomes(lose_a_rank, 3, kind)
    assert "died" in str(outcomes[2].failure)
    assert [outcomes[rank].failure for rank in (0, 1)] == [None, None]
    reports = [str(outcomes[rank].value) for rank in (0, 1)]
    # Whoever notices first gives up, and the other may see that first: one names the dead rank.
    assert any(report.startswith("2 ") for report in reports), reports
    own = [f"rolemesh-{pid}-" for pid in pids]
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(own))]
