"""Readers of slots: threads that read a slot while the compute thread goes on."""

from __future__ import annotations

import threading


class SlotGivenUpError(RuntimeError):
    """A slot that a thread reads is let go."""


class SlotReading:
    """A thread's hold on a slot; ends once. Made by `SlotReaders.begin`."""

    def __init__(self, readers: SlotReaders, index: int) -> None:
        self.index = index
        self._readers = readers
        self._is_given_up = threading.Event()

    def check(self) -> None:
        """Raises SlotGivenUpError when the reader is to end; for its signs of progress."""
        if self._is_given_up.is_set():
            raise SlotGivenUpError(
                "the state that was being written as a checkpoint is let go: the service is "
                "closed, or initialised anew"
            )

    def give_up(self) -> None:
        """Makes the next check raise."""
        self._is_given_up.set()

    def end(self) -> None:
        """Says that the slot is not read any more."""
        self._readers.ended(self)


class SlotReaders:
    """Who reads the slots of a rank. Thread-safe.

    Invariant: a slot is not written, and its lock is not let go, while it is read.
    """

    def __init__(self) -> None:
        self._readings: list[SlotReading] = []
        self._changed = threading.Condition()

    def begin(self, index: int) -> SlotReading:
        """Notes a reader of a slot; its thread has to end it, whatever happens."""
        reading = SlotReading(self, index)
        with self._changed:
            self._readings.append(reading)
        return reading

    def is_read(self, index: int) -> bool:
        """Whether a slot has a reader."""
        with self._changed:
            return any(reading.index == index for reading in self._readings)

    def ended(self, reading: SlotReading) -> None:
        """Told that a reader has ended."""
        with self._changed:
            self._readings.remove(reading)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Has all readers end at their next sign of progress, and waits for it."""
        with self._changed:
            for reading in self._readings:
                reading.give_up()
            self._changed.wait_for(lambda: not self._readings)
