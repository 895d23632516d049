"""Slots of memory through which the chunks of a ring go from one rank to another."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

NUM_SLOTS = 2
"""Double-buffered: the receiver empties one while the sender fills the other."""


class Copying(ABC):
    """A copy that was started."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all of its bytes have arrived."""


class Slots(ABC):
    """Where chunks lie between sender and receiver. Owned by one `RingTransport`."""

    name: str
    """Name of the transport."""
    num_slots: int = NUM_SLOTS
    """Slots of each ordered pair of ranks."""
    copies_in: bool = True
    """Whether `write` copies the bytes, so that `read` copies them a second time."""
    takes_views: bool = False
    """Whether messages may be views of rows."""

    @property
    @abstractmethod
    def handle(self) -> str:
        """What a peer needs to read this rank's slots."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Equal for ranks that can reach each other's slots."""

    @abstractmethod
    def open(self, peer: int, handle: str) -> None:
        """Makes a peer's slots readable."""

    def all_opened(self) -> None:  # noqa: B027
        """Every peer has opened the slots: names can go. Not all slots have one."""

    def start(self) -> None:  # noqa: B027
        """A round begins: its buffers are ready once what the caller has queued is done.

        Host memory is ready when the caller is.
        """

    @abstractmethod
    def write(self, peer: int, slot: int, source: torch.Tensor) -> Copying | None:
        """Copies a source, uint8 [bytes], into a slot for a peer; None when it is done already."""

    @abstractmethod
    def read(self, peer: int, slot: int, target: torch.Tensor) -> Copying | None:
        """Copies what a peer wrote for this rank into a target, uint8 [bytes]; None when done."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the memory. Safe to repeat."""
