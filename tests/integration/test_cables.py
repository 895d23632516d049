"""The cable on which long links are measured: what is sent arrives, no sooner than it may."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cables import Cable
from support.hosts import HostNetwork, are_apart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not are_apart() or not Path("/dev/net/tun").exists(),
        reason="needs network namespaces and /dev/net/tun",
    ),
]

NUM_BYTES = 4 << 20
BITS_PER_S = 100e6
ROUND_TRIP_S = 0.05

SENDER = f"""
import hashlib, random, socket, sys
content = random.Random(5).randbytes({NUM_BYTES})
with socket.create_server((sys.argv[1], 5000)) as server:
    print(hashlib.sha256(content).hexdigest(), flush=True)
    while True:
        with server.accept()[0] as connection:
            connection.sendall(content)
"""

TAKER = """
import hashlib, json, socket, sys, time
started = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connected, content = time.perf_counter(), b""
    while part := connection.recv(1 << 20):
        content += part
times = [connected - started, time.perf_counter() - connected]
print(json.dumps([hashlib.sha256(content).hexdigest(), *times]))
"""


def test_a_cable_has_its_rate_and_its_round_trip_and_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "sender.log"
    with (
        HostNetwork(2) as network,
        Cable(network, bits_per_s=BITS_PER_S, round_trip_s=ROUND_TRIP_S) as cable,
    ):
        sender = network.start(0, [sys.executable, "-c", SENDER, cable.addresses[0]], log)
        deadline = time.monotonic() + 60
        while not sender.text.endswith("\n"):
            assert time.monotonic() < deadline, sender.text
            time.sleep(0.05)
        taken = subprocess.run(
            network.command(1, [sys.executable, "-c", TAKER, cable.addresses[0]]),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    digest, connect_s, content_s = json.loads(taken.stdout)
    assert digest == sender.text.strip()
    assert connect_s >= ROUND_TRIP_S
    assert content_s >= 8 * NUM_BYTES / BITS_PER_S
