"""What the processes of a service listen on: this host alone, and only what the docs name."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path

import psutil
import pytest
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, process_of

GLOO_GROUPS = 16
"""More process groups than a rank makes; each has a listener of its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def listeners(process: psutil.Process) -> dict[int, list[tuple[str, int]]]:
    """Address and port of what the processes of a tree listen on, by process."""
    found: dict[int, list[tuple[str, int]]] = {}
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[one.pid] = [
                (connection.laddr.ip, connection.laddr.port)
                for connection in one.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def check(found: dict[int, list[tuple[str, int]]], num_ranks: int, service_port: int) -> None:
    """GRPC of each rank and the gloo of its groups, all on loopback; nothing of other processes."""
    places = [place for listening in found.values() for place in listening]
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in places), found
    listening = [ports for ports in found.values() if ports]
    assert len(listening) == num_ranks, found
    assert all(len(ports) <= 1 + GLOO_GROUPS for ports in listening), found
    assert service_port in [port for _, port in places]


async def test_a_service_of_two_ranks_listens_on_loopback_alone(
    folder: Path, tmp_path: Path
) -> None:
    flags = ("--layout", "tp=2", "--port", "0")
    with process_of("actor", tmp_path, *flags, is_warm=False) as (address, process):
        caller = Caller(address)
        await caller.initialize(
            model={"path": str(folder), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "hf", "max_model_len": 256},
            train={"tp": 2},
        )
        found = listeners(psutil.Process(process.pid))
        await caller.channel.close()
    assert found[process.pid] == [], "the agent of the ranks serves nothing"
    check(found, num_ranks=2, service_port=int(address.rpartition(":")[2]))


@pytest.mark.slow
async def test_an_actor_of_one_rank_with_vllm_listens_on_loopback_alone(
    folder: Path, tmp_path: Path
) -> None:
    with process_of("actor", tmp_path, is_warm=False) as (address, process):
        caller = Caller(address)
        await caller.initialize(
            model={"path": str(folder), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4},
        )
        found = listeners(psutil.Process(process.pid))
        await caller.channel.close()
    check(found, num_ranks=1, service_port=int(address.rpartition(":")[2]))
