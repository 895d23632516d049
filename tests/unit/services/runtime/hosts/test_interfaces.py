"""Which interface and address a host takes part with, and what is said where it has none."""

from __future__ import annotations

import pytest

from rolemesh.services.runtime.hosts import interfaces
from rolemesh.services.runtime.hosts.interfaces import keep_to_interface, of_this_host
from rolemesh.services.runtime.server.config import ConfigError, ServiceConfig, load_config

FOUND = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "ib0": ["192.168.7.5"],
    "two": ["10.1.0.5", "10.2.0.5"],
    "six": ["fd00::7"],
}


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: FOUND)


def resolved(*flags: str) -> ServiceConfig:
    hosts = ("--layout", "tp=2,dp=2", "--hosts", "2", "--meet", "10.0.0.2:29400", "--allow-remote")
    return of_this_host(load_config("actor", [*hosts, *flags], {}))


@pytest.mark.parametrize(
    ("flags", "host", "interface"),
    [
        (["--interface", "eth0"], "10.0.0.5", "eth0"),
        (["--host", "192.168.7.5"], "192.168.7.5", "ib0"),
        (["--host", "10.2.0.5", "--interface", "two"], "10.2.0.5", "two"),
        (["--interface", "six"], "fd00::7", "six"),
        (["--host", "127.0.0.3"], "127.0.0.3", "lo"),
        (["--host", "127.0.0.3", "--interface", "lo"], "127.0.0.3", "lo"),
        (["--interface", "lo"], "127.0.0.1", "lo"),
    ],
)
def test_interface_and_address_follow_from_each_other(
    flags: list[str], host: str, interface: str
) -> None:
    config = resolved(*flags)
    assert (config.host, config.interface) == (host, interface)
    assert config.peer_address(7) in (f"{host}:7", f"[{host}]:7")
    assert (":" in host) == config.peer_address(7).startswith("[")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], r"give --interface, one of lo \(127.0.0.1, ::1\), eth0 \(10.0.0.5"),
        (["--interface", "eth9"], "interface is 'eth9', but this host has none of that name"),
        (["--interface", "two"], "'two' has several addresses: .* 10.1.0.5, 10.2.0.5"),
        (["--host", "10.9.9.9"], "host is '10.9.9.9', which is no address of an interface"),
        (["--host", "10.0.0.5", "--interface", "ib0"], "but interface 'ib0' has 192.168.7.5"),
        (["--host", "no.such.host.invalid"], "which leads nowhere"),
    ],
)
def test_what_this_host_lacks_is_named_with_what_it_has(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolved(*flags)


def test_an_interface_that_others_reach_needs_consent() -> None:
    flags = ["--layout", "dp=2", "--hosts", "2", "--meet", "a:1", "--interface", "eth0"]
    config = load_config("actor", flags, {})
    with pytest.raises(ConfigError, match=r"host is '10\.0\.0\.5', which others can reach"):
        of_this_host(config)


def test_a_service_on_one_host_stays_as_it_is() -> None:
    config = load_config("actor", ["--layout", "dp=2"], {})
    environment: dict[str, str] = {}
    assert of_this_host(config) is config
    keep_to_interface(config, environment)
    assert environment == {}


def test_process_groups_are_kept_to_the_interface_unless_another_one_is_named() -> None:
    config = resolved("--interface", "eth0")
    environment = {"NCCL_SOCKET_IFNAME": "=ib0"}
    keep_to_interface(config, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=ib0"}
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME is 'eth0,eth9', but this host"):
        keep_to_interface(config, {"GLOO_SOCKET_IFNAME": "eth0,eth9"})
