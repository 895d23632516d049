"""Experience that this rank produced and still holds, within a bound on bytes."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rolemesh.engine.experience import (
    Column,
    Experience,
    payload_layout,
    read_payload,
    write_payload,
)
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.rpc.errors import CapacityError, NotFoundError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """One experience in the store."""

    experience_id: str
    run_id: str
    step: int
    experience: Experience
    """On the CPU; views of the segment when there is one."""
    num_bytes: int
    segment: Segment | None
    """Shared memory that holds it, None for process memory."""
    is_given: bool = False
    """Whether a client has put it."""


class ExperienceStore:
    """Holds experience until it is released. Thread-safe.

    Invariant: held_bytes <= capacity_bytes, of which clients have put `given_share` at most, so
    that what ranks make finds room. Experience is immutable: no code writes to what the store
    returned.

    Example: with a capacity of 100 bytes, put of 60 and then of 50 bytes raises CapacityError;
    after release("r", through_step=0) of the first one, the second fits.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        shared_memory: bool,
        shared_memory_threshold_bytes: int,
        given_share: float = 1.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._given_capacity_bytes = int(given_share * capacity_bytes)
        self._given_bytes = 0
        self._shared_memory = shared_memory
        self._threshold_bytes = shared_memory_threshold_bytes
        self._held: dict[str, Held] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    def put(
        self, run_id: str, step: int, experience: Experience, *, is_given: bool = False
    ) -> Held:
        """Takes an experience; large ones are copied to shared memory.

        Raises:
            CapacityError: It does not fit within the bound.
        """
        num_bytes = experience.num_bytes
        self._take_room(num_bytes, is_given=is_given)
        try:
            stored, segment = self._place(experience)
        except BaseException:
            self._give_room(num_bytes, is_given=is_given)
            raise
        held = Held(uuid.uuid4().hex, run_id, step, stored, num_bytes, segment, is_given)
        with self._lock:
            self._held[held.experience_id] = held
        return held

    @contextmanager
    def room_for_given(self, num_bytes: int) -> Iterator[None]:
        """Counts bytes of a client as held while they arrive, until the block ends.

        Raises:
            CapacityError: They do not fit within the bounds.
        """
        self._take_room(num_bytes, is_given=True)
        try:
            yield
        finally:
            self._give_room(num_bytes, is_given=True)

    def _take_room(self, num_bytes: int, *, is_given: bool) -> None:
        with self._lock:
            if is_given and self._given_bytes + num_bytes > self._given_capacity_bytes:
                raise CapacityError(
                    f"experience of {num_bytes} bytes cannot be put: clients have put "
                    f"{self._given_bytes} bytes, of {self._given_capacity_bytes} that they may "
                    "hold: release what is used up, or raise put_share or "
                    "experience_capacity_bytes (ROLEMESH_SERVICE__PUT_SHARE)",
                    reason="EXPERIENCE_CAPACITY",
                    metadata={
                        "held_bytes": str(self._given_bytes),
                        "capacity_bytes": str(self._given_capacity_bytes),
                        "needed_bytes": str(num_bytes),
                    },
                )
            if self._held_bytes + num_bytes > self.capacity_bytes:
                raise CapacityError(
                    f"experience of {num_bytes} bytes does not fit: {self._held_bytes} of "
                    f"{self.capacity_bytes} bytes are held in {len(self._held)} pieces: release "
                    "experience of committed steps, or raise experience_capacity_bytes "
                    "(ROLEMESH_SERVICE__EXPERIENCE_CAPACITY_BYTES)",
                    reason="EXPERIENCE_CAPACITY",
                    metadata={
                        "held_bytes": str(self._held_bytes),
                        "capacity_bytes": str(self.capacity_bytes),
                        "needed_bytes": str(num_bytes),
                    },
                )
            self._held_bytes += num_bytes
            self._given_bytes += num_bytes if is_given else 0

    def _give_room(self, num_bytes: int, *, is_given: bool) -> None:
        with self._lock:
            self._held_bytes -= num_bytes
            self._given_bytes -= num_bytes if is_given else 0

    def has(self, experience_id: str) -> bool:
        """Whether it holds the experience of that id."""
        with self._lock:
            return experience_id in self._held

    def get(self, experience_id: str) -> Held:
        """The experience of that id.

        Raises:
            NotFoundError: Released, or never here.
        """
        with self._lock:
            held = self._held.get(experience_id)
        if held is None:
            raise NotFoundError(
                f"experience {experience_id!r} is not held here: it was released, or the process "
                "restarted; replay the step",
                reason="EXPERIENCE_NOT_FOUND",
                metadata={"experience_id": experience_id},
            )
        return held

    def release_ids(self, run_id: str, experience_ids: list[str]) -> int:
        """Drops the named experience of a run; unknown ids are ignored. Returns bytes freed."""
        wanted = set(experience_ids)
        return self._drop(lambda held: held.experience_id in wanted and held.run_id == run_id)

    def release_through(self, run_id: str, step: int) -> int:
        """Drops a run's experience of this step and earlier ones. Returns bytes freed."""
        return self._drop(lambda held: held.run_id == run_id and held.step <= step)

    def close(self) -> None:
        """Drops everything, shared memory included."""
        self._drop(lambda held: True)

    def _drop(self, is_dropped: Callable[[Held], bool]) -> int:
        with self._lock:
            dropped = [held for held in self._held.values() if is_dropped(held)]
            for held in dropped:
                del self._held[held.experience_id]
                self._held_bytes -= held.num_bytes
                self._given_bytes -= held.num_bytes if held.is_given else 0
        for held in dropped:
            if held.segment is not None:
                held.segment.unlink()
        return sum(held.num_bytes for held in dropped)

    def _place(self, experience: Experience) -> tuple[Experience, Segment | None]:
        layout = payload_layout(experience)
        if not self._shared_memory or layout.num_bytes < self._threshold_bytes:
            return _on_cpu(experience), None
        try:
            segment = Segment.create(layout.num_bytes)
        except OSError as error:
            logger.warning(
                "no shared memory for %d bytes (%s): experience stays in process memory and "
                "travels as a stream; enlarge /dev/shm (Docker: shm_size) to avoid the copies",
                layout.num_bytes,
                error,
            )
            return _on_cpu(experience), None
        try:
            write_payload(experience, layout, segment.buffer)
            return read_payload(layout, segment.tensor()), segment
        except BaseException:
            segment.unlink()
            raise


def _on_cpu(experience: Experience) -> Experience:
    if all(column.values.device.type == "cpu" for column in experience.columns.values()):
        return experience
    return Experience(
        {
            name: Column(
                column.kind,
                column.values.cpu(),
                None if column.offsets is None else column.offsets.cpu(),
            )
            for name, column in experience.columns.items()
        }
    )
