"""Containers of one mesh on several hosts: what each host's file for Docker Compose adds.

Containers have the network of their host, since ranks and process groups reach each other at free
ports. All identities come from the authority of host 0, which also has coordinator and store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.model_sizes import trained_models
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.nodes import address_setting, check_nodes
from rolemesh.coordinator.render.placement import gpus_of
from rolemesh.coordinator.render.pods import ROLE_USERS

# Below the ports that Linux gives to programs that ask for a free one (32768 and up).
_MEET_PORT = 29400
_PORT = 29410
_METRICS_PORT = 29500
_METRICS_PORTS = 100
"""Of each role: one for each of its ranks."""

ELSEWHERE = {"profiles": ["elsewhere"]}
"""Of a service of docker-compose.yml that does not run on this host."""

_HOST_NETWORK = "host"


@dataclass(frozen=True, slots=True)
class ComposeHosts:
    """Hosts of a mesh and the services on each; at most one of a role on a host."""

    addresses: tuple[str, ...]
    nodes: Mapping[str, tuple[int, ...]]
    """Numbers of the hosts of each service, by its name."""

    @classmethod
    def checked(
        cls, recipe: Recipe, addresses: Sequence[str], nodes: Mapping[str, tuple[int, ...]]
    ) -> ComposeHosts:
        """The hosts; raises RecipeError where addresses, recipe and nodes do not go together."""
        for text in addresses:
            try:
                address = ip_address(text)
            except ValueError:
                address = None
            if address is None or address.version != 4 or address.is_loopback:
                raise RecipeError(
                    f"--hosts has {text!r}: give the IPv4 address at which the other hosts reach "
                    "that host, e.g. --hosts 10.0.0.1,10.0.0.2"
                )
        num_hosts = 1 + max((own[-1] for own in nodes.values()), default=0)
        if len(set(addresses)) < len(addresses) or len(addresses) != num_hosts or num_hosts < 2:
            raise RecipeError(
                f"--hosts has {', '.join(addresses)}, but --on puts roles on {num_hosts} hosts: "
                "give each host's address once, and roles to each but the first, e.g. --on critic=1"
            )
        check_nodes(recipe, nodes, "host")
        hosts = cls(tuple(addresses), nodes)
        for number in range(num_hosts):
            roles = [role_of(service) for service in hosts.services_on(number)]
            for role in roles:
                if roles.count(role) > 1:
                    raise RecipeError(
                        f"--on puts {roles.count(role)} services of the {role} on host {number}, "
                        "but a host has one container a role: put each on a host of its own, e.g. "
                        f"--on {role}=0,1"
                    )
        return hosts

    def services_on(self, number: int) -> list[str]:
        """Names of the services of a host."""
        return [service for service, own in self.nodes.items() if number in own]

    def address(self, service: str) -> str:
        """host:port at which the coordinator calls it."""
        return f"{self.addresses[self.nodes[service][0]]}:{_PORT + _place(service)}"


def _place(service: str) -> int:
    return list(ROLE_USERS).index(role_of(service))


def add_host(
    services: dict[str, Any], recipe: Recipe, hosts: ComposeHosts, number: int, removed: object
) -> None:
    """Makes the services of one host's file out of those of all roles.

    Args:
        services: Parts of docker-compose.yml to change, by name; changed.
        recipe: The recipe.
        hosts: All hosts.
        number: Number of the host, from 0.
        removed: Marks a key of docker-compose.yml that the file removes.
    """
    here = {role_of(service): service for service in hosts.services_on(number)}
    on_host = {"network_mode": _HOST_NETWORK, "networks": removed, "hostname": removed}
    for role in ROLE_USERS:
        if role in here:
            services[role] |= on_host
            _place_service(services[role], hosts, here[role], number)
        else:
            services[role] = dict(ELSEWHERE)
    if number == 0:
        services["store"] = {
            "networks": ["loopback"],
            "ports": ["127.0.0.1:${ROLEMESH_STORE_PORT:-6379}:6379"],
        }
        services["coordinator"] |= on_host | _coordinator(recipe, hosts, here)
    else:
        services["store"] = services["coordinator"] = dict(ELSEWHERE)
        services["certs"] = _given_identities(services, here)
    _share_runs(services, recipe, hosts, here)


def _place_service(part: dict[str, Any], hosts: ComposeHosts, service: str, number: int) -> None:
    own, place = hosts.nodes[service], _place(service)
    address = hosts.addresses[number]
    part["environment"] |= {
        "ROLEMESH_SERVICE__HOST": address,
        "ROLEMESH_SERVICE__PORT": str(_PORT + place),
        "ROLEMESH_SERVICE__METRICS_PORT": str(_METRICS_PORT + _METRICS_PORTS * place),
    }
    if len(own) > 1:
        part["environment"] |= {
            "ROLEMESH_SERVICE__HOSTS": str(len(own)),
            "ROLEMESH_SERVICE__HOST_RANK": str(own.index(number)),
            "ROLEMESH_SERVICE__MEET": f"{hosts.addresses[own[0]]}:{_MEET_PORT + place}",
        }
    if number == own[0]:
        check = ["CMD", "python", "/mesh/deploy/health_check.py", hosts.address(service)]
        part["healthcheck"] = {"test": check}
    else:
        # The coordinator calls the first host of a service; the others live and end with it.
        part["healthcheck"] = {"disable": True}


def _coordinator(recipe: Recipe, hosts: ComposeHosts, here: Mapping[str, str]) -> dict[str, Any]:
    environment = {
        "ROLEMESH_STORE__URL": "redis://rolemesh@127.0.0.1:${ROLEMESH_STORE_PORT:-6379}/0"
    }
    for role in recipe.roles:
        addresses = [hosts.address(service) for service in recipe.services_of(role)]
        name, value = address_setting(role, addresses)
        environment[name] = value
    not_here = {"condition": "service_healthy", "required": False}
    return {
        "environment": environment,
        "depends_on": {role: dict(not_here) for role in ROLE_USERS if role not in here},
    }


def _given_identities(services: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, Any]:
    """Container that gives each role the identity that host 0 has issued for it."""
    give = ["cd /given"]
    for role in here:
        user = services[role].get("user", f"{ROLE_USERS[role]}:{ROLE_USERS[role]}")
        new, own = f"/identities/{role}/.{role}.pem", f"/identities/{role}/{role}.pem"
        give += [f"cp {role}.pem {new}", f"chown {user} {new}", f"mv -f {new} {own}"]
    return {
        # The identities are files of the user who has brought them.
        "cap_add": ["DAC_READ_SEARCH"],
        "command": [" && ".join(give)],
        "volumes": [
            "${ROLEMESH_IDENTITIES:?name the folder with the identities that host 0 has issued}"
            ":/given:ro"
        ],
    }


def shares_runs(recipe: Recipe, hosts: ComposeHosts) -> bool:
    """Whether roles on several hosts write the checkpoints of a run."""
    trained = trained_models(recipe)
    return any(own != (0,) for name, own in hosts.nodes.items() if role_of(name) in trained)


def _share_runs(
    services: dict[str, Any], recipe: Recipe, hosts: ComposeHosts, here: Mapping[str, str]
) -> None:
    """Mounts one folder of runs on all hosts where a trained role writes its checkpoints apart."""
    if not shares_runs(recipe, hosts):
        return
    trained = trained_models(recipe)
    folder = "${ROLEMESH_RUNS:?name a folder of a disk that all hosts share}:/mesh/runs"
    for role in here:
        services[role]["volumes"] = [folder if role in trained else f"{folder}:ro"]
    if "command" in services["coordinator"]:
        services["coordinator"]["volumes"] = [folder]


def file_of_host(out: Path, number: int) -> Path:
    """Where the file of a host is written: mesh.1.yaml for mesh.yaml."""
    return out.with_suffix(f".{number}{out.suffix}")


def hosts_header(recipe: Recipe, hosts: ComposeHosts, number: int, out: Path, made_by: str) -> str:
    """Comment at the top of a host's file, with the commands that start the mesh."""
    own = ", ".join(hosts.services_on(number)) or "no role"
    compose = "docker compose -f docker-compose.yml -f"
    lines = [
        f"One recipe on {len(hosts.addresses)} hosts: the part of host {number},",
        f"{hosts.addresses[number]} ({own}), to add to docker-compose.yml there.",
        "Containers have the network of their host: keep it private, and its ports 29400 to 29415",
        "and all above 32767 open between the hosts.",
    ]
    if shares_runs(recipe, hosts):
        lines += [
            "",
            "On each, a folder of a disk that all share, in which user 10001 may write:",
            "",
            "  export ROLEMESH_RUNS=/shared/runs",
        ]
    lines += [
        "",
        "First, on host 0, which signs for all:",
        "",
        f"  {compose} {file_of_host(out, 0)} run --rm certs",
    ]
    for other in range(1, len(hosts.addresses)):
        roles = dict.fromkeys(map(role_of, hosts.services_on(other)))
        files = " ".join(f"{role}.pem" for role in roles)
        lines += [
            f"  {compose} {file_of_host(out, 0)} run --rm --no-TTY --entrypoint tar certs \\",
            f"      -C /authority -c {files} > identities.{other}.tar",
        ]
    lines += [
        "",
        "Each other host gets its own of these files, which hold keys, and unpacks it:",
        "",
        "  (umask 077; mkdir identities; tar -C identities -xf identities.1.tar)",
        f"  ROLEMESH_IDENTITIES=./identities {compose} {file_of_host(out, 1)} up -d",
        "",
        "Then, on host 0:",
        "",
        f"  {compose} {file_of_host(out, 0)} up -d",
        "",
        f"Made by: rolemesh render compose {made_by}",
    ]
    return "\n".join(lines)


def gpus_on_host(
    recipe: Recipe, hosts: ComposeHosts, service: str, devices: Sequence[str] | None
) -> list[str]:
    """GPUs of a service on each of its hosts, as Docker names them; empty on the CPU."""
    indexes = gpus_of(recipe, service, len(hosts.nodes[service]))
    if devices is not None and max(indexes, default=0) >= len(devices):
        raise RecipeError(
            f"{service} wants GPU {max(indexes)} of a host, counted from 0, but --devices names "
            f"{len(devices)}: name more"
        )
    return [str(one) if devices is None else devices[one] for one in indexes]
