"""What processes of services and runs listen on: this host, and only what the page names."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import warm_processes
from support.listening import Listener, listeners_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.rollout_services import Caller, process_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"

RUN_S = 500
LOOK_S = 0.1
"""Pause between two looks at a run: torch's store, once open, stays as long as the agent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@functools.cache
def ports_by_kind() -> dict[str, range]:
    """How many ports a process of each kind may have, as the page says it."""
    section = PAGE.read_text().partition("## What listens\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (none|\d+)(?: to (\d+))? \|", section, re.MULTILINE)
    return {
        kind: range(0, 1) if least == "none" else range(int(least), int(most or least) + 1)
        for kind, least, most in rows
    }


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started, with the forks that stand behind those."""
    first = psutil.Process(warm_processes.forked(pid))
    family = [first, *first.children(recursive=True)]
    return list({*family, *(psutil.Process(warm_processes.forked(one.pid)) for one in family)})


def ports(found: set[Listener]) -> dict[int, set[int]]:
    """Of each process that listens; fails where one is reached from elsewhere, or is no TCP."""
    assert all(one.is_private and one.protocol == "tcp" for one in found), found
    by_pid = defaultdict(set)
    for one in found:
        by_pid[one.pid].add(one.port)
    return by_pid


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
        found = ports(listeners_of(family_of(process.pid)))
        await caller.channel.close()
    # Those are the ranks': their agent serves nothing.
    assert len(found) == 2
    assert all(
        len(one) in ports_by_kind()["rank of a service of several"] for one in found.values()
    )
    assert int(address.rpartition(":")[2]) in set().union(*found.values())


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
        found = ports(listeners_of(family_of(process.pid)))
        await caller.channel.close()
    (listening,) = found.values()
    assert len(listening) in ports_by_kind()["service of one rank with vLLM"]
    assert int(address.rpartition(":")[2]) in listening


# --- a whole run ------------------------------------------------------------------------------


def whole_recipe(model: Path, functions: Path) -> dict[str, Any]:
    """A run of all kinds of processes: ranks, services of one, a sampler, workers of functions."""
    functions.write_text(
        "def judge(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    recipe = tiny_recipe(
        model,
        actor__train={"tp": 2},
        actor__generate={"tp": 1},
        reward__source=f"python:{functions}:judge",
        rollout={"rollout": {"type": "hf", "max_model_len": 256}, "layout": {"dp": 2}},
        schedule__sampler={"type": "async", "max_staleness": 1},
        pools={
            "policy": {"roles": ["actor"]},
            "sampler": {"roles": ["rollout"]},
            "others": {"roles": ["critic", "reference", "reward"]},
        },
        api__http_port=0,
    )
    recipe["rollout"] |= {"model": {"path": str(model)}, "data": recipe["actor"]["data"]}
    return recipe


def elsewhere(folder: Path) -> tuple[str, ...]:
    """A command in front of a run, for which this host's name leads to an address of a network.

    That is where gloo listens when it is not told otherwise. Without root, or on a host that has no
    such address, the name leads where it leads.
    """
    addresses = [
        address.address
        for name, of_interface in psutil.net_if_addrs().items()
        for address in of_interface
        if address.family is socket.AF_INET and name != "lo" and psutil.net_if_stats()[name].isup
    ]
    has_mounts = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"]).returncode == 0
    if not addresses or not has_mounts:
        return ()
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{addresses[0]} {socket.gethostname()}\n")
    script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh")


def kind_of(process: psutil.Process, coordinator: int) -> str:
    """The kind of a process of a run, in the page's words."""
    command = process.cmdline()
    if process.pid == coordinator:
        return "coordinator of a run, hub, `rolemesh dashboard`"
    if "valkey" in process.name() or "redis" in process.name():
        return "store that a run starts"
    if not any(re.fullmatch(r"rolemesh\.services\.\w+", word) for word in command):
        return "worker of functions or environments"
    if "--rank-store" in command:
        return "rank of a service of several"
    has_ranks = any(int(size) > 1 for size in re.findall(r"\b[a-z]+=(\d+)", " ".join(command)))
    return "agent that starts ranks" if has_ranks else "service of one rank"


def has_begun(process: psutil.Process) -> bool:
    """Whether its own program runs: a fork has its parent's command line and sockets until then."""
    try:
        parent = process.parent()
        return parent is None or process.cmdline() != parent.cmdline()
    except psutil.Error:
        return False


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 100)
def test_a_run_listens_where_the_page_says_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    run = CliRun(
        whole_recipe(folder, tmp_path / "functions.py"),
        tmp_path,
        is_warm=False,
        within=elsewhere(tmp_path),
    )
    kinds: dict[int, str] = {}
    found: set[Listener] = set()
    try:
        deadline = time.monotonic() + RUN_S
        while run.process.poll() is None and time.monotonic() < deadline:
            processes = [psutil.Process(run.process.pid), *run.descendants()]
            # Asked before: a program that has begun does not go back.
            begun = {process.pid for process in processes if has_begun(process)}
            seen = listeners_of(processes)
            # Looked at while they are there: a folder that is private may be gone later.
            assert [one for one in seen - found if not one.is_private] == []
            found |= {one for one in seen if one.pid in begun}
            for process in processes:
                try:
                    kinds[process.pid] = kind_of(process, run.process.pid)
                except psutil.Error:
                    continue
            time.sleep(LOOK_S)
        assert run.wait(1) == 0, run.output
    finally:
        run.close()
    vllm = "service of one rank with vLLM"
    assert {*kinds.values(), vllm} == set(ports_by_kind())
    counts: dict[str, set[int]] = defaultdict(set)
    for pid, kind in kinds.items():
        counts[kind].add(len({one.port for one in found if one.pid == pid and one.port}))
    for kind, seen_counts in counts.items():
        # What just begins, or is about to end, listens to nothing.
        assert seen_counts - {0} <= set(ports_by_kind()[kind]), (kind, seen_counts, found)
        assert max(seen_counts) in ports_by_kind()[kind], (kind, seen_counts)
    (store,) = [one for one in found if one.protocol != "tcp"]
    assert (kinds[store.pid], store.protocol) == ("store that a run starts", "unix")
