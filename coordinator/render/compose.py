"""A file of Docker Compose to add to docker-compose.yml: one recipe on the GPUs of a host.

It holds all that depends on the recipe: the GPUs of each role (a list with one for each rank), the
layouts, the code and variables that it names, the shared memory, the rights of a reward that is
trained, and the command of the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.model_sizes import trained_models
from rolemesh.coordinator.recipe.role_names import field_of, kind_of, role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.compose_hosts import ComposeHosts, add_host, gpus_on_host
from rolemesh.coordinator.render.memory import experience_bytes, shared_memory_bytes
from rolemesh.coordinator.render.placement import device_ids
from rolemesh.engine.specs import named_in

_OPTIONAL_ROLES = ("teacher", "cost", "rollout")
"""Roles that docker-compose.yml starts only with a profile."""

_GRANTED_BY = {
    "code": "ROLEMESH_SERVICE__CODE_NAMES",
    "command": "ROLEMESH_SERVICE__CODE_NAMES",
    "variable": "ROLEMESH_SERVICE__VARIABLES",
    "network": "ROLEMESH_SERVICE__FUNCTION_NETWORK",
}
"""Settings that let a run name what the recipe does. docker-compose.yml grants folders."""

_GPU_ENVIRONMENT = {
    # Libraries of the driver that the container gets: CUDA, and NVML for memory and load.
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "NCCL_DEBUG": "${NCCL_DEBUG:-WARN}",
}

_GPU_CONTAINER: dict[str, Any] = {
    # With this right, Docker's filter of system calls allows NCCL and vLLM to bind buffers to
    # NUMA nodes.
    "cap_add": ["SYS_NICE"],
    # NCCL and CUDA lock host buffers, and compilers of kernels need deep stacks.
    "ulimits": {"memlock": -1, "stack": 64 << 20},
}


_TRAINED_REWARD: dict[str, Any] = {
    # It judges by its own model and runs no function, and is one of the trained roles: it saves
    # checkpoints and keeps cuts as they do, and has their user.
    "user": "10001:10001",
    "ipc": "service:common",
    "depends_on": {"common": {"condition": "service_started", "restart": True}},
    "volumes": ["runs:/mesh/runs"],
}
_OWNER_OF_ITS_IDENTITY = {"environment": {"REWARD_USER": "10001"}}


class _Reset:
    """Marks a key of docker-compose.yml that this file removes."""


class PlainDumper(yaml.SafeDumper):
    """Writes plain data, without YAML references to equal parts."""

    def ignore_aliases(self, data: object) -> bool:
        """Each part is written out."""
        return True


PlainDumper.add_representer(_Reset, lambda dumper, _: dumper.represent_sequence("!reset", []))


def compose_file(
    recipe: Recipe,
    command: Sequence[str],
    devices: Sequence[str] | None,
    header: str,
    hosts: ComposeHosts | None = None,
    number: int = 0,
) -> str:
    """Returns the text of the file of one host.

    Args:
        recipe: The recipe, with its pools on GPUs or on the CPU.
        command: Command of the coordinator: "train", the recipe's files and the settings.
        devices: Devices of the host that "cuda:0", "cuda:1", ... of the pools mean: indexes of
            nvidia-smi or UUIDs; None: "0", "1", ...
        header: Comment at the top, without "# ".
        hosts: The hosts; None: this one has all roles.
        number: Number of the host whose file it is, from 0.

    Raises:
        RecipeError: A role has several services, but is on one host, or a pool names a device that
            does not exist.
    """
    # One of several teachers runs elsewhere, if at all.
    roles = [role for role in recipe.roles if role == kind_of(role)]
    for role in recipe.roles:
        if role not in roles and recipe.address(role) is None:
            raise RecipeError(
                f"{field_of(role)} is one of several teachers, but the mesh of docker-compose.yml "
                f"has one container of that role: give services.{role}.address, where it runs by "
                "itself, or render the recipe for Kubernetes or Slurm"
            )
        if hosts is None and len(recipe.services_of(role)) > 1:
            raise RecipeError(
                f"services.{role} has {len(recipe.services_of(role))} services, but the mesh of "
                "docker-compose.yml has one container a role: have one, and spread it by its "
                "layout, or give --hosts, and one to each host"
            )
    capacity = experience_bytes(recipe)
    services: dict[str, Any] = {
        "common": {"shm_size": f"{shared_memory_bytes(recipe) >> 20}mb"},
    }
    for role in roles:
        service: dict[str, Any] = {
            "environment": {
                "ROLEMESH_SERVICE__LAYOUT": recipe.layout(role).flag(),
                "ROLEMESH_SERVICE__EXPERIENCE_CAPACITY_BYTES": str(capacity),
            }
        }
        service["environment"] |= granted_settings(recipe, role)
        if role in _OPTIONAL_ROLES:
            service["profiles"] = _Reset()
        if hosts is None:
            ids = device_ids(recipe, role, devices)
        else:
            own = [one for one in hosts.services_on(number) if role_of(one) == role]
            ids = gpus_on_host(recipe, hosts, own[0], devices) if own else []
        if ids:
            _add_gpus(service, ids)
        services[role] = service
    if "reward" in trained_models(recipe):
        services["certs"] = _OWNER_OF_ITS_IDENTITY
        services["reward"] |= _TRAINED_REWARD
        services["reward"]["environment"]["ROLEMESH_SERVICE__SHARED_MEMORY"] = "true"
    services["coordinator"] = {"command": list(command)}
    if hosts is not None:
        add_host(services, recipe, hosts, number, _Reset())
    body = yaml.dump({"services": services}, Dumper=PlainDumper, sort_keys=False, width=100)
    return "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines()) + "\n" + body


def granted_settings(recipe: Recipe, role: str) -> dict[str, str]:
    """Settings of a service that let a run name the code and variables that the recipe does."""
    settings = {}
    for kind, setting in _GRANTED_BY.items():
        named = named_in(recipe.sent_section(role))
        values = dict.fromkeys(one.value for one in named if one.kind == kind)
        if values:
            settings[setting] = ",".join(values)
    return settings


def _add_gpus(service: dict[str, Any], ids: Sequence[str]) -> None:
    service["environment"] |= _GPU_ENVIRONMENT
    service |= _GPU_CONTAINER
    reservation = {"driver": "nvidia", "device_ids": list(ids), "capabilities": ["gpu"]}
    service["deploy"] = {"resources": {"reservations": {"devices": [reservation]}}}
