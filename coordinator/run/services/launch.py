"""Starts the services for which a recipe gives no address, and makes sure that they end.

Each role gets one process on loopback, with its own log. Initialize tells a service what to
compute; this module does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rolemesh.coordinator.run.services.commands import MakeCommand
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.coordinator.state.server.bound_process import bound

START_DEADLINE_S = 300.0
"""Longest wait for a service to announce itself. It imports torch and vLLM first."""

STOP_GRACE_S = 15.0
"""How long a service may take to drain when a run has ended well."""

QUICK_STOP_GRACE_S = 2.0
"""The same when a run has failed: the services then compute nothing of use."""

_LAST_GRACE_S = 1.0
"""Pause between a second SIGTERM, at which a service frees its shared memory and ends at once, and
SIGKILL."""

_GROUP_END_S = 10.0
"""Longest wait for the end of what a killed service started: it gives memory of devices back."""

LOG_LINE = "\n  | "
"""Before each line of a log that stands below an error."""

_SIGNAL_EXIT = 128
"""An exit code above it is this plus the signal that ended a child of the process."""

_ANNOUNCE_POLL_S = 0.05
_TAIL_BYTES = 16384
_TAIL_LINES = 8


class LaunchError(RuntimeError):
    """A service did not start. The text names role, process, cause and log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceExit:
    """End of a service's process that the coordinator had not asked for."""

    role: str
    num_ranks: int
    pid: int
    """Process id of the service's only rank, or of the agent that starts its ranks."""
    exit_code: int | None
    """None when a signal ended it."""
    signal_number: int | None
    """None when it ended by itself."""
    log: Path
    last_lines: tuple[str, ...]
    """Last lines of its log, oldest first."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, or one of its ranks: its agent says so as a shell does."""
        return self.signal_number is not None or (self.exit_code or 0) > _SIGNAL_EXIT

    @property
    def reason(self) -> str:
        """Text for people: which process ended, how, and the last lines of its log."""
        if self.signal_number is not None:
            name = signal.Signals(self.signal_number).name
            how = f"was killed by signal {self.signal_number} ({name})"
            if self.signal_number == signal.SIGKILL:
                how += ": by a person, or by the kernel for lack of memory (see `dmesg`)"
        else:
            how = f"ended with exit code {self.exit_code}"
        log = (
            f"the end of its log, {self.log}:"
            if self.last_lines
            else f"its log {self.log} is empty"
        )
        # With several ranks this process was their agent. Its last lines name the rank that ended.
        who = "rank 0" if self.num_ranks == 1 else f"with {self.num_ranks} ranks"
        head = f"{self.role} {who} (pid {self.pid}) {how}; {log}"
        return "".join((head, *(f"{LOG_LINE}{line}" for line in self.last_lines)))


@dataclass(slots=True, eq=False)
class _Child:
    role: str
    process: asyncio.subprocess.Process
    announce: Path
    log: Path
    num_ranks: int
    is_restart: bool
    """Whether it starts again: an end is then told by `restart`, until it has announced itself."""
    is_unwanted: bool = False
    """Whether its end is asked for."""
    exit: ServiceExit | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class Launcher:
    """The processes of a run's services.

    Invariant: after `close` none of them is left, nor any process that they started. If this
    process dies without `close`, they notice it from the kernel (bound_process) and by themselves.

    Owner: one asyncio loop, whose main thread must be the one that calls `start`: the kernel binds
    a child to the thread that started it.

    Example::

        commands = service_commands(recipe, directory)
        async with Launcher(roles, commands, directory / "logs") as launcher:
            addresses = await launcher.start()  # {"actor": "127.0.0.1:41235", ...}
            launcher.on_exit = lambda exit: run.service_lost(exit.role, exit.reason)
            address = await launcher.restart("actor")  # dead, or not what it should be
    """

    def __init__(
        self,
        roles: Sequence[str],
        make_command: MakeCommand,
        log_directory: Path,
        on_again: Callable[[ServiceExit], None] | None = None,
    ) -> None:
        """Prepares; `start` starts the processes.

        Args:
            roles: Roles to start a service for.
            make_command: Gives the command of each service.
            log_directory: Folder for <role>.log, which gets all output of a service.
            on_again: Told of a service that was killed while `start` waited, and is started once
                more; None: such a kill is a LaunchError.
        """
        self.close_grace_s = STOP_GRACE_S
        """How long services may take to drain at `close`."""
        self._roles = tuple(roles)
        self._make_command = make_command
        self._log_directory = log_directory
        self._on_again = on_again
        self._announcements = tempfile.TemporaryDirectory(prefix="rolemesh-")
        self._children: dict[str, _Child] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._num_starts = 0
        self._on_exit: Callable[[ServiceExit], None] | None = None
        self._is_closing = False

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {role: child.process.pid for role, child in self._children.items()}

    @property
    def on_exit(self) -> Callable[[ServiceExit], None] | None:
        """Callback for each service that ends unasked, also for those that have ended already.

        One that was started again since is not told again.
        """
        return self._on_exit

    @on_exit.setter
    def on_exit(self, callback: Callable[[ServiceExit], None]) -> None:
        self._on_exit = callback
        for child in list(self._children.values()):
            if child.exit is not None and not child.is_restart:
                callback(child.exit)

    async def start(self, deadline_s: float = START_DEADLINE_S) -> dict[str, str]:
        """Starts every service and returns their addresses once all have announced themselves.

        A service that is killed meanwhile is started once more where `on_again` is given. One that
        ends by itself has said why, and would do so again.

        Raises:
            LaunchError: A service ended, or did not announce itself within deadline_s seconds.
        """
        self._log_directory.mkdir(parents=True, exist_ok=True)
        for role in self._roles:
            await self._spawn(role)
        had_another: set[str] = set()
        while True:
            try:
                return await self._addresses(list(self._children.values()), deadline_s)
            except LaunchError:
                ends = [child.exit for child in self._children.values() if child.exit is not None]
                if self._on_again is None or not ends:
                    raise
                if any(not end.was_killed or end.role in had_another for end in ends):
                    raise
                for end in ends:
                    had_another.add(end.role)
                    self._on_again(end)
                    await self._kill(self._children.pop(end.role))
                    await self._spawn(end.role)

    async def restart(self, service: str, deadline_s: float = START_DEADLINE_S) -> str:
        """Starts a service again, with the command and log that it had, and returns its address.

        Its processes are killed if any still lives; that end is not told as a loss.

        Args:
            service: Name of the service.
            deadline_s: Longest wait until it has announced itself, in seconds.

        Raises:
            ValueError: This launcher does not start the service.
            LaunchError: It ended, or did not announce itself. It may be tried again.
        """
        if service not in self._roles:
            raise ValueError(
                f"service {service!r} cannot be started again: this launcher starts "
                f"{', '.join(self._roles) or 'none'}; start it where it runs"
            )
        if service in self._children:
            await self._kill(self._children.pop(service))
        child = await self._spawn(service, is_restart=True)
        try:
            addresses = await self._addresses([child], deadline_s)
            if child.exit is not None:
                raise LaunchError(f"while starting: {child.exit.reason}")
        except LaunchError:
            await self._kill(self._children.pop(service))
            raise
        child.is_restart = False
        return addresses[service]

    async def _kill(self, child: _Child) -> None:
        """Ends a service at once, with all processes that it started."""
        child.is_unwanted = True
        group = child.process.pid
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _GROUP_END_S
        # The group may outlive its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
            await child.process.wait()
            while loop.time() < deadline:
                os.killpg(group, 0)
                await asyncio.sleep(_ANNOUNCE_POLL_S)
        await child.process.wait()

    async def _spawn(self, role: str, *, is_restart: bool = False) -> _Child:
        # Each start has a file of its own: that of an earlier process must not stand for a new one.
        self._num_starts += 1
        announce = Path(self._announcements.name) / f"{role}-{self._num_starts}.json"
        command = self._make_command(role, announce)
        log = self._log_directory / f"{role}.log"
        with log.open("ab") as stream:
            process = await asyncio.create_subprocess_exec(
                *bound(*command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**child_environment(os.environ), **command.environment},
                # Ctrl-C in a terminal signals the whole group, but only the coordinator may decide.
                # With a group of its own, all processes that the service starts can be ended.
                start_new_session=True,
            )
        child = _Child(role, process, announce, log, command.num_ranks, is_restart)
        self._children[role] = child
        self._watches = [watch for watch in self._watches if not watch.done()]
        self._watches.append(asyncio.create_task(self._watch(child), name=f"watch {role}"))
        return child

    async def _watch(self, child: _Child) -> None:
        code = await child.process.wait()
        if self._is_closing or child.is_unwanted:
            return
        child.exit = ServiceExit(
            role=child.role,
            num_ranks=child.num_ranks,
            pid=child.process.pid,
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            log=child.log,
            last_lines=last_lines(child.log),
        )
        child.has_ended.set()
        if self._on_exit is not None and not child.is_restart:
            self._on_exit(child.exit)

    async def _addresses(self, children: Sequence[_Child], deadline_s: float) -> dict[str, str]:
        """The addresses of services that start, once all have announced themselves."""
        try:
            async with asyncio.timeout(deadline_s):
                return {
                    child.role: await self._announced_address(child, children) for child in children
                }
        except TimeoutError:
            silent = [c for c in children if not c.announce.exists()]
            names = ", ".join(f"{c.role} (pid {c.process.pid}, {c.log})" for c in silent)
            raise LaunchError(
                f"not ready after {deadline_s:.0f} s: {names}; see what the log says last"
            ) from None

    async def _announced_address(self, child: _Child, children: Sequence[_Child]) -> str:
        """The address of one of several services that start; raises if any of them ends."""
        while not child.announce.exists():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.has_ended.wait(), _ANNOUNCE_POLL_S)
            for other in children:
                if other.exit is not None:
                    raise LaunchError(f"while starting: {other.exit.reason}")
        return str(json.loads(child.announce.read_text())["address"])

    async def close(self) -> None:
        """Ends all: SIGTERM, a second one after `close_grace_s`, then SIGKILL to whole groups."""
        self._is_closing = True
        await self._signal_and_wait(signal.SIGTERM, self.close_grace_s)
        await self._signal_and_wait(signal.SIGTERM, _LAST_GRACE_S)
        for child in self._children.values():
            # The group may outlive its leader.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        await asyncio.gather(*(child.process.wait() for child in self._children.values()))
        await asyncio.gather(*self._watches)
        self._announcements.cleanup()

    async def _signal_and_wait(self, number: signal.Signals, grace_s: float) -> None:
        running = [c for c in self._children.values() if c.process.returncode is None]
        if not running:
            return
        for child in running:
            child.process.send_signal(number)
        waits = [asyncio.ensure_future(child.process.wait()) for child in running]
        _, late = await asyncio.wait(waits, timeout=grace_s)
        for wait in late:
            wait.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.close_grace_s = min(self.close_grace_s, QUICK_STOP_GRACE_S)
        await self.close()


def last_lines(log: Path, num_lines: int = _TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log that are not blank, oldest first; empty when there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-num_lines:])
