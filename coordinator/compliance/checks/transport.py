"""Checks that every gRPC server of the mesh must pass, for any role."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.contract import (
    MODEL_ROLES,
    REWARD_ROLES,
    BrokenContractError,
    Level,
    NotApplicableError,
    Phase,
)
from rolemesh.coordinator.compliance.subject import Subject, describe_error, expect
from rolemesh.rpc.errors import RolemeshError, UnsupportedError, from_rpc_error
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.v1 import operation_pb2, worker_pb2

transport_check = partial(check, phase=Phase.BEFORE)

BEYOND_THE_CAP = 5 << 20
"""Size of a message above 4 MiB, the limit of all messages of the mesh."""


_HEALTH = "Standard gRPC health answers SERVING for the server as a whole."


@transport_check("transport.reward-health", Level.SHOULD, _HEALTH, roles=REWARD_ROLES)
@transport_check("transport.health", Level.MUST, _HEALTH, roles=MODEL_ROLES)
async def health(subject: Subject) -> None:
    """The coordinator waits for it before it calls anything else.

    A reward may leave out every other service, but operators probe its health.
    """
    stub = health_pb2_grpc.HealthStub(subject.channel)
    request = health_pb2.HealthCheckRequest()
    answer = await stub.Check(request, timeout=subject.timeout_s)
    serving = health_pb2.HealthCheckResponse.SERVING
    expect(
        answer.status == serving,
        sent="grpc.health.v1.Health/Check of the server as a whole",
        came=health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status),
        remedy='set the status of "" to SERVING once the server takes calls',
    )


@transport_check(
    "transport.reflection",
    Level.SHOULD,
    "Server reflection lists every service that the server claims.",
)
async def reflection(subject: Subject) -> None:
    """Asks for the list of services, as `grpcurl list` does."""
    listed = await _listed_services(subject)
    claimed = (
        ["rolemesh.v1.RewardService"]
        if subject.capabilities is None
        else list(subject.capabilities.services)
    )
    missing = sorted(set(claimed) - listed)
    expect(
        not missing,
        sent="ServerReflectionInfo, list_services",
        came=f"{sorted(listed)}, without {missing}",
        remedy="hand the full names of all services to the reflection of your gRPC library",
    )


async def _listed_services(subject: Subject) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(subject.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), timeout=subject.timeout_s)
    async for answer in call:
        return {service.name for service in answer.list_services_response.service}
    return set()


@transport_check(
    "transport.no-deadline",
    Level.MUST,
    "Every call must carry a deadline; the server refuses one without with INVALID_ARGUMENT "
    "(DEADLINE_MISSING).",
)
async def no_deadline(subject: Subject) -> None:
    """The contract demands a refusal. An answer is harmless, too, but silence is not."""
    # Zero bytes are an empty message of either request type.
    method = (
        "WorkerService/GetCapabilities"
        if subject.capabilities is not None
        else "RewardService/ComputeReward"
    )
    call: Any = subject.bare.unary_stream(f"/rolemesh.v1.{method}", request_serializer=bytes)(b"")
    sent = f"{method} without a deadline"
    try:
        async with asyncio.timeout(subject.timeout_s):
            async for _ in call:
                return
    except TimeoutError as error:
        raise BrokenContractError(
            sent=sent,
            came=f"nothing within {subject.timeout_s:g} s",
            remedy="refuse a call whose context has no deadline with INVALID_ARGUMENT, or answer",
        ) from error
    except grpc.RpcError as error:
        known = from_rpc_error(error)
        expect(
            known.code is grpc.StatusCode.INVALID_ARGUMENT,
            sent=sent,
            came=describe_error(known),
            remedy="refuse it with INVALID_ARGUMENT (DEADLINE_MISSING), or answer it",
        )
    finally:
        call.cancel()


@transport_check(
    "transport.unknown-method",
    Level.MUST,
    "A method that the server does not serve is answered with UNIMPLEMENTED.",
)
async def unknown_method(subject: Subject) -> None:
    """By this status a peer can distinguish another version from a fault."""
    service = "WorkerService" if subject.capabilities is not None else "RewardService"
    method = f"/rolemesh.v1.{service}/NoSuchMethod"
    call = subject.channel.unary_unary(method)(b"", timeout=subject.timeout_s)
    remedy = "leave unknown methods to your gRPC library, which answers UNIMPLEMENTED"
    try:
        await call
    except UnsupportedError:
        return
    except RolemeshError as error:
        came = describe_error(error)
    else:
        came = "an answer"
    raise BrokenContractError(sent=method, came=came, remedy=remedy)


@transport_check(
    "transport.large-message",
    Level.MUST,
    "A message never exceeds the 4 MiB default cap: a larger one is refused or taken, and the "
    "server serves on.",
)
async def large_message(subject: Subject) -> None:
    """A giant message must not take the server down."""
    padding = operation_pb2.OperationKey(run_id="x" * BEYOND_THE_CAP)
    service, method = (
        ("WorkerService", "Sleep")
        if subject.capabilities is not None
        else ("RewardService", "ComputeReward")
    )
    # Field 1 of both requests is the key. Its run_id is far too long here.
    request = worker_pb2.SleepRequest(key=padding)
    call = subject.channel.unary_stream(
        f"/rolemesh.v1.{service}/{method}",
        request_serializer=worker_pb2.SleepRequest.SerializeToString,
    )(request, timeout=subject.timeout_s)
    sent = f"{service}/{method} of {BEYOND_THE_CAP >> 20} MiB"
    try:
        async for _ in call:
            pass
    except RolemeshError as error:
        silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        expect(
            error.code not in silent,
            sent=sent,
            came=describe_error(error),
            remedy="refuse it with RESOURCE_EXHAUSTED and keep the connection",
        )
    # With any answer, the server must still be there.
    await _answers(subject, f"GetCapabilities or ComputeReward after {sent}")


async def _answers(subject: Subject, sent: str) -> None:
    try:
        if subject.capabilities is not None:
            await subject.client.get_capabilities()
        else:
            async for _ in subject.work(subject.key()):
                pass
    except RolemeshError as error:
        raise BrokenContractError(
            sent=sent, came=describe_error(error), remedy="serve on after a message too large"
        ) from error


@transport_check(
    "transport.claimed-services",
    Level.MUST,
    "GetCapabilities.services: full names of the services that this process serves.",
)
async def claimed_services(subject: Subject) -> None:
    """Every claimed service answers something else than UNIMPLEMENTED to one method at least."""
    if subject.capabilities is None:
        raise NotApplicableError("the server has no WorkerService, so it claims nothing")
    lies = [name for name in subject.capabilities.services if not await _is_served(subject, name)]
    expect(
        not lies,
        sent="each method of each service in GetCapabilities.services",
        came=f"UNIMPLEMENTED to every method of {lies}",
        remedy="claim the services that are registered with the server, and no others",
    )


async def _is_served(subject: Subject, service: str) -> bool:
    methods = [name for name in rolemesh_methods() if name.split("/")[1] == service]
    for method in methods:
        # These bytes are no message of any method. A server that has the method cannot read
        # them, and does nothing.
        call = subject.channel.unary_stream(method)(_UNREADABLE, timeout=subject.timeout_s)
        try:
            async for _ in call:
                return True
            return True
        except UnsupportedError:
            continue
        except RolemeshError:
            return True
    return False


_UNREADABLE = b"\xff\xff\xff\xff"
"""Bytes that are no protobuf message: the first tag has no end."""
