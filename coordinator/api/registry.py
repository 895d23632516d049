"""Registry of a mesh: its services enter themselves into the store, each with a lease."""

from __future__ import annotations

import importlib.metadata
import re

from rolemesh.coordinator.api.store_errors import translated
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import StateStore
from rolemesh.rpc.channel import check_address
from rolemesh.rpc.errors import ForbiddenError, InvalidRequestError, PreconditionError
from rolemesh.rpc.limits import MAX_SERVICES
from rolemesh.v1 import registry_pb2

LEASE_S = 10.0
"""Life of a registration. A service renews it every second or two; a busy host may be late."""

_INCARNATION = re.compile(r"[0-9a-f]{32}")


async def register(
    store: StateStore, mesh: str, request: registry_pb2.RegisterServiceRequest, caller: str
) -> registry_pb2.RegisterServiceResponse:
    """Enters a service into the store, renews its lease, or takes it out.

    Args:
        store: The store.
        mesh: Whose certificates callers have (`Identity.mesh`).
        request: As registry.proto says.
        caller: Name in the caller's certificate.

    Raises:
        RolemeshError: As registry.proto says.
    """
    _check(request, caller)
    entered = Registration(
        mesh=mesh,
        role=request.role,
        number=request.number,
        address=request.address,
        incarnation=request.incarnation,
        is_leaving=request.state == registry_pb2.SERVICE_STATE_LEAVING,
    )
    answer = registry_pb2.RegisterServiceResponse()
    answer.lease.FromMilliseconds(round(1000 * LEASE_S))
    with translated():
        if request.state == registry_pb2.SERVICE_STATE_ENDED:
            await store.take_out(entered)
            return answer
        holder = await store.enter(entered, LEASE_S)
    if holder.incarnation != entered.incarnation:
        raise PreconditionError(
            f"number is {request.number}, but the {request.role} at {holder.address} is "
            f"registered as number {request.number}: give this one another number (--number), "
            f"or end that one. Where it has died, its lease ends within {LEASE_S:.0f} s",
            reason="PLACE_TAKEN",
            retryable=True,
            metadata={"address": holder.address},
        )
    return answer


def _check(request: registry_pb2.RegisterServiceRequest, caller: str) -> None:
    """Raises ForbiddenError or InvalidRequestError."""
    if request.role not in ROLES:
        raise _refused(f"role is {request.role[:64]!r}: give {', '.join(ROLES)}")
    if request.role != caller:
        raise ForbiddenError(
            f"role is {request.role!r}, but the certificate of the service is that of {caller!r}: "
            f"start it with the identity of its role (--identity {request.role}.pem)",
            reason="CALLER_DENIED",
            metadata={"caller": caller},
        )
    if not 0 <= request.number < MAX_SERVICES:
        raise _refused(f"number is {request.number}: give 0 to {MAX_SERVICES - 1} (--number)")
    if not _INCARNATION.fullmatch(request.incarnation):
        raise _refused(
            f"incarnation is {request.incarnation[:64]!r}: give 32 hexadecimal digits, drawn anew "
            "by each process"
        )
    own = importlib.metadata.version("rolemesh")
    if request.version not in ("", own):
        raise _refused(
            f"version is {request.version!r}, but the coordinator has rolemesh {own}: install the "
            "same version for both"
        )
    if request.state not in (
        registry_pb2.SERVICE_STATE_SERVING,
        registry_pb2.SERVICE_STATE_LEAVING,
        registry_pb2.SERVICE_STATE_ENDED,
    ):
        raise _refused(f"state is {request.state}: give serving (1), leaving (2) or ended (3)")
    try:
        check_address(request.address)
    except ValueError as error:
        raise _refused(str(error)) from error


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="REGISTRATION_REFUSED")
