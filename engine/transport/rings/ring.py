"""Messages through memory that both ranks can reach: a ring of slots for each ordered pair.

The protocol of three transports, which differ in what the slots are: `shm_ring` (host memory),
`cuda_ipc` (memory of one device) and `process_memory` (they only say where the sender's bytes lie).
The counters always lie in shared host memory.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.engine.transport.base import Deadline, Exchange, Message, Transport
from rolemesh.engine.transport.rendezvous import (
    OfferInvalidError,
    check_offers,
    decode_offer,
    encode_offer,
)
from rolemesh.engine.transport.rings.ring_slots import Copying, Slots
from rolemesh.engine.transport.slots.shm import PeerSegment, Segment, host_identity

_LINE_WORDS = 16
"""int64 words of two cache lines: records begin so far apart that their writers do not collide."""
_WRITTEN, _TAKEN, _LENGTH = 0, 1, 2
"""Chunks put for the peer, chunks taken from it, bytes in each slot (a word for each)."""
_OPEN, _CONNECTED, _GONE = 0, 1, 2
"""The owner's state, the first word behind the records."""

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_LIVENESS_S = 0.05
"""How often the other side's lock is tried while nothing moves."""


class RingTransport(Transport):
    """Copies messages chunk by chunk through slots, in a thread of its own.

    Each rank writes only its own memory and reads the others': chunks put (`written`) and chunks
    taken (`taken`) per peer, as sequence numbers. A slot is free when the receiver has taken what
    was in it; a message is sent when the receiver has taken all of it.

    Example::

        transport = shm_ring_transport(rank, world_size)
        transport.connect(offers_of_all_ranks, timeout_s=60)  # each rank's transport.offer
    """

    def __init__(self, rank: int, world_size: int, slots: Slots, *, slot_bytes: int) -> None:
        """Takes the slots over; they are closed if there can be no transport."""
        # Of each (owner, peer) record.
        self._words = -(-(_LENGTH + slots.num_slots) // _LINE_WORDS) * _LINE_WORDS
        try:
            if platform.machine() != "x86_64":
                # Python has no memory barrier; x86-64 keeps stores in their order by itself.
                raise OSError(f"{slots.name} is for x86-64, not {platform.machine()}: use gloo")
            super().__init__(rank, world_size)
            self._segment = Segment.create(8 * (self._words * world_size + 1))
        except BaseException:
            slots.close()
            raise
        self.name = slots.name
        self.takes_views = slots.takes_views
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._own = np.frombuffer(self._segment.buffer, dtype=np.int64)
        self._peers: dict[int, PeerSegment] = {}
        self._theirs: dict[int, npt.NDArray[np.int64]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._changed = threading.Condition()
        self._busy: set[_RingExchange] = set()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._progress, name=f"rolemesh-ring-{rank}", daemon=True
        )

    @property
    def offer(self) -> bytes:
        """What the other ranks need to know."""
        return encode_offer(
            "ring",
            {
                "counters": self._segment.name,
                "host": host_identity(),
                "handle": self._slots.handle,
                "place": self._slots.place,
                "slot_bytes": self._slot_bytes,
            },
        )

    def connect(self, offers: Sequence[bytes], *, timeout_s: float) -> None:
        """Opens the others' memory and waits until they have opened this rank's.

        Args:
            offers: Of all ranks, by rank.
            timeout_s: Seconds within which all must have come.

        Raises:
            OfferInvalidError: Ranks cannot reach each other's memory, or offers do not fit.
            SegmentInvalidError: An offer names no memory of ours.
            TransferFailedError: A rank did not come in time.
        """
        check_offers(offers, self.world_size)
        deadline = Deadline(timeout_s)
        kinds: dict[str, type[str] | type[int]] = {
            "counters": str,
            "host": str,
            "handle": str,
            "place": str,
            "slot_bytes": int,
        }
        for peer, blob in enumerate(offers):
            if peer == self.rank:
                continue
            offer = decode_offer(blob, "ring", kinds, rank=peer)
            for field, own in (
                ("host", host_identity()),
                ("place", self._slots.place),
                ("slot_bytes", self._slot_bytes),
            ):
                if offer[field] != own:
                    raise OfferInvalidError(
                        f"rank {peer} has {field} {offer[field]!r}, rank {self.rank} {own!r}: "
                        f"{self.name} needs them equal; use gloo or NCCL between hosts"
                    )
            segment = PeerSegment(offer["counters"], 8 * self._own.size)
            self._peers[peer] = segment
            theirs = np.frombuffer(segment.view, dtype=np.int64)
            self._theirs[peer] = theirs
            self._slots.open(peer, offer["handle"])
            own_record = self._own[self._words * peer : self._words * (peer + 1)]
            their_record = theirs[self._words * self.rank : self._words * (self.rank + 1)]
            self._lanes[peer] = _Lane(self, peer, own_record, their_record)
        self._own[-1] = _CONNECTED
        for peer in self._peers:
            while self._theirs[peer][-1] != _CONNECTED:
                cause = self._gone(peer)
                if cause or deadline.is_over:
                    cause = cause or "it did not do its part in time"
                    seconds = deadline.elapsed_s
                    raise self.failure(cause, peer, "its connection", seconds=seconds)
                time.sleep(_LONGEST_PAUSE_S)
        self._segment.forget_name()
        self._slots.all_opened()
        self._thread.start()

    def abort(self) -> None:
        """Gives up; peers that wait for this rank fail at once."""
        super().abort()
        self._stop()

    def close(self) -> None:
        """Ends the thread and lets go of the memory."""
        self._fail("closed")
        self._stop()
        if self._thread.is_alive():
            self._thread.join()
        if not self._is_closed:
            self._is_closed = True
            for segment in self._peers.values():
                segment.close()
            self._slots.close()
            self._segment.unlink()

    def _stop(self) -> None:
        if not self._is_closed:
            self._own[-1] = _GONE
        with self._changed:
            for exchange in self._busy:
                exchange._cause = exchange._cause or (None, "the transport was aborted here")
            self._busy.clear()
            self._changed.notify_all()

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        if not self._lanes:
            raise ValueError("the transport is not connected: call connect first")
        exchange = _RingExchange(self, len(sends) + len(receives), label)
        self._slots.start()
        with self._changed:
            for message in receives:
                part = _PendingMessage(message, exchange, is_control)
                self._lanes[message.peer].receives.append(part)
            for message in sends:
                part = _PendingMessage(message, exchange, is_control)
                self._lanes[message.peer].sends.append(part)
            self._busy.add(exchange)
            self._changed.notify_all()
        return exchange

    def _has_given_up(self, peer: int) -> bool:
        return bool(self._theirs[peer][-1] == _GONE)

    def _gone(self, peer: int) -> str:
        """Why a peer can do no more, or nothing."""
        if self._has_given_up(peer):
            return "it gave up or closed its transport"
        if not self._peers[peer].is_owner_alive():
            return "its process ended"
        return ""

    def _progress(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        checked = time.monotonic()
        while True:
            with self._changed:
                while not self._busy and not self._failure:
                    self._changed.wait()
                if self._failure:
                    return
            try:
                moved = [lane.step() for lane in self._lanes.values()]
            except Exception as error:  # handed to the waiting caller, which raises it
                self._give_up(None, f"{type(error).__name__}: {error}")
                return
            if any(moved):
                pause_s, checked = _SHORTEST_PAUSE_S, time.monotonic()
                continue
            if time.monotonic() - checked > _LIVENESS_S:
                checked = time.monotonic()
                for peer, lane in self._lanes.items():
                    cause = lane.trouble or (self._gone(peer) if lane.is_busy else "")
                    # It may have done its part and left since the last step.
                    if cause and not lane.step():
                        self._give_up(peer, cause)
                        return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, peer: int | None, cause: str) -> None:
        with self._changed:
            for exchange in self._busy:
                exchange._cause = (peer, cause)
        self.abort()


class _PendingMessage:
    """What is left of one message."""

    def __init__(self, message: Message, exchange: _RingExchange, is_control: bool) -> None:
        self.buffer = message.buffer
        self.exchange = exchange
        self.is_control = is_control
        self.position = 0

    def next_chunk(self, slot_bytes: int) -> torch.Tensor:
        if self.buffer.numel() <= slot_bytes:
            return self.buffer
        return self.buffer[self.position : self.position + slot_bytes]


class _Lane:
    """Both directions between this rank and one peer. Owned by the transport's thread."""

    def __init__(
        self,
        transport: RingTransport,
        peer: int,
        own: npt.NDArray[np.int64],
        theirs: npt.NDArray[np.int64],
    ) -> None:
        self._transport = transport
        self._slots = transport._slots
        self._slot_bytes = transport._slot_bytes
        self._num_slots = transport._slots.num_slots
        self._peer = peer
        self._own = own
        self._theirs = theirs
        self._writing: tuple[Copying, int] | None = None
        self._reading: tuple[Copying, int] | None = None
        self._unconfirmed: deque[tuple[int, _PendingMessage]] = deque()
        self.sends: deque[_PendingMessage] = deque()
        self.receives: deque[_PendingMessage] = deque()
        self.trouble = ""

    @property
    def is_busy(self) -> bool:
        """Whether the peer has something to do for this rank."""
        return bool(self.sends or self.receives or self._unconfirmed)

    def step(self) -> bool:
        """Moves at most one chunk each way; says whether anything changed."""
        sent, received = self._send(), self._receive()
        return self._confirm() or sent or received

    def _send(self) -> bool:
        if self._writing is not None:
            copying, length = self._writing
            if not copying.is_done():
                return False
            self._writing = None
            self._publish(length)
            return True
        written = int(self._own[_WRITTEN])
        if not self.sends or written - int(self._theirs[_TAKEN]) >= self._num_slots:
            return False
        chunk = self.sends[0].next_chunk(self._slot_bytes)
        copying_or_done = self._slots.write(self._peer, written % self._num_slots, chunk)
        if copying_or_done is None:
            self._publish(chunk.numel())
        else:
            self._writing = (copying_or_done, chunk.numel())
        return True

    def _publish(self, length: int) -> None:
        part = self.sends[0]
        written = int(self._own[_WRITTEN])
        self._own[_LENGTH + written % self._num_slots] = length
        # Last: the receiver reads slot and length once it sees the new number.
        self._own[_WRITTEN] = written + 1
        self._transport._count_sent(length, part.is_control)
        self._transport._count_copied(length * self._slots.copies_in, part.is_control)
        part.position += length
        if part.position == part.buffer.numel():
            self.sends.popleft()
            self._unconfirmed.append((written + 1, part))

    def _confirm(self) -> bool:
        taken = int(self._theirs[_TAKEN])
        changed = False
        while self._unconfirmed and self._unconfirmed[0][0] <= taken:
            self._finish(self._unconfirmed.popleft()[1])
            changed = True
        return changed

    def _receive(self) -> bool:
        if self._reading is not None:
            copying, length = self._reading
            if not copying.is_done():
                return False
            self._reading = None
            self._take(length)
            return True
        taken = int(self._own[_TAKEN])
        if not self.receives or self.trouble or int(self._theirs[_WRITTEN]) <= taken:
            return False
        chunk = self.receives[0].next_chunk(self._slot_bytes)
        length = int(self._theirs[_LENGTH + taken % self._num_slots])
        if length != chunk.numel():
            self.trouble = f"it sent {length} bytes where {chunk.numel()} are expected"
            return False
        try:
            copying_or_done = self._slots.read(self._peer, taken % self._num_slots, chunk)
        except OSError:
            # A peer that gives up may free what it has offered.
            self.trouble = self._transport._gone(self._peer)
            if not self.trouble:
                raise
            return False
        if copying_or_done is None:
            self._take(length)
        else:
            self._reading = (copying_or_done, length)
        return True

    def _take(self, length: int) -> None:
        part = self.receives[0]
        if not self._slots.copies_in and self._transport._has_given_up(self._peer):
            # The sender kept its memory as it was until it gave up, not longer.
            self.trouble = "it gave up while its memory was read"
            return
        self._own[_TAKEN] += 1
        self._transport._count_received(length, part.is_control)
        self._transport._count_copied(length, part.is_control)
        part.position += length
        if part.position == part.buffer.numel():
            self.receives.popleft()
            self._finish(part)

    def _finish(self, part: _PendingMessage) -> None:
        exchange = part.exchange
        with self._transport._changed:
            exchange._num_left -= 1
            if not exchange._num_left:
                self._transport._busy.discard(exchange)
                self._transport._changed.notify_all()


class _RingExchange(Exchange):
    def __init__(self, transport: RingTransport, num_messages: int, label: str) -> None:
        self._transport = transport
        self._label = label
        self._num_left = num_messages
        self._cause: tuple[int | None, str] | None = None

    def wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        changed = self._transport._changed
        with changed:
            while self._num_left and self._cause is None and not deadline.is_over:
                changed.wait(deadline.remaining_s)
            if not self._num_left:
                return
            if self._cause is None:
                self._cause = (self._slowest(), "it did not do its part in time")
        self._transport.abort()
        peer, cause = self._cause
        raise self._transport.failure(cause, peer, self._label, seconds=deadline.elapsed_s)

    def _slowest(self) -> int | None:
        """A peer that has still to do something in this round."""
        for peer, lane in self._transport._lanes.items():
            waiting = [*lane.receives, *lane.sends, *(part for _, part in lane._unconfirmed)]
            if any(part.exchange is self for part in waiting):
                return peer
        return None
