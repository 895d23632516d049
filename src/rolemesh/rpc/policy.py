"""Deadline, idempotency and callers of every method, read from the descriptors.

The protos are the only table: `option (rolemesh.v1.policy)` on each RPC.
"""

from __future__ import annotations

import enum
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.descriptor import MethodDescriptor

import rolemesh.v1
from rolemesh.rpc.members.identity import Scope
from rolemesh.v1 import operation_pb2


class Idempotency(enum.Enum):
    """Whether and how a call may be repeated."""

    IDEMPOTENT = operation_pb2.IDEMPOTENCY_IDEMPOTENT
    """The call reads, or sets a value: it may be repeated at any time."""
    KEYED = operation_pb2.IDEMPOTENCY_KEYED
    """A repeat with the same OperationKey returns the first answer."""


class Caller(enum.Enum):
    """Kind of a member of the mesh that may call a method."""

    COORDINATOR = operation_pb2.CALLER_COORDINATOR
    ROLE = operation_pb2.CALLER_ROLE
    RANK = operation_pb2.CALLER_RANK
    CLIENT_READ = operation_pb2.CALLER_CLIENT_READ
    CLIENT_DRIVE = operation_pb2.CALLER_CLIENT_DRIVE
    CLIENT_ADMIN = operation_pb2.CALLER_CLIENT_ADMIN


_CLIENTS = {
    Scope.READ.value: {Caller.CLIENT_READ},
    Scope.DRIVE.value: {Caller.CLIENT_READ, Caller.CLIENT_DRIVE},
    Scope.ADMIN.value: {Caller.CLIENT_READ, Caller.CLIENT_DRIVE, Caller.CLIENT_ADMIN},
}
"""By the name of the client's scope."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a method may be called."""

    deadline_s: float
    """Default deadline of one call."""
    idempotency: Idempotency
    """Whether and how a repeat is safe."""
    idle_s: float | None = None
    """After how long without progress a call is given up; None where it tells of none."""
    callers: frozenset[Caller] = frozenset()
    """Members that may call it."""

    def allows(self, member: str, role: str) -> bool:
        """Whether a member may call the method at a service of a role.

        Args:
            member: Its name, e.g. "critic" or "client/read" (`identity.member_of`).
            role: Role of the service.
        """
        name, _, scope = member.partition("/")
        if name == "client":
            return scope in _CLIENTS and bool(_CLIENTS[scope] & self.callers)
        if member == "coordinator":
            return Caller.COORDINATOR in self.callers
        return (Caller.RANK if member == role else Caller.ROLE) in self.callers


def method_policy(full_method: str) -> Policy:
    """The policy of a rolemesh method.

    Args:
        full_method: As gRPC spells it, e.g. "/rolemesh.v1.WorkerService/GetStatus".

    Raises:
        ValueError: No such method, or its proto lacks a policy.
    """
    policy = method_policies().get(full_method)
    if policy is None:
        raise ValueError(
            f"method {full_method!r} has no policy: give its rpc an option (rolemesh.v1.policy) "
            "with a deadline, an idempotency and callers"
        )
    return policy


@functools.cache
def method_policies() -> Mapping[str, Policy]:
    """The policy of every rolemesh.v1 method that has one, by full method name."""
    policies: dict[str, Policy] = {}
    for full_method, descriptor in rolemesh_methods().items():
        options = descriptor.GetOptions()
        if not options.HasExtension(operation_pb2.policy):
            continue
        declared = options.Extensions[operation_pb2.policy]
        deadline_s = declared.deadline.ToTimedelta().total_seconds()
        idle_s = declared.idle.ToTimedelta().total_seconds() if declared.HasField("idle") else None
        unspecified = declared.idempotency == operation_pb2.IDEMPOTENCY_UNSPECIFIED
        # 0 stands for no caller.
        callers = frozenset(Caller(caller) for caller in declared.callers if caller)
        if deadline_s > 0 and callers and not unspecified:
            policies[full_method] = Policy(
                deadline_s, Idempotency(declared.idempotency), idle_s, callers
            )
    return MappingProxyType(policies)


@functools.cache
def rolemesh_methods() -> Mapping[str, MethodDescriptor]:
    """Every method of every rolemesh.v1 service, by full method name."""
    methods: dict[str, MethodDescriptor] = {}
    for module_info in pkgutil.iter_modules(rolemesh.v1.__path__):
        if not module_info.name.endswith("_pb2"):
            continue
        module = importlib.import_module(f"rolemesh.v1.{module_info.name}")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                methods[f"/{service.full_name}/{method.name}"] = method
    return MappingProxyType(methods)
