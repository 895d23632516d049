"""The health check of the containers, run as they run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "health_check.py"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def served() -> Iterator[tuple[str, health.HealthServicer]]:
    """Address and servicer of a health service on loopback."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(grace=None).wait()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_serving_service_is_healthy(served: tuple[str, health.HealthServicer]) -> None:
    address, servicer = served
    servicer.set("", SERVING)
    assert run(address).returncode == 0


def test_a_service_that_drains_is_not_healthy(served: tuple[str, health.HealthServicer]) -> None:
    address, servicer = served
    servicer.set("", SERVING)
    servicer.set("readiness", NOT_SERVING)
    completed = run(address, "readiness")
    assert completed.returncode == 1
    assert "readiness is NOT_SERVING" in completed.stderr


def test_an_unknown_entry_is_named(served: tuple[str, health.HealthServicer]) -> None:
    completed = run(served[0], "no-such-entry")
    assert completed.returncode == 1
    assert "NOT_FOUND" in completed.stderr


def test_an_unreachable_service_is_named() -> None:
    # Port 1 is reserved (tcpmux); nothing listens there on loopback.
    completed = run("127.0.0.1:1")
    assert completed.returncode == 1
    assert "127.0.0.1:1: UNAVAILABLE" in completed.stderr


def test_wrong_usage_is_told_apart_from_ill_health() -> None:
    completed = run()
    assert completed.returncode == 2
    assert "HOST:PORT" in completed.stderr
