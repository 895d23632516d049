"""The REST of invented runs on a thread of its own, for tests that drive a browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from support.fake_run import append_step, fill_store

from rolemesh.coordinator.api.credentials import Tokens
from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.server import HttpServer, serve_http
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunStream
from rolemesh.v1 import coordinator_pb2

T = TypeVar("T")

CALL_S = 60.0
"""Writing 1,000 invented steps takes about two seconds."""


class PageServer:
    """Serves a store that tests write to. Usable as a context manager.

    Owner: one thread, which calls the methods; the loop runs on another.
    """

    def __init__(self, tokens: Tokens | None = None) -> None:
        self.store = MemoryStateStore()
        self._tokens = tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: HttpServer | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def start(self) -> None:
        """Serves, after a stop on the same port."""
        app = make_app(StoreOperations(self.store), tokens=self._tokens)
        self._server, self.port = self.call(serve_http(app, "127.0.0.1", self.port))

    def stop(self) -> None:
        """Ends all connections, as a coordinator that is restarted does."""
        if self._server is not None:
            self.call(self._server.stop())
            self._server = None

    def fill(self, run_id: str, folder: Path, **fields: Any) -> RunRecord:
        """Writes an invented run."""
        return self.call(fill_store(self.store, run_id, folder, **fields))

    def tell(self, run_id: str, event: coordinator_pb2.RunEvent, **changes: Any) -> None:
        """Changes a run's record, and then tells its watches of it."""
        self.call(self.store.update_run(run_id, **changes))
        event.step = self.call(self.store.get_run(run_id)).step
        event.time.GetCurrentTime()
        payload = event.SerializeToString()
        self.call(self.store.append_entry(run_id, RunStream.EVENTS, payload))

    def make_step(self, run_id: str) -> int:
        """Makes one more step of a live run; returns its number."""
        record = self.call(self.store.get_run(run_id))
        step = record.step + 1
        self.call(append_step(self.store, record, step))
        return step
