"""Prometheus metrics of a service process, and the page that shows them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_asgi_app

from rolemesh.rpc.http.bounded_http import QuietServer, bounded_protocol
from rolemesh.rpc.limits import MAX_CONNECTIONS, REQUEST_HEAD_S

LATENCY_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Upper ends of the buckets: from the time of a status call to that of an epoch."""

LAG_INTERVAL_S = 1.0
"""How often the event loop's lag is measured."""


class ServiceMetrics:
    """Counters of one process, in a registry of their own. Owner: the loop."""

    def __init__(self, role: str, rank: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"role": role, "rank": str(rank)}
        names = [*self._labels, "method"]
        self._calls = Counter(
            "rolemesh_calls", "Calls served.", [*names, "code"], registry=self.registry
        )
        self._seconds = Histogram(
            "rolemesh_call_seconds",
            "Wall time of a call.",
            names,
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._in_flight = Gauge(
            "rolemesh_calls_in_flight", "Calls being served.", names, registry=self.registry
        )
        self._reward_seconds = Histogram(
            "rolemesh_reward_request_seconds",
            "Wall time of a request to an outside reward, by how it ended.",
            [*self._labels, "reward", "outcome"],
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._pulled = Counter(
            "rolemesh_pulled_bytes",
            "Bytes of rows and weights that came from a peer, by the way that they took.",
            [*self._labels, "peer", "way"],
            registry=self.registry,
        )
        self._ways: dict[str, set[str]] = {}
        self.experience_bytes = self._gauge("experience_bytes", "Experience held.")
        self.policy_version = self._gauge("policy_version", "Version of the weights held.")
        self.resident_bytes = self._gauge("resident_bytes", "Resident memory of the process.")
        self.loop_lag_seconds = self._gauge(
            "loop_lag_seconds", "How late the event loop woke up last; above 0.1 it is blocked."
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"rolemesh_{name}", text, list(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    @contextmanager
    def call(self, full_method: str) -> Iterator[list[str]]:
        """Counts a call; the block puts its status code's name in the place of the list's "OK"."""
        labels = {**self._labels, "method": full_method}
        outcome = ["OK"]
        in_flight = self._in_flight.labels(**labels)
        in_flight.inc()
        started = time.monotonic()
        try:
            yield outcome
        finally:
            in_flight.dec()
            self._seconds.labels(**labels).observe(time.monotonic() - started)
            self._calls.labels(**labels, code=outcome[0]).inc()

    def pulled(self, peer: str, way: str, num_bytes: int) -> bool:
        """Counts bytes that came from a peer.

        Args:
            peer: Its address.
            way: "shm", "grpc", or "grpc_4" over four connections.
            num_bytes: What came.

        Returns:
            Whether they are the first that came this way.
        """
        self._pulled.labels(**self._labels, peer=peer, way=way).inc(num_bytes)
        ways = self._ways.setdefault(peer, set())
        is_first = way not in ways
        ways.add(way)
        return is_first

    def forget_peer(self, peer: str) -> None:
        """Shows nothing of a peer any more."""
        for way in self._ways.pop(peer, ()):
            self._pulled.remove(*self._labels.values(), peer, way)

    def reward_request(self, name: str, outcome: str, seconds: float) -> None:
        """Counts a request to an outside reward; from any thread.

        Args:
            name: Name of the reward.
            outcome: "ok", or the class of the error.
            seconds: Duration of the request.
        """
        labels = {**self._labels, "reward": name, "outcome": outcome}
        self._reward_seconds.labels(**labels).observe(seconds)

    async def watch_loop(self) -> None:
        """Measures the loop's lag and the process's memory until cancelled."""
        process = psutil.Process()
        while True:
            started = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.loop_lag_seconds.set(max(0.0, time.monotonic() - started - LAG_INTERVAL_S))
            self.resident_bytes.set(process.memory_info().rss)


class MetricsPage:
    """Serves /metrics on the service's loop."""

    def __init__(
        self,
        metrics: ServiceMetrics,
        listener: socket.socket,
        *,
        head_s: float = REQUEST_HEAD_S,
    ) -> None:
        """Prepares.

        Args:
            metrics: What it shows.
            listener: Bound, and listening.
            head_s: A connection on which no whole head of a request has come for so long is closed.
        """
        config = uvicorn.Config(
            make_asgi_app(metrics.registry),
            http=bounded_protocol(head_s),
            limit_concurrency=MAX_CONNECTIONS,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._listener = listener
        self._server = QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is bound."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Begins to serve."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Ends serving and frees the port."""
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._listener.close()
