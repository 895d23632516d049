"""Tests of the phases of a call's time, and of its reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.runtime.calls.call import Call, MetricNotFiniteError
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.server.operations import Operation
from rolemesh.v1 import experience_pb2

PAUSE_S = 0.05


@pytest.fixture
def call() -> Iterator[Call]:
    compute = ComputeThread()
    yield Call(Operation(("run", 1, 2, "actor.update", 0), "rolemesh.v1.Update", b""), compute)
    assert compute.close(5.0)


def phases(call: Call) -> dict[str, float]:
    report = call.report({}, 0)
    return {
        phase.phase: phase.duration.seconds + phase.duration.nanos * 1e-9 for phase in report.phases
    }


async def test_compute_outside_a_phase_counts_as_compute(call: Call) -> None:
    await call.compute(time.sleep, PAUSE_S)
    assert set(phases(call)) == {"compute", "queue"}
    assert phases(call)["compute"] >= PAUSE_S


async def test_compute_inside_a_phase_counts_for_that_phase(call: Call) -> None:
    with call.phase("weight_sync"):
        await call.compute(time.sleep, PAUSE_S)
    assert set(phases(call)) == {"weight_sync", "queue"}
    assert phases(call)["weight_sync"] >= PAUSE_S


async def test_a_phase_opened_on_the_compute_thread_takes_its_time_from_compute(
    call: Call,
) -> None:
    def work() -> None:
        with call.phase("generate"):
            time.sleep(PAUSE_S)

    started = time.monotonic()
    await call.compute(work)
    elapsed = time.monotonic() - started
    got = phases(call)
    assert got["generate"] >= PAUSE_S
    # No second is counted twice.
    assert sum(got.values()) <= elapsed


async def test_waiting_for_the_compute_thread_is_queue_time(call: Call) -> None:
    await asyncio.gather(call.compute(time.sleep, PAUSE_S), call.compute(time.sleep, PAUSE_S))
    assert phases(call)["queue"] >= PAUSE_S


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_metric_that_is_not_finite_is_refused_by_name(call: Call, value: float) -> None:
    with pytest.raises(MetricNotFiniteError, match=r"'policy_loss' of step 2 actor.update"):
        call.report({"kl": 0.0, "policy_loss": value}, 1)


def test_fetched_bytes_add_up_by_transport(call: Call) -> None:
    for transport, num_bytes in (("shm", 3), ("grpc", 4), ("shm", 5)):
        call.add_fetched(transport, num_bytes)
    assert dict(call.report({}, 9).fetched_bytes) == {"shm": 8, "grpc": 4}
    assert call.report({}, 9).num_tokens == 9


def test_abandoned_work_ends_at_its_next_progress(call: Call) -> None:
    call.progress("decode", 1, 2)
    call.abandon()
    with pytest.raises(UnavailableError, match="given up at 'decode'"):
        call.progress("decode", 2, 2)


async def test_an_exception_of_the_work_is_raised_by_the_await_and_the_thread_goes_on(
    call: Call,
) -> None:
    with pytest.raises(ZeroDivisionError):
        await call.compute(lambda: 1 / 0)
    assert await call.compute(lambda: 5) == 5


async def test_a_phase_reports_the_memory_that_it_held_and_no_other_phase_does(call: Call) -> None:
    held = 150 << 20

    def hold() -> int:
        return bytearray(held).count(1)

    with call.phase("weight_sync"):
        await call.compute(hold)
    await call.compute(time.sleep, 0)
    report = call.report({}, 0)
    peaks = {peak.phase: peak for peak in report.memory}
    assert set(peaks) == {"weight_sync", "compute"}
    if peaks["compute"].source == experience_pb2.MEMORY_SOURCE_RESIDENT_SINCE_START:
        pytest.skip("this kernel lets nobody reset a process's peak")
    difference = peaks["weight_sync"].peak_bytes - peaks["compute"].peak_bytes
    # The interpreter may take and give back a few MiB meanwhile.
    assert abs(difference - held) < 30 << 20
