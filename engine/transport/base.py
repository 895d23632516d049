"""Contract of a transport between ranks: grouped rounds, counted bytes, a deadline.

A transport knows ranks and bytes; what the bytes mean is the matter of `engine/weights`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

LOOK_AND_RESTART = "look at that rank's log; the services must be restarted together"


class TransferFailedError(RuntimeError):
    """Bytes did not arrive, or could not be sent. The transport is of no more use.

    Whatever was being received is incomplete: weights built of it are quarantined.
    """

    def __init__(
        self,
        cause: str,
        *,
        rank: int,
        peer: int | None,
        transport: str,
        waited_for: str,
        seconds: float,
        remedy: str = LOOK_AND_RESTART,
    ) -> None:
        self.rank = rank
        """Number of this rank."""
        self.peer = peer
        """The rank that did not do its part; None where no single one is to blame."""
        self.transport = transport
        """Name of the transport."""
        self.waited_for = waited_for
        """What was under way."""
        self.seconds = seconds
        """How long this rank had waited."""
        partner = "its peers" if peer is None else f"rank {peer}"
        super().__init__(
            f"rank {rank} waited {seconds:.1f} s for {waited_for} with {partner} over {transport}: "
            f"{cause}; {remedy}"
        )


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to or from one peer."""

    peer: int
    """The other rank."""
    buffer: torch.Tensor
    """uint8 [n], contiguous, n > 0. Belongs to the exchange until that was waited for. Where the
    transport takes views: of any shape, the last dimension contiguous, sent in row-major order."""


class Exchange(ABC):
    """A round under way. Rounds of a transport are waited for in the order of their start."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Returns once all of the round's buffers are filled and free.

        Args:
            timeout_s: Seconds from now; afterwards the transport is aborted.

        Raises:
            TransferFailedError: A peer vanished, disagrees, or the time is over.
        """


class _Nothing(Exchange):
    """A round in which this rank has no part."""

    def wait(self, timeout_s: float) -> None:
        return


class Transport(ABC):
    """One rank's end of a way between ranks. Owned by one thread.

    Invariant: between two ranks, the n-th message that one sends is the n-th that the other
    receives, over all rounds. A round's sends and receives progress together, so that two ranks
    may send to each other in one round.

    Example, two ranks that swap a thousand bytes::

        theirs = torch.empty(1000, dtype=torch.uint8)
        round = transport.exchange([Message(peer, ours)], [Message(peer, theirs)])
        ...  # compute meanwhile
        round.wait(timeout_s=60)
    """

    name: str
    """Name of the transport in errors and metrics."""
    takes_views: bool = False
    """Whether a message may be a view of rows in a larger tensor: what is sent then needs no
    packing, and what is received lies in its place at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: give 0 to {world_size - 1}")
        self.rank = rank
        """Number of this rank."""
        self.world_size = world_size
        """Ranks in all, this one included."""
        self.sent_bytes = 0
        """Payload handed to the wire."""
        self.received_bytes = 0
        """Payload taken from the wire."""
        self.copied_bytes = 0
        """Payload that this end copied, on its way in and on its way out; rings alone count it."""
        self._failure = ""

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        label: str = "a message",
        is_control: bool = False,
    ) -> Exchange:
        """Starts one round and returns; without messages there is nothing to wait for.

        Args:
            sends: What goes out; several messages to a peer arrive in this order.
            receives: Where what comes in goes, with exactly the sizes that the peers send.
            label: What the round carries, for errors ("bucket 3 of 7").
            is_control: The round is about a transfer and no part of it: its bytes are no payload.

        Raises:
            ValueError: A message to this rank itself, to no rank, or a buffer of another kind.
            TransferFailedError: The transport failed before.
        """
        for message in (*sends, *receives):
            self._check(message)
        if self._failure:
            raise self.failure(
                f"the transport failed before ({self._failure})", None, label, seconds=0.0
            )
        if not sends and not receives:
            return _Nothing()
        return self._start(sends, receives, label, is_control)

    def failure(
        self,
        cause: str,
        peer: int | None,
        waited_for: str,
        *,
        seconds: float,
        remedy: str = LOOK_AND_RESTART,
    ) -> TransferFailedError:
        """An error of this rank's end; arguments as of `TransferFailedError`."""
        return TransferFailedError(
            cause,
            rank=self.rank,
            peer=peer,
            transport=self.name,
            waited_for=waited_for,
            seconds=seconds,
            remedy=remedy,
        )

    def abort(self) -> None:
        """Gives up all rounds under way and refuses further ones. Safe to repeat."""
        self._fail("aborted")

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything. Peers that still wait for this rank fail. Safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        """Starts a round of checked messages."""

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _count_sent(self, num_bytes: int, is_control: bool) -> None:
        self.sent_bytes += 0 if is_control else num_bytes

    def _count_received(self, num_bytes: int, is_control: bool) -> None:
        self.received_bytes += 0 if is_control else num_bytes

    def _count_copied(self, num_bytes: int, is_control: bool) -> None:
        self.copied_bytes += 0 if is_control else num_bytes

    def _check(self, message: Message) -> None:
        if not 0 <= message.peer < self.world_size:
            raise ValueError(f"peer is {message.peer}: give 0 to {self.world_size - 1}")
        if message.peer == self.rank:
            raise ValueError(
                f"peer is {message.peer}, this rank itself: copy in memory, without a transport"
            )
        buffer = message.buffer
        is_flat = buffer.dim() == 1 and buffer.is_contiguous()
        is_view = self.takes_views and buffer.dim() > 1 and buffer.stride(-1) == 1
        if buffer.dtype != torch.uint8 or not (is_flat or is_view):
            raise ValueError(
                f"message with rank {message.peer} is {buffer.dtype} {list(buffer.shape)}: give "
                "contiguous uint8 [n]"
            )
        if buffer.numel() == 0:
            raise ValueError(f"message with rank {message.peer} is empty: leave it out")


class Deadline:
    """A point in time. Example: `Deadline(5.0).remaining_s` is 5.0 and sinks to 0.0."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds above 0")
        self._started = time.monotonic()
        self._timeout_s = timeout_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds until then, never negative."""
        return max(0.0, self._timeout_s - self.elapsed_s)

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.remaining_s == 0.0
