"""Tests of traces that are off, and of traces of a program that has its own."""

from __future__ import annotations

import subprocess
import sys

from rolemesh.rpc import tracing


def run(program: str) -> str:
    """What a fresh process prints: OpenTelemetry's provider is one a process."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


def test_without_configuration_nothing_is_sent_along_and_no_sdk_is_imported() -> None:
    program = (
        "import sys; from rolemesh.rpc import channel, tracing\n"
        "with tracing.span('x', step=1): print(tracing.outgoing('/rolemesh.v1.A/B'))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    assert run(program) == "()\n[]"


def test_spans_of_a_program_with_a_provider_of_its_own_are_part_of_its_trace() -> None:
    program = (
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from rolemesh.rpc import tracing\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "with trace.get_tracer('theirs').start_as_current_span('outer') as outer:\n"
        "    context = outer.get_span_context()\n"
        "    ids = f'{context.trace_id:032x}-{context.span_id:016x}'\n"
        "    expected = f'00-{ids}-{context.trace_flags:02x}'\n"
        "    print(dict(tracing.outgoing('/rolemesh.v1.A/B')) == {'traceparent': expected})\n"
        "    metadata = [('x-request-id', '1'), ('traceparent', expected)]\n"
        "with tracing.serving('/rolemesh.v1.A/B', metadata, 'actor', 2) as served:\n"
        "    print(served.parent.span_id == context.span_id, dict(served.attributes))"
    )
    attributes = {"rolemesh.role": "actor", "rolemesh.rank": 2}
    assert run(program) == f"True\nTrue {attributes}"


def test_another_process_is_told_by_the_standard_variables() -> None:
    told = tracing.trace_environment("http://h:4317", 0.25)
    assert tracing.is_configured(told)
    assert not tracing.is_configured({})
    assert (told["OTEL_TRACES_SAMPLER"], told["OTEL_TRACES_SAMPLER_ARG"]) == (
        "parentbased_traceidratio",
        "0.25",
    )
