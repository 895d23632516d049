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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rolemesh.coordinator.recipe.schema import Recipe, role_of
from rolemesh.coordinator.recipe.service_flags import named_variables, service_flags
from rolemesh.coordinator.state import bound_process
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.rpc.identity import Identity
from rolemesh.rpc.tracing import trace_environment

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

_DRAIN_TIMEOUT_S = 5.0
"""How long a service works on by itself after its coordinator is gone."""

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
        return "\n".join((head, *(f"  | {line}" for line in self.last_lines)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceCommand:
    """How to start one service."""

    arguments: Sequence[str]
    """Program and its arguments. The service must write its announce file itself."""
    environment: Mapping[str, str]
    """Environment variables, over those that every child gets (`child_environment`)."""
    num_ranks: int = 1
    """Ranks that it starts."""


MakeCommand = Callable[[str, Path], ServiceCommand]
"""Takes the name of a service and the file in which it announces itself; returns its command."""


def service_commands(
    recipe: Recipe, directory: Path, identities: Mapping[str, Identity] | None = None
) -> MakeCommand:
    """Commands of the services that come with rolemesh, set up as the recipe says.

    Args:
        recipe: The recipe. Its services may use what it names, and nothing else.
        directory: Folder of the run's files, into which they write.
        identities: Of the services, by name; a service without one speaks in clear.
    """

    def make(service: str, announce: Path) -> ServiceCommand:
        role = role_of(service)
        spec = recipe.service(role)
        arguments = [sys.executable, "-m", f"rolemesh.services.{role}"]
        flags = {
            "--host": "127.0.0.1",
            "--port": "0",
            "--announce": str(announce),
            "--parent-pid": str(os.getpid()),
            "--drain-timeout-s": str(_DRAIN_TIMEOUT_S),
        }
        identity = (identities or {}).get(service)
        if identity is not None:
            # Beside the announce file, in the launcher's private folder.
            place = announce.with_suffix(".pem")
            write_atomically(place, identity.pem().decode(), is_private=True)
            flags["--identity"] = str(place)
        environment = {
            **{
                name: os.environ[name]
                for name in named_variables(recipe, role)
                if name in os.environ
            },
            # No file of the current directory or of the script's may shadow a package.
            "PYTHONSAFEPATH": "1",
            # A crash in native code leaves its traceback in the log.
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            # Models are folders. Nothing is fetched from a hub, nothing is reported to one.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Roles that share cores must not spin at OpenMP barriers while others compute. On two
            # busy cores, two threads took 28 s with spinning and 9 s without (4 s when quiet).
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            # Without it, long runs with many threads do not give freed memory back.
            "MALLOC_ARENA_MAX": "2",
            "CUDA_VISIBLE_DEVICES": visible_devices(
                recipe, service, os.environ.get("CUDA_VISIBLE_DEVICES")
            ),
            # Flags say what the service may use: nothing that is granted to another one here.
            "ROLEMESH_SERVICE__CODE_ROOTS": "",
            "ROLEMESH_SERVICE__CODE_NAMES": "",
            "ROLEMESH_SERVICE__VARIABLES": "",
            "ROLEMESH_SERVICE__FUNCTION_NETWORK": "false",
        }
        if recipe.tracing is not None:
            environment |= trace_environment(recipe.tracing.endpoint, recipe.tracing.sample_ratio)
        if spec.threads is not None:
            environment["OMP_NUM_THREADS"] = str(spec.threads)
        arguments += [word for flag, value in flags.items() for word in (flag, value)]
        # In one word: a folder's name may look like a flag.
        arguments.append(f"--folder={directory.absolute()}")
        arguments += service_flags(recipe, role)
        return ServiceCommand(
            arguments=arguments,
            environment=environment,
            num_ranks=recipe.layout(role).world_size,
        )

    return make


def visible_devices(recipe: Recipe, service: str, allowed: str | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for a service, from the devices of its pool; empty for a CPU.

    The n services of one role share the pool: each gets every n-th device.

    Args:
        recipe: The recipe, which names the pool of the role.
        service: Name of the service.
        allowed: CUDA_VISIBLE_DEVICES of this process; "cuda:0" is its first device.

    Raises:
        ValueError: The pool mixes kinds of devices, or names one that does not exist.
    """
    role = role_of(service)
    name, pool = next((n, p) for n, p in recipe.pools.items() if role in p.roles)
    if set(pool.devices) == {"cpu"}:
        return ""
    services = recipe.services_of(role)
    devices = pool.devices[services.index(service) :: len(services)]
    visible = None if allowed is None else allowed.split(",")
    names = []
    for device in devices:
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            raise ValueError(
                f'pools.{name}.devices has {device!r}: give ["cpu"], or GPUs as ["cuda:0", ...]'
            )
        if visible is not None and int(index) >= len(visible):
            raise ValueError(
                f"pools.{name}.devices has {device!r}, but CUDA_VISIBLE_DEVICES={allowed} shows "
                f"{len(visible)} devices: name one of them"
            )
        names.append(index if visible is None else visible[int(index)])
    return ",".join(names)


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
        self, roles: Sequence[str], make_command: MakeCommand, log_directory: Path
    ) -> None:
        """Prepares; `start` starts the processes.

        Args:
            roles: Roles to start a service for.
            make_command: Gives the command of each service.
            log_directory: Folder for <role>.log, which gets all output of a service.
        """
        self.close_grace_s = STOP_GRACE_S
        """How long services may take to drain at `close`."""
        self._roles = tuple(roles)
        self._make_command = make_command
        self._log_directory = log_directory
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

        Raises:
            LaunchError: A service ended, or did not announce itself within deadline_s seconds.
        """
        self._log_directory.mkdir(parents=True, exist_ok=True)
        for role in self._roles:
            await self._spawn(role)
        children = list(self._children.values())
        try:
            async with asyncio.timeout(deadline_s):
                return {
                    child.role: await self._announced_address(child, children) for child in children
                }
        except TimeoutError:
            raise _not_ready(children, deadline_s) from None

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
            try:
                async with asyncio.timeout(deadline_s):
                    address = await self._announced_address(child, [child])
            except TimeoutError:
                raise _not_ready([child], deadline_s) from None
            if child.exit is not None:
                raise LaunchError(f"while starting: {child.exit.reason}")
        except LaunchError:
            await self._kill(self._children.pop(service))
            raise
        child.is_restart = False
        return address

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
                sys.executable,
                "-I",
                "-S",
                str(Path(bound_process.__file__)),
                str(os.getpid()),
                *command.arguments,
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


def _not_ready(children: Sequence[_Child], deadline_s: float) -> LaunchError:
    silent = [c for c in children if not c.announce.exists()]
    names = ", ".join(f"{c.role} (pid {c.process.pid}, {c.log})" for c in silent)
    return LaunchError(f"not ready after {deadline_s:.0f} s: {names}; see what the log says last")


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
