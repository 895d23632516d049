"""A cable between two hosts of this machine, with a rate and a round trip as on a long link.

A process carries packets from an interface of one namespace to one of the other. It does so below
TCP, so that windows, slow start and congestion control meet the link as they meet a real one; a
proxy of connections would hide it from them. (The kernel here has tbf, but not netem.)
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from support.hosts import HostNetwork, run_ip

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PACKET_INFORMATION, _OFFLOAD_HEADER = 0x1, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x1, 0x2
"""The kernel may leave checksums to the far end, and hand over 64 KiB of a stream as one packet
with its segments' size, as to a network card. Without this, Python would carry 1,500 bytes at a
time."""

_MAX_PACKET_BYTES = (1 << 16) + 64
"""64 KiB and the header before them."""
_QUEUE_S = 0.002
"""So much waits at the cable; more waits in the sender's kernel, as before a network card."""

_QUEUE_PACKETS = 10_000


class Cable:
    """Joins two hosts, beside the switch of their network, at addresses of its own.

    Nothing is lost on it. Each direction has the rate for itself.

    Example::

        with HostNetwork(2) as network, Cable(network, bits_per_s=1e9, round_trip_s=0.03) as cable:
            network.start(0, [..., "--host", cable.addresses[0]], log)
    """

    def __init__(
        self,
        network: HostNetwork,
        ends: tuple[int, int] = (0, 1),
        *,
        bits_per_s: float,
        round_trip_s: float,
    ) -> None:
        self._network = network
        self._ends = ends
        self._bits_per_s = bits_per_s
        self._round_trip_s = round_trip_s
        self.interface = f"cable{os.getpid() % 10_000_000}"
        """Name of both ends' interfaces."""
        self._process: subprocess.Popen[bytes] | None = None
        self.addresses = ("10.99.0.1", "10.99.0.2")
        """Of the two ends, in their order. No other process of this machine sees them."""

    def __enter__(self) -> Cable:
        plugs = [self._plug(end) for end in self._ends]
        try:
            numbers = [str(plug) for plug in plugs]
            given = [str(self._bits_per_s), str(self._round_trip_s)]
            # In the folder of the tests, so that the process finds this package.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.cables", *numbers, *given],
                pass_fds=plugs,
                cwd=Path(__file__).parents[1],
            )
        finally:
            for plug in plugs:
                os.close(plug)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Its interfaces go with the last process that has them open.
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _plug(self, end: int) -> int:
        """Makes an interface of a host; what it is to send can be read from the result."""
        plug = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name, space = self.interface, self._network.space(end)
        flags = _TUN | _NO_PACKET_INFORMATION | _OFFLOAD_HEADER
        fcntl.ioctl(plug, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(plug, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS)
        own, other = self._ends.index(end), 1 - self._ends.index(end)
        run_ip("link", "set", name, "netns", space)
        run_ip("-n", space, "address", "add", self.addresses[own],
               "peer", self.addresses[other], "dev", name)  # fmt: skip
        run_ip("-n", space, "link", "set", name, "txqueuelen", str(_QUEUE_PACKETS), "up")
        return plug


class _Direction:
    """Packets on their way from one end to the other."""

    def __init__(self, source: int, target: int, bits_per_s: float, delay_s: float) -> None:
        self.source, self._target = source, target
        self._byte_s, self._delay_s = 8 / bits_per_s, delay_s
        self._free_at = 0.0
        """When the last packet that was taken has left the sender."""
        self._travelling: deque[tuple[float, bytes]] = deque()

    def has_room(self, now: float) -> bool:
        return self._free_at - now < _QUEUE_S

    def next_s(self, now: float) -> float:
        """Until a packet arrives or another one can be taken; may be negative."""
        arrives = self._travelling[0][0] if self._travelling else float("inf")
        has_room = float("inf") if self.has_room(now) else self._free_at - _QUEUE_S
        return min(arrives, has_room) - now

    def take(self, now: float) -> None:
        """Takes packets from the sender until none is there or no room is left."""
        self._free_at = max(self._free_at, now)
        while self.has_room(now):
            try:
                packet = os.read(self.source, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            self._free_at += len(packet) * self._byte_s
            self._travelling.append((self._free_at + self._delay_s, packet))

    def deliver(self, now: float) -> None:
        """Hands over what has arrived."""
        while self._travelling and self._travelling[0][0] <= now:
            os.write(self._target, self._travelling.popleft()[1])


def carry(one: int, other: int, bits_per_s: float, round_trip_s: float) -> None:
    """Carries packets both ways for ever."""
    ways = [
        _Direction(source, target, bits_per_s, round_trip_s / 2)
        for source, target in ((one, other), (other, one))
    ]
    while True:
        now = time.monotonic()
        for way in ways:
            way.deliver(now)
        wait_s = min(way.next_s(now) for way in ways)
        open_ones = {way.source: way for way in ways if way.has_room(now)}
        found, _, _ = select.select(
            open_ones, [], [], None if wait_s == float("inf") else max(0.0, wait_s)
        )
        for source in found:
            open_ones[source].take(time.monotonic())


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
