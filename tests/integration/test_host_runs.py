"""Whole runs whose actor is on several hosts: the curve, the weights, and a host that vanishes."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import hosts as host_support
from support.coordinator_doors import written
from support.hosts import HostNetwork, HostProcess
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.rollout_services import process_of

from rolemesh.rpc.members.authority import Authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROLES = ("critic", "reference", "reward")
RUN_S = 400.0
END_S = 120.0
"""An interpreter that has imported vLLM takes long to take itself apart."""

START_S = 600.0
"""Eight ranks that each import all that a model needs, on two cores that others use as well."""

STEPS = 3

LAYOUTS = {
    "1-2-2_to_1-1-2-2": (2, "tp=2,dp=2,fsdp=1", {"tp": 1}),
    "fsdp": (2, "dp=4,fsdp=4", {}),
    "2-2-1_to_1-1-4": (2, "pp=2,tp=2", {"tp": 1}),
    "1-2-2_to_1-2-2_vllm": (2, "tp=2,dp=2,fsdp=1", {"tp": 2}),
    "1-2-2_published": (2, "tp=2,dp=2,fsdp=1", {}),
    "1-2-4_to_1-1-2-4": (4, "tp=2,dp=4,fsdp=1", {"tp": 1}),
    "fsdp_of_8": (4, "dp=8,fsdp=8", {}),
    "2-2-2_to_1-1-4-2": (4, "pp=2,tp=2,dp=2,fsdp=1", {"tp": 1}),
    "2-2-2_to_1-2-2-2_vllm": (4, "pp=2,tp=2,dp=2,fsdp=2", {"tp": 2}),
    "1-2-4_published": (4, "tp=2,dp=4,fsdp=1", {}),
}
"""Number of hosts, with two ranks each, and layouts by the paper's names: p-t-d of training, and of
generation. Those that are published have a rollout service sample."""

VLLM = {"type": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}


class Mesh:
    """Certificates, and the services of all roles but the actor's on this machine."""

    def __init__(self, folder: Path, network: HostNetwork) -> None:
        authority = Authority.make()
        self.folder = folder
        self.network = network
        self.certificates = folder / "certs"
        self.certificates.mkdir()
        for member in ("coordinator", "actor", "rollout", *ROLES):
            written(authority.issue(member), self.certificates / f"{member}.pem")
        self.model = tiny_model(folder / "tiny")
        with socket.socket() as free:
            free.bind((network.own_address, 0))
            self.port = free.getsockname()[1]

    def settings(self, role: str, host: str) -> list[str]:
        """Of a service: what it may use, who it is, and where it listens."""
        return [
            *("--identity", str(self.certificates / f"{role}.pem"), "--host", host),
            *("--folder", str(self.folder.parent), "--drain-timeout-s", "20"),
        ]

    def recipe(self, actor: str, kind: str) -> dict[str, Any]:
        number, layout, generate = LAYOUTS[kind]
        sizes = {name: int(size) for name, size in (one.split("=") for one in layout.split(","))}
        recipe = tiny_recipe(
            self.model,
            run__steps=STEPS,
            actor__train=sizes,
            actor__generate=generate,
            certificates=str(self.certificates),
        )
        if number == 4:
            # Each of eight ranks has rows.
            recipe["run"]["prompts_per_step"] = recipe["algorithm"]["mini_batch_rows"] = 8
        if not generate:
            del recipe["actor"]["generate"]
        if kind.endswith("vllm"):
            recipe["actor"]["rollout"] = VLLM
        if kind.endswith("published"):
            recipe["rollout"] = {
                "model": {"path": str(self.model)},
                **{name: recipe["actor"][name] for name in ("rollout", "data")},
            }
            recipe["schedule"] = {"sampler": {"type": "sync"}}
            recipe["pools"] = {
                "policy": {"roles": ["actor", *ROLES]},
                "sampler": {"roles": ["rollout"]},
            }
        recipe["services"] = {"actor": {"address": actor}}
        return recipe

    @contextlib.contextmanager
    def others(self, recipe: dict[str, Any]) -> Iterator[None]:
        """Has the services of the other roles run, on addresses that the hosts reach."""
        with contextlib.ExitStack() as ending:
            for role in (*ROLES, *(["rollout"] if "rollout" in recipe else [])):
                flags = self.settings(role, self.network.own_address)
                address, _ = ending.enter_context(process_of(role, self.folder, *flags))
                recipe["services"][role] = {"address": address}
            yield

    def host(self, number: int, kind: str, log: Path) -> HostProcess:
        """Starts the actor's command on a host."""
        return self.network.start(
            number,
            [
                *(sys.executable, "-m", "rolemesh", "serve", "actor"),
                *("--layout", LAYOUTS[kind][1]),
                *("--hosts", str(LAYOUTS[kind][0]), "--host-rank", str(number)),
                *("--threads", "1"),
                *("--meet", f"{self.network.addresses[0]}:29400", "--port", str(self.port)),
                *self.settings("actor", self.network.addresses[number]),
            ],
            log,
            OMP_NUM_THREADS="1",
        )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with HostNetwork(4) as network:
        yield Mesh(tmp_path_factory.mktemp("mesh"), network)


def run_on_one_host(mesh: Mesh, folder: Path, kind: str) -> CliRun:
    flags = [*mesh.settings("actor", mesh.network.own_address), "--layout", LAYOUTS[kind][1]]
    with process_of("actor", folder, *flags) as (address, _):
        recipe = mesh.recipe(address, kind)
        with mesh.others(recipe):
            return finished(recipe, folder)


def run_on_hosts(mesh: Mesh, folder: Path, kind: str) -> CliRun:
    agents = [
        mesh.host(number, kind, folder / f"host-{number}.log") for number in range(LAYOUTS[kind][0])
    ]
    try:
        recipe = mesh.recipe(f"{mesh.network.addresses[0]}:{mesh.port}", kind)
        with mesh.others(recipe):
            wait_for_port(recipe["services"]["actor"]["address"], agents)
            run = finished(recipe, folder)
        # As an engine does it: all at once.
        for agent in agents:
            agent.terminate()
        assert {agent.wait(END_S) for agent in agents} == {0}, agents[1].text
        return run
    finally:
        for agent in agents:
            agent.vanish()


def finished(recipe: dict[str, Any], folder: Path) -> CliRun:
    run = CliRun(recipe, folder)
    try:
        assert run.wait(RUN_S) == 0, run.output
    finally:
        run.close()
    return run


def wait_for_port(address: str, agents: list[HostProcess], timeout_s: float = START_S) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            texts = "\n".join(agent.text for agent in agents)
            assert time.monotonic() < deadline, texts
            assert all(agent.process.poll() is None for agent in agents), texts
            time.sleep(0.2)
        else:
            return


def timeless(run: CliRun) -> list[dict[str, Any]]:
    """Metrics of the steps, but for times, memory and what else depends on the machine."""
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith(("time/", "memory/", "fetched", "device", "perf"))
            and not name.endswith(("_s", "_per_second", "_seconds", "_bytes"))
            and name not in ("timestamp",)
        }
        for step in run.metrics()
    ]


@pytest.fixture(scope="module")
def on_one_host(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CliRun]:
    """The run of a layout with all ranks on one host."""

    @functools.cache
    def run(kind: str) -> CliRun:
        return run_on_one_host(mesh, tmp_path_factory.mktemp("one"), kind)

    return run


def assert_same_bits(one: CliRun, other: CliRun) -> None:
    assert len(one.metrics()) == STEPS
    assert timeless(one) == timeless(other)
    ours, theirs = (load_file(run.out / "model" / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_several_hosts_give_the_bits_of_one(
    kind: str, mesh: Mesh, on_one_host: Callable[[str], CliRun], tmp_path: Path
) -> None:
    one = on_one_host(kind)
    assert_same_bits(one, run_on_hosts(mesh, tmp_path, kind))
    # What was compared is no run that stands still.
    entropies = [step["entropy"] for step in one.metrics()]
    assert len(set(entropies)) == STEPS
    if host_support.are_apart():
        told = (tmp_path / "host-0.log").read_text()
        assert "weights move between the ranks by gloo" in told, "no memory is shared"


def test_a_run_goes_on_after_a_host_has_vanished(
    mesh: Mesh, on_one_host: Callable[[str], CliRun], tmp_path: Path
) -> None:
    """An engine starts the service again on all hosts; the cuts of one of them are gone."""
    kind = "1-2-2_to_1-1-2-2"
    agents = [mesh.host(number, kind, tmp_path / f"host-{number}.log") for number in range(2)]
    recipe = mesh.recipe(f"{mesh.network.addresses[0]}:{mesh.port}", kind)
    with mesh.others(recipe):
        try:
            wait_for_port(recipe["services"]["actor"]["address"], agents)
            run = CliRun(recipe, tmp_path)
            try:
                run.wait_until(lambda: len(run.metrics()) >= 1, RUN_S)
                agents[1].vanish()
                assert agents[0].wait(30.0) == 1
                # Whichever notices first: a call of rank 0 to a rank there, or the agent.
                assert re.search(
                    r"a rank is gone: actor rank [23]|host 1 \(\S+, \w+\) has said nothing",
                    agents[0].text,
                ), agents[0].text
                agents = [
                    mesh.host(number, kind, tmp_path / f"again-{number}.log") for number in range(2)
                ]
                assert run.wait(RUN_S) == 0, f"{run.output}\n{agents[0].text}"
            finally:
                run.close()
        finally:
            for agent in agents:
                agent.vanish()
    assert "actor" in run.stdout
    assert_same_bits(on_one_host(kind), run)
