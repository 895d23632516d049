"""Commands that start the services of a recipe as processes of this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.recipe.role_names import kind_of, role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import named_variables, service_flags
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.rpc.members.identity import Identity
from rolemesh.rpc.tracing import trace_environment

_DRAIN_TIMEOUT_S = 5.0
"""How long a service works on by itself after its coordinator is gone."""
_SHORT_WAIT = "4000"
"""Turns of libgomp's waiting loop before a thread sleeps: 0.1 to 0.2 ms, by the CPU. Most waits
within a pass are over before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceCommand:
    """How to start one service."""

    arguments: Sequence[str]
    """Program and its arguments. The service must write its announce file itself."""
    environment: Mapping[str, str]
    """Environment variables, over those that every child gets (`child_environment`)."""
    num_ranks: int = 1
    """Ranks that it starts."""


MakeCommand = Callable[[str, Path], ServiceCommand]
"""Takes the name of a service and the file in which it announces itself; returns its command."""


def service_commands(
    recipe: Recipe, directory: Path, identities: Mapping[str, Identity] | None = None
) -> MakeCommand:
    """Commands of the services that come with rolemesh, set up as the recipe says.

    Args:
        recipe: The recipe. Its services may use what it names, and nothing else.
        directory: Folder of the run's files, into which they write.
        identities: Of the services, by name; a service without one speaks in clear.
    """

    def make(service: str, announce: Path) -> ServiceCommand:
        role = role_of(service)
        spec = recipe.service(role)
        arguments = [sys.executable, "-m", f"rolemesh.services.{kind_of(role)}"]
        flags = {
            "--host": "127.0.0.1",
            "--port": "0",
            "--announce": str(announce),
            "--parent-pid": str(os.getpid()),
            "--drain-timeout-s": str(_DRAIN_TIMEOUT_S),
        }
        identity = (identities or {}).get(service)
        if identity is not None:
            # Beside the announce file, in the launcher's private folder.
            place = announce.with_suffix(".pem")
            write_atomically(place, identity.pem().decode(), is_private=True)
            flags["--identity"] = str(place)
        environment = {
            **{
                name: os.environ[name]
                for name in named_variables(recipe, role)
                if name in os.environ
            },
            # No file of the current directory or of the script's may shadow a package.
            "PYTHONSAFEPATH": "1",
            # A crash in native code leaves its traceback in the log.
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            # Models are folders. Nothing is fetched from a hub, nothing is reported to one.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **_waiting(recipe),
            **_memory(recipe, role),
            "CUDA_VISIBLE_DEVICES": visible_devices(
                recipe, service, os.environ.get("CUDA_VISIBLE_DEVICES")
            ),
            # Flags say what the service may use: nothing that is granted to another one here.
            "ROLEMESH_SERVICE__CODE_ROOTS": "",
            "ROLEMESH_SERVICE__CODE_NAMES": "",
            "ROLEMESH_SERVICE__VARIABLES": "",
            "ROLEMESH_SERVICE__FUNCTION_NETWORK": "false",
        }
        if recipe.tracing is not None:
            environment |= trace_environment(recipe.tracing.endpoint, recipe.tracing.sample_ratio)
        if spec.threads is not None:
            environment["OMP_NUM_THREADS"] = str(spec.threads)
        arguments += [word for flag, value in flags.items() for word in (flag, value)]
        # In one word: a folder's name may look like a flag.
        arguments.append(f"--folder={directory.absolute()}")
        arguments += service_flags(recipe, role)
        return ServiceCommand(
            arguments=arguments,
            environment=environment,
            num_ranks=recipe.layout(role).world_size,
        )

    return make


def _waiting(recipe: Recipe) -> dict[str, str]:
    """How a service's threads wait for each other at the end of an OpenMP operation.

    Roles that share cores must not spin while others compute: on two busy cores, two threads took
    28 s with spinning and 9 s without (4 s when quiet). Where all roles take turns, a wait of
    microseconds stays awake, and a step takes 0.85 times as long.
    """
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    if waiting["OMP_WAIT_POLICY"].upper() == "PASSIVE" and len(recipe.pools) == 1:
        waiting["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", _SHORT_WAIT)
    return waiting


def _memory(recipe: Recipe, role: str) -> dict[str, str]:
    """How a service's memory is taken from the system and given back, unless the user says.

    On a CPU each pass needs what the pass before it freed. Given back and taken again, it costs a
    fault a page: 300,000 in an update of the quickstart. In a virtual machine they were a quarter
    of a step. So what is free stays with the service, but for more than 1 GiB at the end of its
    heap, in large pages where the system has them to give.
    """
    chosen = {
        # Without it, long runs with many threads do not give freed memory back.
        "MALLOC_ARENA_MAX": "2"
    }
    if set(recipe.pool_of(role).devices) == {"cpu"}:
        # Other arenas than the first give each block of 64 MiB back at once.
        chosen = {
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**30),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def visible_devices(recipe: Recipe, service: str, allowed: str | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for a service, from the devices of its pool; empty for a CPU.

    The n services of one role share the pool: each gets every n-th device.

    Args:
        recipe: The recipe, which names the pool of the role.
        service: Name of the service.
        allowed: CUDA_VISIBLE_DEVICES of this process; "cuda:0" is its first device.

    Raises:
        ValueError: The pool mixes kinds of devices, or names one that does not exist.
    """
    role = role_of(service)
    name, pool = recipe.pool_name(role), recipe.pool_of(role)
    if set(pool.devices) == {"cpu"}:
        return ""
    services = recipe.services_of(role)
    devices = pool.devices[services.index(service) :: len(services)]
    visible = None if allowed is None else allowed.split(",")
    names = []
    for device in devices:
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            raise ValueError(
                f'pools.{name}.devices has {device!r}: give ["cpu"], or GPUs as ["cuda:0", ...]'
            )
        if visible is not None and int(index) >= len(visible):
            raise ValueError(
                f"pools.{name}.devices has {device!r}, but CUDA_VISIBLE_DEVICES={allowed} shows "
                f"{len(visible)} devices: name one of them"
            )
        names.append(index if visible is None else visible[int(index)])
    return ",".join(names)
