"""Hosts on this machine: a network namespace, a table of processes and a /dev/shm for each.

What runs on such a host reaches the others and the tests by addresses alone, as on a machine of its
own. Where namespaces cannot be made, hosts are addresses of loopback (127.0.0.2, ...), which share
all else: the tests still run, and prove less.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_WITHIN = 'ip link set lo up; mount -t tmpfs -o size=1g tmpfs /dev/shm; exec "$@"'


@functools.cache
def are_apart() -> bool:
    """Whether hosts have namespaces: this user may make them."""
    try:
        with HostNetwork(2, are_apart=True) as network:
            program = f"import socket; socket.create_connection(({network.addresses[0]!r}, 9), 1)"
            tried = subprocess.run(
                network.command(1, [sys.executable, "-c", program]),
                capture_output=True,
                timeout=30,
                check=False,
            )
    except (OSError, subprocess.SubprocessError):
        return False
    return b"refused" in tried.stderr


class HostNetwork:
    """Some hosts on one network.

    Example::

        with HostNetwork(2) as network:
            process = network.start(1, [sys.executable, "-m", ...], log=path)
            network.cut(1)  # as if its cable was pulled
    """

    def __init__(self, number: int, *, are_apart: bool | None = None) -> None:
        self._number = number
        self._are_apart = globals()["are_apart"]() if are_apart is None else are_apart
        self._name = f"rm{os.getpid()}"
        self._started: list[subprocess.Popen[bytes]] = []
        pid = os.getpid()
        self._net = f"10.{100 + pid % 100}.{pid // 100 % 256}"
        self.addresses = [
            f"{self._net}.{2 + host}" if self._are_apart else f"127.0.0.{2 + host}"
            for host in range(number)
        ]
        self.own_address = f"{self._net}.1" if self._are_apart else "127.0.0.1"
        """Of this machine, on which the tests run, for the hosts."""

    def __enter__(self) -> HostNetwork:
        if self._are_apart:
            try:
                self._make()
            except BaseException:
                self._remove()
                raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._started:
            end_host_process(process)
        if self._are_apart:
            self._remove()

    def space(self, host: int) -> str:
        """Name of the network namespace of a host."""
        return f"{self._name}-{host}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on a host, and takes it along when it ends."""
        if not self._are_apart:
            return list(arguments)
        return [
            *("nsenter", f"--net=/run/netns/{self.space(host)}"),
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", _WITHIN, "sh", *arguments),
        ]

    def start(
        self, host: int, arguments: Sequence[str], log: Path, **variables: str
    ) -> HostProcess:
        """Starts a process on a host; its output is appended to a log."""
        with log.open("ab") as stream:
            process = subprocess.Popen(
                self.command(host, arguments),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **variables},
            )
        self._started.append(process)
        return HostProcess(process, log)

    def cut(self, host: int) -> None:
        """Pulls the cable of a host: nothing passes, and no connection is told."""
        run_ip("-n", self._switch, "link", "set", f"host{host}", "down")

    def mend(self, host: int) -> None:
        """Puts the cable of a host in again."""
        run_ip("-n", self._switch, "link", "set", f"host{host}", "up")

    @property
    def _switch(self) -> str:
        """A namespace of its own, so that no filter of this machine's is asked."""
        return f"{self._name}-switch"

    def _make(self) -> None:
        run_ip("netns", "add", self._switch)
        run_ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        run_ip("-n", self._switch, "link", "set", "bridge0", "up")
        self._plug("here", self._name)
        run_ip("address", "add", f"{self._net}.1/24", "dev", self._name)
        run_ip("link", "set", self._name, "up")
        for host, address in enumerate(self.addresses):
            space = self.space(host)
            run_ip("netns", "add", space)
            self._plug(f"host{host}", "eth0", space)
            run_ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            run_ip("-n", space, "link", "set", "eth0", "up")

    def _plug(self, plug: str, interface: str, space: str | None = None) -> None:
        """A cable from the switch to an interface, of a host or of this machine."""
        where = () if space is None else ("netns", space)
        cable = ("type", "veth", "peer", "name", plug, "netns", self._switch)
        run_ip("link", "add", "name", interface, *where, *cable)
        run_ip("-n", self._switch, "link", "set", plug, "master", "bridge0", "up")

    def _remove(self) -> None:
        run_ip("link", "del", self._name, check=False)
        for host in range(self._number):
            run_ip("netns", "del", self.space(host), check=False)
        run_ip("netns", "del", self._switch, check=False)


@dataclass
class HostProcess:
    """A process on a host, behind those that made its namespaces."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The process itself, which is the agent of a service's ranks, and all that it started."""
        try:
            started = psutil.Process(self.process.pid)
            # Where hosts are apart, what was started is `unshare`.
            all_of_them = [started, *started.children(recursive=True)]
            return [one for one in all_of_them if "unshare" not in one.name()]
        except psutil.NoSuchProcess:
            return []

    def terminate(self) -> None:
        """Tells it to end, as an engine does."""
        self.family()[0].terminate()

    def vanish(self) -> None:
        """Kills all of it at once."""
        end_host_process(self.process)

    def wait(self, timeout_s: float) -> int:
        """Exit code; fails with the log."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.text}") from None


def end_host_process(process: subprocess.Popen[bytes]) -> None:
    """Kills what runs on a host, with all that it started."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        for one in (*family, psutil.Process(process.pid)):
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
    process.wait(30)


def run_ip(*arguments: str, check: bool = True) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30)
