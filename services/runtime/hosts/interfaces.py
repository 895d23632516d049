"""Network interfaces of this host: which one a service on several hosts uses, and its address."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping, Sequence

import psutil

from rolemesh.engine.specs.urls import is_loopback
from rolemesh.services.runtime.server.config import ConfigError, ServiceConfig, checked_config

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
"""Variables by which a user keeps a library to another interface than that of the service."""


def interface_addresses() -> dict[str, list[str]]:
    """Addresses by interface, IPv4 first; without those that are good on one link alone."""
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            found.setdefault(name, []).extend(
                one.address
                for one in addresses
                if one.family == family and not one.address.startswith("fe80:")
            )
    return {name: addresses for name, addresses in found.items() if addresses}


def of_this_host(config: ServiceConfig) -> ServiceConfig:
    """Settings with the address and the interface by which the other hosts reach this one.

    Both follow from either of them. A service on one host stays as it is.

    Raises:
        ConfigError: Neither is set, they do not fit together, or this host lacks them.
    """
    if config.hosts == 1:
        return config
    found = interface_addresses()
    is_host_set = "host" in config.model_fields_set
    if config.interface is not None:
        own = found.get(config.interface)
        if own is None:
            raise ConfigError(
                f"interface is {config.interface!r}, but this host has none of that name with an "
                f"address: give one of {_shown(found)}"
            )
        interface = config.interface
        address = _address(config.host) if is_host_set else _only(own, interface)
        if address not in own and not (is_loopback(address) and any(map(is_loopback, own))):
            raise ConfigError(
                f"host is {config.host!r} ({address}), but interface {interface!r} has "
                f"{', '.join(own)}: give one of these addresses, or the interface alone"
            )
    elif is_host_set:
        address = _address(config.host)
        interface = _interface_of(address, config.host, found)
    else:
        raise ConfigError(
            f"hosts is {config.hosts}, but it is not said by which network they reach each other: "
            f"give --interface, one of {_shown(found)}, or --host with one of these addresses"
        )
    return checked_config({**config.model_dump(), "host": address, "interface": interface})


def keep_to_interface(config: ServiceConfig, environment: MutableMapping[str, str]) -> None:
    """Keeps the process groups of a service on several hosts to its interface.

    Args:
        config: Of `of_this_host`.
        environment: Of this process and of the ranks that it starts. A variable that names another
            interface is obeyed.

    Raises:
        ConfigError: A variable names an interface that this host does not have.
    """
    if config.hosts == 1 or config.interface is None:
        return
    for name in (GLOO, NCCL):
        environment.setdefault(name, config.interface)
    found = interface_addresses()
    # NCCL's variable is a pattern. What gloo cannot find, it says without the names of those there.
    for interface in environment[GLOO].split(","):
        if interface not in found:
            raise ConfigError(
                f"{GLOO} is {environment[GLOO]!r}, but this host has no interface {interface!r}: "
                f"give one of {_shown(found)}, or unset it"
            )


def _address(host: str) -> str:
    """The address of a host name, or the address itself."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host is {host!r}, which leads nowhere ({error}): give an address of this host"
        ) from error
    return str(found[0][4][0])


def _only(addresses: Sequence[str], interface: str) -> str:
    first = [one for one in addresses if (":" in one) == (":" in addresses[0])]
    if len(first) > 1:
        raise ConfigError(
            f"interface {interface!r} has several addresses: say with --host which one of "
            f"{', '.join(first)} the other hosts reach"
        )
    return first[0]


def _interface_of(address: str, host: str, found: Mapping[str, Sequence[str]]) -> str:
    for name, own in found.items():
        # All of 127.0.0.0/8 is the loopback interface's, which lists 127.0.0.1 alone.
        if address in own or (is_loopback(address) and any(map(is_loopback, own))):
            return name
    raise ConfigError(
        f"host is {host!r}, which is no address of an interface of this host: with several hosts, "
        f"give the one that others reach, of {_shown(found)}"
    )


def _shown(found: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in found.items()) or "none"
