"""A collector of OpenTelemetry: the real protocol, spans kept in a list."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PREFIX = "rolemesh."


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    failed_with: str
    """The message of a failed span; empty for others."""
    attributes: dict[str, Any]
    """Without the prefix."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Owner of `spans`: the server's threads; read it when the senders have ended."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.endpoint = ""
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def children(self, parent: CollectedSpan) -> list[CollectedSpan]:
        """Spans directly below another one, in the order of their start."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_ns)

    def below(self, parent: CollectedSpan) -> list[CollectedSpan]:
        """Spans anywhere below another one."""
        return [deep for child in self.children(parent) for deep in (child, *self.below(child))]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on loopback; `endpoint` says where."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)


def _values(attributes: Any) -> dict[str, Any]:
    return {
        pair.key.removeprefix(PREFIX): getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in attributes
    }


def _span(service: str, span: Any) -> CollectedSpan:
    is_failed = span.status.code == span.status.STATUS_CODE_ERROR
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed_with=span.status.message if is_failed else "",
        attributes=_values(span.attributes),
    )
