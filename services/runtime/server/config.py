"""Settings of one service process: address, layout, limits, and what callers may name to it.

Precedence: defaults < ROLEMESH_SERVICE__<FIELD> < command line flags. Initialize, and not these
settings, says what a role computes.
"""

from __future__ import annotations

import argparse
import difflib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rolemesh.engine.granted.grants import Grant
from rolemesh.engine.sandbox.host import SandboxMode
from rolemesh.engine.specs import LayoutSpec
from rolemesh.engine.specs.urls import is_loopback, without_passwords
from rolemesh.rpc.address import host_and_port, host_of
from rolemesh.rpc.channel import check_address

ENVIRONMENT_PREFIX = "ROLEMESH_SERVICE__"
"""ROLEMESH_SERVICE__PORT sets port, and so on. Commas part the entries of what is several."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class ConfigError(ValueError):
    """A setting of the process is unknown or wrong."""


class ServiceConfig(BaseModel):
    """Frozen settings of a service process."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )

    role: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Role that the process serves; set by the program, not by the user."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs identity, or allow_remote."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    allow_remote: bool = False
    """Permit a host that others can reach without identity: every program that reaches it can then
    use the service and read what it sends. Only inside a private network."""
    identity: Path | None = None
    """PEM file with key and certificate of this role and the authority of the mesh, as `rolemesh
    certs issue` writes it. The service then serves members of the mesh only, and encrypts."""
    advertise: str | None = None
    """host:port under which peers reach this process; None: host (or the host's name) and port."""
    layout: LayoutSpec = LayoutSpec()
    """How the role's model is spread, e.g. tp=2,dp=2: one rank is started for each of its parts. A
    run's recipe must ask for the same layout."""
    runs: int = Field(default=1, ge=1, le=64)
    """Most runs that share the service at once, each with an adapter of its own on one base that is
    held once; they compute in turns. Another run is refused while so many hold it."""
    hosts: int = Field(default=1, ge=1)
    """Hosts over which the ranks are spread, in equal blocks; on each of them one such command runs
    with the same settings but for its own host_rank, host and interface."""
    host_rank: int = Field(default=0, ge=0)
    """Number of this host among them, from 0. Rank 0, which the coordinator calls, is on host 0."""
    meet: str | None = None
    """host:port of the first host, where the hosts of the service meet: its address there, and a
    free port of it. Needed with several hosts, and the same on all of them."""
    meet_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the other hosts, in seconds; then those that have not come are named."""
    interface: str | None = None
    """Network interface by which the other hosts reach this one, e.g. eth0. With several hosts give
    it, or its address as host; process groups (gloo, NCCL) are kept to it."""
    rank: int = Field(default=0, ge=0)
    """Rank of this process within its service; set by the agent that starts the ranks."""
    rank_store: Path | None = None
    """File through which the ranks of a service meet; set by the agent that starts them."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics for Prometheus; 0 takes a free one, None serves none."""
    log_directory: Path | None = None
    """Folder for <role>.log and, with several ranks, <role>-<rank>.log; None logs to standard error
    only."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""
    log_format: LogFormat = "text"
    """Plain lines, or one JSON object a line."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch's operations; None leaves torch's default."""
    experience_capacity_bytes: int = Field(default=4 << 30, ge=0)
    """Most bytes of experience held at once."""
    put_share: float = Field(default=0.75, ge=0, le=1)
    """Part of them that clients' puts may take, so that what the role makes finds room."""
    shared_memory: bool = True
    """Keep large experience in /dev/shm, so that peers on this host read it in place."""
    shared_memory_threshold_bytes: int = Field(default=64 << 10, ge=1)
    """Experience smaller than this stays in process memory and travels as a stream."""
    register_at: str | None = None
    """host:port of a coordinator's member_port, where the service registers itself, so that recipes
    need not name its address; needs identity. None: recipes name it."""
    number: int = Field(default=0, ge=0)
    """Number of the service among those of its role that register themselves, from 0."""
    announce: Path | None = None
    """File that is written, whole or not at all, once the service is ready."""
    parent_pid: int | None = Field(default=None, ge=1)
    """End when this process is gone."""
    drain_timeout_s: float = Field(default=10.0, ge=0)
    """How long work in progress may take to finish after SIGTERM."""
    code_roots: tuple[Path, ...] = ()
    """Folder of Python files whose functions and classes a run may name, as reward, environment,
    loss, estimator or curriculum. May be repeated; without it a run can name none."""
    code_names: tuple[str, ...] = ()
    """A function or class that a run may name, wherever it is, e.g. mypackage.rewards:judge. May be
    repeated."""
    folders: tuple[Path, ...] = ()
    """Folder (or file) of models, data and checkpoints that a run may name: all in it may be read,
    and new folders written. May be repeated; without it a run can name none."""
    variables: tuple[str, ...] = ()
    """Environment variable that a run may name as token or hand to a reward function. May be
    repeated."""
    function_network: bool = False
    """Permit functions of a run to open connections, where their spec asks for that."""
    sandbox: SandboxMode = "auto"
    """Where functions of a run are called: in the best sandbox that this host has, maybe none
    (auto); in a complete one, or the service does not start (require); without one (off)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank is {self.rank}, but the layout has {self.world_size} ranks: leave rank to "
                "the agent, which counts from 0"
            )
        self._check_hosts()
        self._check_registering()
        if not self.is_loopback and not self.allow_remote and self.identity is None:
            raise ValueError(
                f"host is {self.host!r}, which others can reach, and without identity traffic is "
                "neither encrypted nor authenticated: give identity (--identity, see `rolemesh "
                "certs`), or listen on 127.0.0.1, or give allow_remote (--allow-remote) if the "
                "network is private"
            )
        if self.port == 0 and self.advertise is not None and self.rank == 0:
            raise ValueError(
                f"advertise is {self.advertise!r} with port 0: give the port that peers will reach"
            )
        return self

    def _check_registering(self) -> None:
        if self.register_at is None:
            if self.number:
                raise ValueError(
                    f"number is {self.number}, but the service does not register itself: give "
                    "register_at (--register-at), or leave number out"
                )
            return
        try:
            check_address(self.register_at)
        except ValueError as error:
            raise ValueError(f"register_at: {error}") from error
        if self.identity is None:
            raise ValueError(
                f"register_at is {self.register_at!r}, but the service has no identity, by which "
                "the coordinator knows its role: give identity (--identity, see `rolemesh certs`)"
            )
        is_near = is_loopback(self.register_at.rpartition(":")[0])
        if self.is_loopback and self.advertise is None and not is_near:
            raise ValueError(
                f"host is {self.host!r}, which the coordinator at {self.register_at} cannot reach: "
                "give host (--host) an address of this machine that it can, or advertise"
            )

    def _check_hosts(self) -> None:
        if self.hosts == 1:
            for name in ("host_rank", "meet", "interface"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} is {value!r}, but hosts is 1: give the number of hosts (--hosts), "
                        f"or leave {name} out"
                    )
            return
        if self.host_rank >= self.hosts:
            raise ValueError(
                f"host_rank is {self.host_rank}, but hosts is {self.hosts}: give 0 to "
                f"{self.hosts - 1}"
            )
        host, _, port = (self.meet or "").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"meet is {self.meet!r}, but hosts is {self.hosts}: give host:port of the first "
                "host, the same on all, e.g. --meet 10.0.0.2:29400"
            )
        if self.host in ("0.0.0.0", "::", "[::]"):
            raise ValueError(
                f"host is {self.host!r}, but hosts is {self.hosts}, and other hosts are told one "
                "address: give it as --host, or its interface as --interface"
            )
        layout = self.layout.layout()
        if layout.world_size % self.hosts:
            raise ValueError(
                f"hosts is {self.hosts}, but the layout has {layout.world_size} ranks: give a "
                "number of hosts that divides them"
            )
        if self.ranks_per_host % layout.tp:
            raise ValueError(
                f"hosts is {self.hosts}, so that a host has {self.ranks_per_host} ranks, which tp "
                f"{layout.tp} does not divide: tensor slices stay within a host; choose a smaller "
                "tp, or fewer hosts"
            )

    @property
    def ranks_per_host(self) -> int:
        """Ranks of the service on each host."""
        return self.world_size // self.hosts

    @property
    def grant(self) -> Grant:
        """What callers may name. Any address: rewards from outside lie in all kinds of networks."""
        return Grant(
            code_names=self.code_names,
            code_roots=self.code_roots,
            folders=self.folders,
            variables=self.variables,
            hosts=None,
            network=self.function_network,
        )

    @property
    def world_size(self) -> int:
        """Ranks of the service."""
        return self.layout.layout().world_size

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the service."""
        return is_loopback(self.host)

    def peer_address(self, bound_port: int) -> str:
        """host:port under which peers reach this process, once the port is known."""
        # Of several hosts each has an address of its own.
        if self.advertise is not None and (self.rank == 0 or self.hosts == 1):
            # Other ranks have a port of their own.
            own = host_and_port(host_of(self.advertise), bound_port)
            return self.advertise if self.rank == 0 else own
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "[::]") else self.host
        return host_and_port(host, bound_port)


def parse_layout(text: str) -> dict[str, str]:
    """Sizes of a layout from a flag or a variable, e.g. "tp=2,dp=2".

    Raises:
        ConfigError: A part is not name=number, or a name stands twice.
    """
    sizes: dict[str, str] = {}
    for part in text.split(","):
        name, separator, value = (word.strip() for word in part.partition("="))
        if not separator or name in sizes:
            raise ConfigError(
                f"layout is {text!r}: give each size once as name=number, e.g. pp=1,tp=2,dp=2"
            )
        if name not in LayoutSpec.model_fields:
            raise ConfigError(
                f"layout is {text!r}, but a layout has no {name!r}: it has "
                f"{', '.join(LayoutSpec.model_fields)}"
            )
        sizes[name] = value
    return sizes


_CHOICES = {
    "log_level": get_args(LogLevel),
    "log_format": get_args(LogFormat),
    "sandbox": get_args(SandboxMode),
}
_SETTABLE = [name for name in ServiceConfig.model_fields if name != "role"]
_SEVERAL = [name for name in _SETTABLE if ServiceConfig.model_fields[name].default == ()]
"""Settings with several entries: the flag of one ends without an s, and is repeated."""


def load_config(
    role: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> ServiceConfig:
    """Resolves the settings of a process.

    Args:
        role: Name of the role, which is fixed by the program.
        arguments: Command line without the program's name.
        environment: Environment variables.

    Raises:
        ConfigError: A setting is unknown or wrong; the message names it, its value and a remedy.
    """
    values: dict[str, Any] = {**_from_environment(environment), **_from_flags(role, arguments)}
    if isinstance(values.get("layout"), str):
        values["layout"] = parse_layout(values["layout"])
    return checked_config({"role": role, **values})


def checked_config(values: Mapping[str, Any]) -> ServiceConfig:
    """Settings of these values.

    Raises:
        ConfigError: A value is wrong; the message names it and a remedy.
    """
    try:
        return ServiceConfig(**values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"])
            given = without_passwords(problem["input"])
            problems.append(f"{field} is {given!r}: {problem['msg']}" if field else problem["msg"])
        raise ConfigError("; ".join(problems)) from error


def sandbox_mode(environment: Mapping[str, str]) -> SandboxMode:
    """The sandbox of services that are started with this environment and no flag.

    Raises:
        ConfigError: There is no such mode.
    """
    name = f"{ENVIRONMENT_PREFIX}SANDBOX"
    value = environment.get(name, ServiceConfig.model_fields["sandbox"].default)
    for mode in get_args(SandboxMode):
        if value == mode:
            return cast("SandboxMode", mode)
    raise ConfigError(f"{name} is {value!r}: give {', '.join(get_args(SandboxMode))}")


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in _SETTABLE:
            nearest = difflib.get_close_matches(name, _SETTABLE, n=1)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{nearest[0].upper()}?" if nearest else ""
            raise ConfigError(f"{variable} sets nothing: there is no such setting{hint}")
        several = [entry.strip() for entry in value.split(",") if entry.strip()]
        values[name] = several if name in _SEVERAL else value
    return values


def _from_flags(role: str, arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog=f"python -m rolemesh.services.{role}",
        description=f"Serves the {role} role of a mesh.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name in _SETTABLE:
        field = ServiceConfig.model_fields[name]
        flag = "--" + name.replace("_", "-")
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        elif name in _SEVERAL:
            flag = flag.removesuffix("s")
            parser.add_argument(flag, dest=name, action="append", metavar="VALUE", help=text)
        elif name in _CHOICES:
            parser.add_argument(flag, dest=name, choices=_CHOICES[name], help=text)
        else:
            parser.add_argument(flag, dest=name, metavar="VALUE", help=text)
    return vars(parser.parse_args(list(arguments)))
