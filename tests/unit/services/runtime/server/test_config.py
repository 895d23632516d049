"""Settings of a service process: precedence, refusals, remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.engine.granted.grants import Grant
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.services.runtime.ranks.agent import as_rank
from rolemesh.services.runtime.server.config import (
    ConfigError,
    ServiceConfig,
    load_config,
    sandbox_mode,
)


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {"ROLEMESH_SERVICE__PORT": "5000", "ROLEMESH_SERVICE__THREADS": "3", "PATH": "x"}
    config = load_config("actor", ["--port", "6000"], environment)
    assert (config.port, config.threads, config.host) == (6000, 3, "127.0.0.1")
    assert config.role == "actor"


def test_what_callers_may_name_is_given_once_for_each() -> None:
    """By flags that are repeated, or in one variable; neither: nothing."""
    flags = ["--code-root", "a", "--code-root", "b,c", "--code-name", "x.py:f", "--variable", "T"]
    environment = {"ROLEMESH_SERVICE__CODE_ROOTS": "z", "ROLEMESH_SERVICE__FOLDERS": "/m, /r"}
    config = load_config("actor", flags, environment)
    assert config.code_roots == (Path("a"), Path("b,c"))
    assert (config.code_names, config.variables) == (("x.py:f",), ("T",))
    assert config.folders == (Path("/m"), Path("/r"))
    assert config.grant == Grant(
        code_roots=config.code_roots,
        code_names=("x.py:f",),
        folders=config.folders,
        variables=("T",),
        hosts=None,
    )
    assert load_config("actor", [], {"ROLEMESH_SERVICE__FOLDERS": ""}).grant == Grant(hosts=None)
    assert load_config("actor", ["--function-network"], {}).grant == Grant(hosts=None, network=True)


def test_the_owner_says_which_sandbox() -> None:
    environment = {"ROLEMESH_SERVICE__SANDBOX": "require"}
    assert load_config("reward", [], {}).sandbox == sandbox_mode({}) == "auto"
    assert load_config("reward", [], environment).sandbox == sandbox_mode(environment) == "require"
    assert load_config("reward", ["--sandbox", "off"], environment).sandbox == "off"
    with pytest.raises(ConfigError, match="SANDBOX is 'yes': give auto, require, off"):
        sandbox_mode({"ROLEMESH_SERVICE__SANDBOX": "yes"})


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean ROLEMESH_SERVICE__METRICS_PORT"):
        load_config("actor", [], {"ROLEMESH_SERVICE__METRIC_PORT": "1"})


def test_the_role_is_not_a_setting() -> None:
    with pytest.raises(ConfigError, match="ROLEMESH_SERVICE__ROLE"):
        load_config("actor", [], {"ROLEMESH_SERVICE__ROLE": "critic"})


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config("actor", ["--prot", "1"], {})
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.com"])
def test_a_host_that_others_reach_needs_consent(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-remote"):
        load_config("actor", ["--host", host], {})
    assert load_config("actor", ["--host", host, "--allow-remote"], {}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost", "::1"])
def test_loopback_needs_no_consent(host: str) -> None:
    assert load_config("actor", ["--host", host], {}).is_loopback


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "-1"], "port is '-1'"),
        (["--threads", "0"], "threads is '0'"),
        (["--experience-capacity-bytes", "many"], "experience_capacity_bytes is 'many'"),
        (["--rank", "1"], "rank is 1, but the layout has 1 ranks"),
        (["--layout", "tp=0"], "layout.tp is '0'"),
        (["--layout", "tp"], "layout is 'tp': give each size once as name=number"),
        (["--layout", "tp=2,tp=2"], "layout is 'tp=2,tp=2': give each size once"),
        (["--layout", "sp=2"], "a layout has no 'sp': it has pp, tp, dp, fsdp, ep, cp, order"),
        (["--layout", "dp=4,fsdp=3"], "fsdp 3 does not divide dp 4"),
        (["--advertise", "a:1"], "advertise is 'a:1' with port 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_are_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config("actor", flags, {})


def test_peers_reach_the_advertised_address() -> None:
    config = load_config(
        "actor",
        ["--host", "0.0.0.0", "--allow-remote", "--port", "5", "--advertise", "actor:5"],
        {},
    )
    assert config.peer_address(5) == "actor:5"
    assert ServiceConfig(role="actor").peer_address(7) == "127.0.0.1:7"


def test_a_layout_says_how_many_ranks_there_are() -> None:
    config = load_config("actor", ["--layout", "pp=2,tp=2,dp=2,fsdp=1"], {})
    assert config.world_size == 8
    assert config.layout.layout() == TrainLayout(pp=2, tp=2, dp=2, fsdp=1)
    from_variable = load_config("actor", [], {"ROLEMESH_SERVICE__LAYOUT": "tp=2"})
    assert from_variable.world_size == 2


def test_a_layout_is_written_as_it_is_read() -> None:
    layout = TrainLayout(pp=2, tp=4, dp=2, fsdp=1, order="tp-dp-pp")
    config = load_config("actor", ["--layout", layout.flag()], {})
    assert config.layout.layout() == layout


def test_ranks_beside_the_face_are_reached_at_its_host_and_ports_of_their_own() -> None:
    config = load_config(
        "actor",
        [
            *("--layout", "dp=2", "--host", "0.0.0.0", "--allow-remote", "--port", "50051"),
            *("--advertise", "gpu7.example:50051", "--announce", "/tmp/actor.json"),
            *("--metrics-port", "9100"),
        ],
        {},
    )
    face, other = (as_rank(config, {"RANK": str(rank)}) for rank in range(2))
    assert face.peer_address(50051) == "gpu7.example:50051"
    assert (other.port, other.announce, other.metrics_port) == (0, None, 9101)
    assert other.peer_address(41235) == "gpu7.example:41235"


def on_hosts(*flags: str, layout: str = "tp=2,dp=4") -> ServiceConfig:
    return load_config("actor", ["--layout", layout, *flags], {})


def test_ranks_lie_on_hosts_in_equal_blocks() -> None:
    config = on_hosts("--hosts", "2", "--host-rank", "1", "--meet", "a:1")
    assert config.ranks_per_host == 4
    assert as_rank(config, {"RANK": "0"}).rank == 4
    assert (as_rank(config, {"RANK": "3"}).rank, as_rank(config, {"RANK": "3"}).port) == (7, 0)
    flags = ["--hosts", "2", "--meet", "a:1", "--host", "127.0.0.3"]
    told = on_hosts(*flags, "--advertise", "gpu-1:5", "--port", "5")
    assert told.peer_address(5) == "gpu-1:5"
    rank = as_rank(told.model_copy(update={"host_rank": 1}), {"RANK": "0"})
    assert rank.peer_address(7) == "127.0.0.3:7", "the same line on each host"
    environment = {"ROLEMESH_SERVICE__HOSTS": "2", "ROLEMESH_SERVICE__MEET": "a:1"}
    assert load_config("actor", ["--layout", "dp=2"], environment).ranks_per_host == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hosts", "2"], "meet is None, but hosts is 2: give host:port of the first host"),
        (["--hosts", "2", "--meet", "a"], "meet is 'a', but hosts is 2"),
        (["--hosts", "2", "--meet", "http://a:1"], "meet is 'http://a:1'"),
        (["--hosts", "2", "--meet", "a:1", "--host-rank", "2"], "host_rank is 2, but hosts is 2"),
        (["--hosts", "3", "--meet", "a:1"], "hosts is 3, but the layout has 8 ranks"),
        (["--hosts", "8", "--meet", "a:1"], "a host has 1 ranks, which tp 2 does not divide"),
        (["--meet", "a:1"], "meet is 'a:1', but hosts is 1"),
        (["--host-rank", "1"], "host_rank is 1, but hosts is 1"),
        (["--interface", "eth0"], "interface is 'eth0', but hosts is 1"),
        (
            ["--hosts", "2", "--meet", "a:1", "--host", "0.0.0.0", "--allow-remote"],
            "host is '0.0.0.0', but hosts is 2, and other hosts are told one address",
        ),
    ],
)
def test_settings_of_hosts_that_do_not_fit_are_refused(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        on_hosts(*flags)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--number", "1"], "number is 1, but the service does not register itself"),
        (["--register-at", "nowhere"], "register_at: address is 'nowhere': give host:port"),
        (["--register-at", "127.0.0.1:1"], r"no identity.*\(--identity"),
        (
            ["--register-at", "gpu-1:1", "--identity", "a.pem"],
            "host is '127.0.0.1', which the coordinator at gpu-1:1 cannot reach",
        ),
    ],
)
def test_a_registration_that_cannot_be_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("actor", flags, {})


def test_rank_0_alone_registers() -> None:
    flags = ["--layout", "dp=2", "--register-at", "127.0.0.1:1", "--number", "3"]
    config = load_config("actor", [*flags, "--identity", "a.pem"], {})
    first, second = (as_rank(config, {"RANK": rank}) for rank in ("0", "1"))
    assert (first.register_at, first.number) == ("127.0.0.1:1", 3)
    assert (second.register_at, second.number) == (None, 0)
