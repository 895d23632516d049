"""History of the use of a run's devices, read from the store once and kept in columns."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from rolemesh.coordinator.state.store import EntryExpiredError, RunStream, StateStore, StreamEntry
from rolemesh.v1 import coordinator_pb2

_NANOS = 10**9


@dataclass(slots=True)
class _Device:
    """Columns with one value for each look. They take a fifth of the memory of the messages."""

    times: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds since 1970, ascending."""
    busy: array[float] = field(default_factory=lambda: array("f"))
    memory_bytes: array[int] = field(default_factory=lambda: array("q"))
    memory_total_bytes: int = 0

    def drop_before(self, time: int) -> None:
        """Forgets what the store has dropped."""
        place = bisect_left(self.times, time)
        del self.times[:place], self.busy[:place], self.memory_bytes[:place]


class DeviceHistory:
    """Device use of one run; `refresh` reads the looks that came since the last time.

    A page asks every few seconds for the newest looks: reading all of them anew would take the
    loop for longer than the answer. Owner: one asyncio loop.
    """

    def __init__(self, store: StateStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._begin()
        # Two callers that read at the same time would count a look twice.
        self._turn = asyncio.Lock()

    def _begin(self) -> None:
        self._newest_id = ""
        self._devices: dict[tuple[str, int, str], _Device] = {}
        self._looks: deque[int] = deque(maxlen=RunStream.DEVICES.keep)
        """First time of each look that is kept."""

    async def refresh(self) -> None:
        """Reads the looks that came since the last time."""
        async with self._turn:
            try:
                entries = await self._read()
            except EntryExpiredError:
                # The last request was so long ago that the store has dropped looks since.
                self._begin()
                entries = await self._read()
            for entry in entries:
                self._add(coordinator_pb2.GetDeviceUseResponse.FromString(entry.payload))
                self._newest_id = entry.entry_id
            if not entries:
                return
            for key, device in list(self._devices.items()):
                device.drop_before(self._looks[0])
                if not device.times:
                    del self._devices[key]

    async def _read(self) -> list[StreamEntry]:
        limit = RunStream.DEVICES.keep
        return await self._store.read_entries(
            self._run_id, RunStream.DEVICES, self._newest_id, limit
        )

    def _add(self, look: coordinator_pb2.GetDeviceUseResponse) -> None:
        for use in look.devices:
            device = self._devices.setdefault((use.service, use.rank, use.device), _Device())
            device.times.extend(time.ToNanoseconds() for time in use.times)
            device.busy.extend(use.busy)
            device.memory_bytes.extend(use.memory_bytes)
            device.memory_total_bytes = use.memory_total_bytes
        self._looks.append(min(use.times[0].ToNanoseconds() for use in look.devices))

    def since(self, time: float) -> coordinator_pb2.GetDeviceUseResponse:
        """Returns one series for each device that has looks, by service, rank and device.

        Args:
            time: Unix time in seconds; earlier looks are left out.
        """
        answer = coordinator_pb2.GetDeviceUseResponse()
        for (service, rank, name), device in sorted(self._devices.items()):
            place = bisect_left(device.times, time, key=_seconds)
            if place == len(device.times):
                continue
            answer.devices.add(
                service=service,
                rank=rank,
                device=name,
                times=[
                    Timestamp(seconds=nanos // _NANOS, nanos=nanos % _NANOS)
                    for nanos in device.times[place:]
                ],
                busy=device.busy[place:],
                memory_bytes=device.memory_bytes[place:],
                memory_total_bytes=device.memory_total_bytes,
            )
        return answer


def _seconds(nanos: int) -> float:
    # Rounds as to_seconds does: a client that sends back a time that it got finds its look.
    return nanos // _NANOS + nanos % _NANOS * 1e-9
