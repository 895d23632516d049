"""Metrics for Prometheus at /metrics: the requests, the process, and the runs of the store.

The number of label sets is bounded: routes are named by their template, and only the newest
live runs have metrics here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import Scope

from rolemesh.coordinator.api.messages import FINAL_STATES
from rolemesh.v1 import coordinator_pb2

MAX_TOLD_RUNS = 20
"""Most live runs whose metrics are exposed."""

MAX_TOLD_METRICS = 200
"""Most metrics of a run that are exposed, in the order of their names."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class RequestMetrics:
    """Counts of the requests of one app, and of its process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.event_streams = Gauge(
            "rolemesh_http_event_streams", "Event streams that are open.", registry=self.registry
        )
        self._requests = Counter(
            "rolemesh_http_requests",
            "Requests, by the status of their answer.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rolemesh_http_request_seconds",
            "Time until an answer begins.",
            ["route"],
            registry=self.registry,
        )

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts a request when its answer begins."""
        route = getattr(scope.get("route"), "path", None) or "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class _Runs(Collector):
    def __init__(self, runs: Sequence[coordinator_pb2.Run] | None) -> None:
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("rolemesh_store_up", "Whether the store answers.")
        up.add_metric([], float(self._runs is not None))
        yield up
        if self._runs is None:
            return
        states = GaugeMetricFamily(
            "rolemesh_runs", "Runs of the store, of the newest thousand.", labels=["state"]
        )
        for name, number in coordinator_pb2.RunState.items()[1:]:
            word = name.removeprefix("RUN_STATE_").lower()
            states.add_metric([word], sum(run.state == number for run in self._runs))
        yield states
        steps = GaugeMetricFamily("rolemesh_run_step", "Steps finished.", labels=["run_id"])
        planned = GaugeMetricFamily("rolemesh_run_num_steps", "Steps planned.", labels=["run_id"])
        recoveries = CounterMetricFamily(
            "rolemesh_run_recoveries", "Failures that it had to recover from.", labels=["run_id"]
        )
        values = GaugeMetricFamily(
            "rolemesh_run_metric", "A metric of the newest step.", labels=["run_id", "name"]
        )
        live = [run for run in self._runs if run.state not in FINAL_STATES]
        for run in live[:MAX_TOLD_RUNS]:
            steps.add_metric([run.run_id], run.step)
            planned.add_metric([run.run_id], run.num_steps)
            recoveries.add_metric([run.run_id], run.recoveries)
            for name in sorted(run.metrics)[:MAX_TOLD_METRICS]:
                values.add_metric([run.run_id, name], run.metrics[name])
        yield from (steps, planned, recoveries, values)


def expose(metrics: RequestMetrics, runs: Sequence[coordinator_pb2.Run] | None) -> bytes:
    """The text of /metrics.

    Args:
        metrics: Metrics of the app.
        runs: Runs of the store, newest first; None when the store does not answer.
    """
    registry = CollectorRegistry()
    registry.register(_Runs(runs))
    return generate_latest(registry) + generate_latest(metrics.registry)
