"""What processes listen on, as the kernel tells it: TCP and UDP ports, and sockets in files."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_ACCEPTS_CONNECTIONS = 0x10000
"""__SO_ACCEPTCON among the flags of /proc/net/unix."""


@dataclass(frozen=True)
class Listener:
    """One socket that others may reach."""

    pid: int
    protocol: str
    """ "tcp", "udp" or "unix"."""
    address: str
    """Of the interface; of a unix socket its path, or "@" and its name where it is in no file."""
    port: int = 0

    @property
    def is_private(self) -> bool:
        """Whether other machines cannot reach it, and other users of this one not without TCP."""
        if self.protocol != "unix":
            return ipaddress.ip_address(self.address).is_loopback
        # Every user of the host reaches an abstract one.
        place = Path(self.address)
        return place.is_absolute() and not stat.S_IMODE(place.parent.stat().st_mode) & 0o077


def listeners_of(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Of all these processes; one that ends meanwhile has none."""
    unix = _unix_sockets()
    found: set[Listener] = set()
    for process in processes:
        try:
            for connection in process.net_connections("inet"):
                # A UDP socket without a peer takes what anyone sends.
                is_udp = connection.status == psutil.CONN_NONE and not connection.raddr
                if connection.status == psutil.CONN_LISTEN or (is_udp and connection.laddr):
                    ip = connection.laddr.ip.removeprefix("::ffff:")
                    protocol = "udp" if is_udp else "tcp"
                    found.add(Listener(process.pid, protocol, ip, connection.laddr.port))
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                name = file.readlink().name.removeprefix("socket:[").removesuffix("]")
                if name in unix:
                    found.add(Listener(process.pid, "unix", unix[name]))
        except (psutil.Error, OSError):
            continue
    return found


def _unix_sockets() -> dict[str, str]:
    """Name of each unix socket that accepts connections, by its inode."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
        if int(flags, 16) & _ACCEPTS_CONNECTIONS:
            found[inode] = name[0] if name else "@"
    return found
