"""Deadline and idempotency of every method, read from the descriptors.

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
from google.protobuf.duration_pb2 import Duration

import rolemesh.v1
from rolemesh.v1 import operation_pb2


class Idempotency(enum.Enum):
    """Whether and how a call may be repeated."""

    IDEMPOTENT = operation_pb2.IDEMPOTENCY_IDEMPOTENT
    """The call reads, or sets a value: it may be repeated at any time."""
    KEYED = operation_pb2.IDEMPOTENCY_KEYED
    """A repeat with the same OperationKey returns the first answer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a method may be called."""

    deadline_s: float
    """Default deadline of one call."""
    idempotency: Idempotency
    """Whether and how a repeat is safe."""
    idle_s: float | None = None
    """After how long without progress a call is given up; None where it tells of none."""


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
            "with a deadline and an idempotency"
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
        deadline_s = _seconds(declared.deadline)
        idle_s = _seconds(declared.idle) if declared.HasField("idle") else None
        unspecified = declared.idempotency == operation_pb2.IDEMPOTENCY_UNSPECIFIED
        if deadline_s > 0 and not unspecified:
            policies[full_method] = Policy(deadline_s, Idempotency(declared.idempotency), idle_s)
    return MappingProxyType(policies)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


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
