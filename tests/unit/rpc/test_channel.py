"""Channel options, deadlines and counted traffic."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path

import pytest

from rolemesh.rpc.channel import (
    CLIENT_OPTIONS,
    SERVER_OPTIONS,
    WATCHED_OPTIONS,
    ChannelTraffic,
    _service_config,
    current_call,
    open_channel,
    serving_call,
)
from rolemesh.rpc.policy import Idempotency, method_policies


@pytest.fixture(scope="module")
def grpc_library() -> bytes:
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


ALL_OPTIONS = CLIENT_OPTIONS + WATCHED_OPTIONS + SERVER_OPTIONS


@pytest.mark.parametrize("name", sorted({name for name, _ in ALL_OPTIONS}))
def test_every_option_name_is_known_to_the_library(name: str, grpc_library: bytes) -> None:
    # gRPC ignores a misspelt name without a word. C strings end in a zero byte.
    assert name.encode() + b"\x00" in grpc_library


def test_no_option_raises_the_message_caps() -> None:
    names = {name for name, _ in ALL_OPTIONS}
    assert not any("message_length" in name for name in names)


def test_only_idempotent_methods_are_retried_and_only_when_unavailable() -> None:
    (config,) = json.loads(_service_config())["methodConfig"]
    retried = {f"/{name['service']}/{name['method']}" for name in config["name"]}
    expected = {
        method
        for method, policy in method_policies().items()
        if policy.idempotency is Idempotency.IDEMPOTENT
    }
    assert retried == expected
    assert config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:0", "host:70000", ":50051", "h:x", "http://host:50051"]
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        open_channel(address)


def test_traffic_adds_up_over_methods() -> None:
    traffic = ChannelTraffic()
    traffic.of("/a").calls += 2
    traffic.of("/a").sent_bytes += 10
    traffic.of("/b").calls += 1
    traffic.of("/b").received_bytes += 5
    total = traffic.total
    assert (total.calls, total.sent_bytes, total.received_bytes) == (3, 10, 5)


def test_a_task_serves_a_call_only_inside_the_block() -> None:
    assert current_call() is None
    with serving_call("id", time.monotonic() + 5) as call:
        assert current_call() is call
        with serving_call("inner", math.inf) as inner:
            assert current_call() is inner
        assert current_call() is call
    assert current_call() is None
