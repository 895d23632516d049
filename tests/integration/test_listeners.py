"""What the processes of a service listen on: this host alone, and only what the docs name."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path

import psutil
import pytest
from support import warm_processes
from support.mesh_runs import tiny_model
from support.rollout_services import Caller, process_of

GLOO_GROUPS = 16
"""At most so many process groups does a rank make; each has a listener of its own."""

Listeners = dict[int, list[tuple[str, int]]]
"""Address and port of what each process listens on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def listeners(pid: int) -> Listeners:
    """Of a service's processes: the one with that pid, and all that it started."""
    first = psutil.Process(warm_processes.forked(pid))
    family = [first, *first.children(recursive=True)]
    # A process from the warm one stands behind each that was started.
    behind = [psutil.Process(warm_processes.forked(one.pid)) for one in family]
    found: Listeners = {}
    for one in {*family, *behind}:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[one.pid] = [
                (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
                for connection in one.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def check(found: Listeners, num_ranks: int, address: str) -> None:
    """The gRPC of each rank and the gloo of its groups, all on loopback; nothing else."""
    places = [place for listening in found.values() for place in listening]
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in places), found
    listening = [ports for ports in found.values() if ports]
    assert len(listening) == num_ranks, found
    assert all(1 < len(ports) <= 1 + GLOO_GROUPS for ports in listening), found
    assert int(address.rpartition(":")[2]) in [port for _, port in places]


async def test_a_service_of_two_ranks_listens_on_loopback_alone(
    folder: Path, tmp_path: Path
) -> None:
    with process_of("actor", tmp_path, "--layout", "tp=2") as (address, process):
        caller = Caller(address)
        await caller.initialize(
            model={"path": str(folder), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "hf", "max_model_len": 256},
            train={"tp": 2},
        )
        found = listeners(process.pid)
        await caller.channel.close()
    # Those are the ranks': their agent serves nothing.
    check(found, num_ranks=2, address=address)


@pytest.mark.slow
async def test_an_actor_of_one_rank_with_vllm_listens_on_loopback_alone(
    folder: Path, tmp_path: Path
) -> None:
    with process_of("actor", tmp_path) as (address, process):
        caller = Caller(address)
        await caller.initialize(
            model={"path": str(folder), "compute_dtype": "float32"},
            optimizer={"learning_rate": 1e-2},
            rollout={"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4},
        )
        found = listeners(process.pid)
        await caller.channel.close()
    check(found, num_ranks=1, address=address)
