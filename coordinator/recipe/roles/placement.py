"""Where roles run: device sets that they share, and their services."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from rolemesh.engine.specs import Names, Spec
from rolemesh.engine.specs.variables import VariableName


class PoolSpec(Spec):
    """A named set of devices. Its roles take turns; pools run side by side."""

    devices: tuple[str, ...] = ("cpu",)
    """Devices, e.g. ["cpu"] or ["cuda:0", "cuda:1"]. Left out: GPUs of the host that makes the run,
    if it has any."""
    roles: tuple[str, ...] = Field(min_length=1)
    """Roles that share the devices."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether a role leaves the devices while another one of the pool computes: "auto" when
    several roles share GPUs."""

    @property
    def has_gpus(self) -> bool:
        """Whether the devices are GPUs. Several kinds are refused where a service is started."""
        return any(device.startswith("cuda") for device in self.devices)

    @property
    def lets_roles_sleep(self) -> bool:
        """What `sleep` comes to."""
        if self.sleep == "auto":
            return len(self.roles) > 1 and self.has_gpus
        return self.sleep == "always"


REGISTERED = ""
"""In the place of the address of a service that registers itself."""

SCHEME = "grpc://"

T = TypeVar("T")


def plain_address(address: T) -> str | T:
    """The host:port of "grpc://host:port"; anything else, of whatever type, as it is."""
    if isinstance(address, str) and address.startswith(SCHEME):
        return address.removeprefix(SCHEME).removesuffix("/")
    return address


Address = Annotated[
    str, BeforeValidator(plain_address), Field(pattern=r"^(\[[^\]\s]+\]|[^:\s]+):\d{1,5}$")
]
"""host:port, or grpc://host:port, which means the same."""


class ServiceSpec(Spec):
    """Where a role's service is, or its services."""

    address: Annotated[Address | None, Names("url")] = None
    """host:port or grpc://host:port of a service that runs already; None: the coordinator starts
    one on loopback."""
    addresses: Annotated[tuple[Address, ...], Names("url")] = ()
    """The same for several replicas of a role that is not trained."""
    registers: bool = False
    """The services run already, or will, and register themselves (`rolemesh serve ROLE
    --register-at`): the run waits for them, and finds them in the store."""
    replicas: int = Field(default=1, ge=1)
    """Services that the coordinator starts for the role, or that register; more than 1 for roles
    that are not trained. Rollout services share a step's prompts, the others the blocks of its
    rows (schedule.sampler)."""
    most_replicas: int | None = Field(default=None, ge=2)
    """Services may join the run and leave it, between this number and `replicas`, which is the
    least then: for services that register; those of rollout with the sampler sync. None: always
    the same."""
    threads: int | None = Field(default=None, ge=1)
    """Most compute threads of each rank that the coordinator starts; None: every core. Passes of a
    small model take one."""
    experience_capacity_mib: int = Field(default=1024, ge=1)
    """Bound on the experience that each rank of a started service holds, in MiB."""
    variables: Annotated[tuple[VariableName, ...], Names("variable")] = ()
    """Environment variables of the coordinator that a started service gets besides the usual ones
    (paths, languages, devices, threads, libraries), e.g. for the tools of an environment. Those
    that sources of rewards name need not be here."""

    @model_validator(mode="after")
    def _check_one_way(self) -> Self:
        given = [
            name
            for name, is_given in (
                ("address", self.address is not None),
                ("addresses", bool(self.addresses)),
                ("replicas", self.replicas > 1),
            )
            if is_given
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: give one of them")
        if self.most_replicas is not None:
            if not self.registers:
                raise ValueError(
                    f"most_replicas is {self.most_replicas}, but registers is false: services that "
                    "join a run register themselves; set registers to true, or leave it out"
                )
            if self.most_replicas <= self.replicas:
                raise ValueError(
                    f"most_replicas is {self.most_replicas} and replicas, the least, is "
                    f"{self.replicas}: give more, or leave most_replicas out"
                )
        if self.registers and (self.address or self.addresses):
            raise ValueError(
                f"registers is true, and {given[0]} is given: a service that registers says its "
                f"address itself; leave {given[0]} out"
            )
        return self
