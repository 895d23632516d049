"""Contract of a role: what it adds to the runtime."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import grpc
import torch

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import RoleSpec
from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.runtime.ranks.device import rank_device

T = TypeVar("T")


class ProgressCallback(Protocol):
    """Says how far long work is. May be called from any thread, as often as one likes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` in plain words, units done and units in all (0: not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializeResult:
    """What a role loaded."""

    policy_version: int = 0
    """Version of the weights now held, 0 for untrained ones."""
    num_parameters: int = 0
    """Parameters of the model, 0 when there is none."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts worth logging, e.g. {"data.train_rows": "4096"}."""


class Role(ABC):
    """One role of the mesh; one instance a process.

    Invariant: initialize, sleep, wake, start_over and close run on the compute thread, one at a
    time.
    register and policy_version run on the loop. After close, initialize may be called again.
    """

    name: ClassVar[str]
    """Name in the mesh, e.g. "actor"."""
    spec_class: ClassVar[type[RoleSpec]]
    """Schema of Initialize's spec."""
    sandbox = Sandbox(kind="none", lacks="no service has found one")
    """Where code of users runs; set by the service before it is bound."""

    is_shared = False
    """Whether its process serves other runs as well, by other roles of this kind; set likewise."""

    @abstractmethod
    def initialize(
        self, spec: Any, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Loads models and data.

        Args:
            spec: An instance of spec_class.
            run_seed: Seed of the run.
            progress: Is told how far it is.
            mesh: The service's ranks, this one among them; every rank loads its own part.
        """

    @abstractmethod
    # The runtime is a Runtime, which holds its role: naming the class here would close a circle.
    def register(self, server: grpc.aio.Server, runtime: Any) -> list[str]:
        """Adds the role's servicers to the server; returns their full service names."""

    @abstractmethod
    def policy_version(self) -> int:
        """Version of the weights held; 0 before initialize. Must not block."""

    @abstractmethod
    def sleep(self) -> int:
        """Moves weights to host memory; returns the device bytes freed (0 on a CPU)."""

    @abstractmethod
    def wake(self) -> int:
        """Brings weights back; returns the device bytes taken (0 on a CPU)."""

    def start_over(self) -> None:  # noqa: B027 - most roles keep nothing
        """Drops what calls have made in it, but for the weights: an older lineage made it.

        Gradients and published weights go. A sampler must be brought weights anew, whatever
        version it holds. On the compute thread, also while asleep.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what initialize made. May be called before it, or twice."""

    def initialized(self, part: T | None) -> T:
        """The part, or NOT_INITIALIZED when Initialize has not made it yet."""
        if part is None:
            raise PreconditionError(
                f"the {self.name} holds no run yet: call Initialize first",
                reason="NOT_INITIALIZED",
            )
        return part

    def devices(self) -> list[str]:
        """Devices in use, for people."""
        device = rank_device()
        if device.type == "cpu":
            return ["cpu"]
        return [f"{device} {torch.cuda.get_device_name(device)}"]


def add_servicers(server: grpc.aio.Server, *servicers: object) -> list[str]:
    """Adds servicers to a server; returns the full names of their services.

    Each is added by the function that was generated for its base class, or by its own method
    `add_to` where methods of it write bytes of their own.
    """
    names = []
    for servicer in servicers:
        base = next(one for one in type(servicer).__mro__ if one.__module__.endswith("_pb2_grpc"))
        generated = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server")
        getattr(servicer, "add_to", functools.partial(generated, servicer))(server)
        names.append(f"rolemesh.v1.{base.__name__.removesuffix('Servicer')}")
    return names
