"""Traces of runs: one tree from the run down to each rank, by OpenTelemetry.

    run > step 3 > actor.update > TrainerService/Update (rank 0) > TrainerService/Update (rank 1)
                                                               > fetch > ExperienceService/Fetch

The context travels as W3C `traceparent` in gRPC metadata. Only OpenTelemetry's interface is
imported here. Without `tracing_to`, or a provider that the program has set up itself, spans do
nothing. Spans are sent in the background; if the collector is gone, only the spans are lost.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rolemesh.rpc.errors import RolemeshError

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Standard variables, either of which switches traces on."""

FLUSH_DEADLINE_S = 2.0
"""Longest wait at the end of a process for its last spans to be sent."""

UNTRACED = ("/rolemesh.v1.WorkerService/GetStatus", "/rolemesh.v1.WorkerService/Drain")
"""Calls that do no work of a run: they are made once a second, or at the end."""

PREFIX = "rolemesh."
"""Prefix of attributes: rolemesh.role, rolemesh.step and so on."""

AttributeValue = str | int | float | bool

# The provider of the program, if it has one; `tracing_to` replaces it.
_tracer = trace.get_tracer("rolemesh")
_PROPAGATOR = TraceContextTextMapPropagator()


class TracingError(ValueError):
    """Traces cannot be sent with these settings."""


def is_configured(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces."""
    return any(environment.get(name) for name in ENDPOINT_VARIABLES)


def from_environment(service: str, environment: Mapping[str, str]) -> AbstractContextManager[None]:
    """`tracing_to` if the standard variables ask for traces; otherwise it does nothing."""
    return tracing_to(service) if is_configured(environment) else nullcontext()


def trace_environment(endpoint: str, sample_ratio: float) -> dict[str, str]:
    """The standard variables with which another process sends its part of the same traces."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(sample_ratio),
    }


def check_installed() -> None:
    """Raises TracingError when spans could not be sent."""
    try:
        importlib.import_module("opentelemetry.sdk.trace.export")
        importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError as error:
        raise TracingError(
            f"traces cannot be sent ({error}): pip install 'rolemesh[otel]', or switch them off"
        ) from error


@contextmanager
def tracing_to(
    service: str,
    *,
    endpoint: str | None = None,
    sample_ratio: float | None = None,
    on_problem: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Sends the process's spans by OTLP over gRPC until the block ends.

    Args:
        service: Name under which the process is shown, e.g. "rolemesh-actor".
        endpoint: http://host:port of the collector, https:// for an encrypted one; None takes the
            standard variables.
        sample_ratio: Share of the traces beginning here that are kept; None takes the standard
            variables.
        on_problem: Called once, from any thread, if spans cannot be sent; None logs the problem.

    Raises:
        TracingError: The packages of the extra "otel" are missing.
    """
    global _tracer
    check_installed()
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    sampler = None
    if sample_ratio is not None:
        sampler = sampling.ParentBased(sampling.TraceIdRatioBased(sample_ratio))
    provider = sdk.TracerProvider(
        sampler=sampler,
        resource=resources.Resource.create({"service.name": service}),
        shutdown_on_exit=False,
    )
    sender = exporter.OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(export.BatchSpanProcessor(sender))
    before, _tracer = _tracer, provider.get_tracer("rolemesh")
    try:
        with _problems_told_once(on_problem or logger.warning):
            try:
                yield
            finally:
                last = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
                last.start()
                last.join(FLUSH_DEADLINE_S)
                if last.is_alive():
                    # A collector that hangs must not keep the process: this ends the call.
                    sender.shutdown()
                    last.join(FLUSH_DEADLINE_S)
    finally:
        _tracer = before


@contextmanager
def _problems_told_once(tell: Callable[[str], None]) -> Iterator[None]:
    """Passes on only the first warning of OpenTelemetry: a dead collector would fill the log."""
    logs = logging.getLogger("opentelemetry")
    handler = _FirstProblem(tell)
    propagate, logs.propagate = logs.propagate, False
    logs.addHandler(handler)
    try:
        yield
    finally:
        logs.removeHandler(handler)
        logs.propagate = propagate


class _FirstProblem(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell: Callable[[str], None] | None = tell

    def emit(self, record: logging.LogRecord) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(f"traces are not sent, and all else goes on: {record.getMessage()}")


# --- spans ----------------------------------------------------------------------------------


@contextmanager
def span(
    name: str, *, parent: Span | None = None, **attributes: AttributeValue | None
) -> Iterator[Span]:
    """A span that is the current one inside the block, and fails with it.

    Args:
        name: Name for people, e.g. "actor.update".
        parent: Parent of the span; None: the current span. Below one that was begun without
            traces there is none.
        attributes: Attributes without the prefix, e.g. step=3; one that is None is left out.
    """
    if parent is not None and not parent.get_span_context().is_valid:
        # No spans are made. A span that does nothing would be a fifth of what a call costs.
        yield trace.INVALID_SPAN
        return
    context = None if parent is None else trace.set_span_in_context(parent)
    made = _tracer.start_span(name, context, attributes=_named(attributes))
    with _current(made):
        yield made


def begin(name: str, **attributes: AttributeValue | None) -> Span:
    """A span below the current one that does not become current; `end` ends it."""
    return _tracer.start_span(name, attributes=_named(attributes))


def end(ended: Span, error: BaseException | None = None) -> None:
    """Ends a span of `begin`; a repeat does nothing."""
    if error is not None:
        fail(ended, error)
    if ended.is_recording():
        ended.end()


@contextmanager
def serving(
    full_method: str, metadata: Iterable[tuple[str, str | bytes]] | None, role: str, rank: int
) -> Iterator[Span]:
    """The span of a call that this process serves, below that of its caller."""
    if full_method in UNTRACED:
        yield trace.INVALID_SPAN
        return
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    context = _PROPAGATOR.extract(carrier)
    name = full_method.removeprefix("/rolemesh.v1.")
    made = _tracer.start_span(
        name, context, SpanKind.SERVER, attributes=_named({"role": role, "rank": rank})
    )
    with _current(made):
        yield made


def outgoing(full_method: str) -> tuple[tuple[str, str], ...]:
    """Metadata that puts the callee's span below the current one; empty without a span."""
    if not trace.get_current_span().get_span_context().is_valid or full_method in UNTRACED:
        return ()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def note(noted: Span, **attributes: AttributeValue | None) -> None:
    """Adds attributes; None leaves one out."""
    if noted.is_recording():
        noted.set_attributes(_named(attributes))


def fail(failed: Span, error: BaseException) -> None:
    """Marks a span as failed, with the reason of the error."""
    # The error of an abort says nothing: its cause was noted before.
    if not failed.is_recording() or isinstance(error, grpc.aio.AbortError):
        return
    known = error if isinstance(error, RolemeshError) else error.__cause__
    reason = known.reason if isinstance(known, RolemeshError) else type(error).__name__
    failed.set_attributes(_named({"reason": reason}))
    failed.set_status(Status(StatusCode.ERROR, str(error)))


@contextmanager
def _current(made: Span) -> Iterator[None]:
    token = otel_context.attach(trace.set_span_in_context(made))
    try:
        yield
    except BaseException as error:
        fail(made, error)
        raise
    finally:
        otel_context.detach(token)
        made.end()


def _named(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {PREFIX + name: value for name, value in attributes.items() if value is not None}
