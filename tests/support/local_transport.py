"""A transport between threads of one process: the simplest one that keeps the contract."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from rolemesh.engine.transport.base import Deadline, Exchange, Message, Transport


class _Parcel:
    """A message that its receiver has yet to copy."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.is_taken = False


class LocalHub:
    """Where the ranks of one process meet. Shared by their threads.

    Example: `hub = LocalHub(4)`, then one thread each with `hub.transport(rank)`.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: give at least 1")
        self.world_size = world_size
        self.changed = threading.Condition()
        self.parcels: defaultdict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)
        """By (sender, receiver), oldest first; guarded by `changed`."""
        self.gone: dict[int, str] = {}
        """Ranks that take part no more, and why; guarded by `changed`."""

    def transport(self, rank: int) -> LocalTransport:
        """The end of one rank."""
        return LocalTransport(self, rank)


class LocalTransport(Transport):
    """A rank's end of a `LocalHub`; the receiver copies straight out of the sender's buffer."""

    name = "local memory"

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(rank, hub.world_size)
        self._hub = hub

    def abort(self) -> None:
        """Gives up; peers that wait for this rank fail at once."""
        super().abort()
        self._leave("it gave up")

    def close(self) -> None:
        """Leaves the hub."""
        self._fail("closed")
        self._leave("it closed its transport")

    def _leave(self, why: str) -> None:
        with self._hub.changed:
            self._hub.gone.setdefault(self.rank, why)
            self._hub.changed.notify_all()

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        parcels = []
        with self._hub.changed:
            for message in sends:
                parcel = _Parcel(message.buffer)
                self._hub.parcels[self.rank, message.peer].append(parcel)
                self._count_sent(message.buffer.numel(), is_control)
                parcels.append((message.peer, parcel))
            self._hub.changed.notify_all()
        return _LocalExchange(self, self._hub, parcels, receives, label, is_control)


class _LocalExchange(Exchange):
    def __init__(
        self,
        transport: LocalTransport,
        hub: LocalHub,
        sends: list[tuple[int, _Parcel]],
        receives: Sequence[Message],
        label: str,
        is_control: bool,
    ) -> None:
        self._transport = transport
        self._hub = hub
        self._sends = sends
        self._receives = deque(receives)
        self._label = label
        self._is_control = is_control

    def wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        while self._receives:
            message = self._receives[0]
            self._receive(message, deadline)
            self._receives.popleft()
        for peer, parcel in self._sends:
            with self._hub.changed:
                while not parcel.is_taken:
                    self._pause(peer, deadline)

    def _receive(self, message: Message, deadline: Deadline) -> None:
        queue = self._hub.parcels[message.peer, self._transport.rank]
        with self._hub.changed:
            while not queue:
                self._pause(message.peer, deadline)
            parcel = queue.popleft()
        if parcel.buffer.numel() != message.buffer.numel():
            self._fail(
                f"it sent {parcel.buffer.numel()} bytes where {message.buffer.numel()} are "
                "expected",
                message.peer,
                deadline,
            )
        message.buffer.copy_(parcel.buffer)
        self._transport._count_received(message.buffer.numel(), self._is_control)
        with self._hub.changed:
            parcel.is_taken = True
            self._hub.changed.notify_all()

    def _pause(self, peer: int, deadline: Deadline) -> None:
        """Waits for a change; called with `changed` held."""
        if peer in self._hub.gone:
            self._fail(self._hub.gone[peer], peer, deadline)
        if not self._hub.changed.wait(deadline.remaining_s) and deadline.is_over:
            self._fail("it did not do its part in time", peer, deadline)

    def _fail(self, cause: str, peer: int, deadline: Deadline) -> None:
        self._transport.abort()
        raise self._transport.failure(cause, peer, self._label, seconds=deadline.elapsed_s)
