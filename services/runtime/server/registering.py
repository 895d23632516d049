"""Registration of a service at a coordinator: a lease that is renewed as long as the process lives.

The coordinator enters it into its store, to which services have no way. See registry.proto.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import Callable

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    CallCancelledError,
    DeadlineError,
    InternalError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.rpc.members.identity import CLOSED, NOT_TRUSTED, Identity
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.v1 import registry_pb2, registry_pb2_grpc

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
"""A lease outlives some renewals that come late or get lost."""

FIRST_PAUSE_S = 1.0
"""Pause between two tries until a coordinator has said how long a lease is."""

CALL_S = 3.0
"""Deadline of one call."""

NOTICE_S = 1.0
"""How long a service that drains goes on to take calls: a run looks twice a second for those that
leave, and asks others then."""

PLACE_WAIT_S = 30.0
"""How long a place may be taken: by then the lease of a former process has ended."""

_PASSING = (UnavailableError, DeadlineError, CallCancelledError, InternalError)
"""Coordinators come and go with their runs, and their stores go away for a while."""


class Registering:
    """Keeps a service registered. Owner: the loop.

    A coordinator that does not answer is waited for, without end: services outlive runs. One that
    refuses this service before it was ever registered ends it.

    Example::

        registering = Registering(config, "gpu-1:50051", identity, on_refused=exit_requested.set)
        ...
        await registering.leave()  # others are asked from here on
        await registering.end()  # another process may have the place
    """

    def __init__(
        self,
        config: ServiceConfig,
        address: str,
        identity: Identity,
        on_refused: Callable[[], None],
    ) -> None:
        """Begins to register.

        Args:
            config: Of the service, with register_at.
            address: host:port at which others reach it.
            identity: Of the service.
            on_refused: Called once if the coordinator refuses it for good; `refusal` says why.
        """
        assert config.register_at is not None
        self.refusal = ""
        self._config = config
        self._place = f"{config.role} {config.number}"
        self._on_refused = on_refused
        self._channel = open_channel(config.register_at, retries=False, identity=identity)
        self._stub = registry_pb2_grpc.RegistryServiceStub(self._channel)
        self._request = registry_pb2.RegisterServiceRequest(
            role=config.role,
            number=config.number,
            address=address,
            incarnation=uuid.uuid4().hex,
            version=importlib.metadata.version("rolemesh"),
            state=registry_pb2.SERVICE_STATE_SERVING,
        )
        self._is_registered = False
        """Whether a coordinator has ever entered it."""
        self._pause_s = FIRST_PAUSE_S
        self._taken_since: float | None = None
        self._told = ""
        """The problem that was logged last, until it is over."""
        self._speaking = asyncio.Lock()
        """Held during a call, so that what is said later is heard later."""
        self._keeping = asyncio.create_task(self._keep())

    async def leave(self) -> None:
        """Says that the service drains, and gives runs time to hear of it.

        The lease is renewed until `end`.
        """
        await self._say_at_once(registry_pb2.SERVICE_STATE_LEAVING)
        if self._is_registered:
            await asyncio.sleep(NOTICE_S)

    async def end(self) -> None:
        """Frees the place."""
        await self._say_at_once(registry_pb2.SERVICE_STATE_ENDED)
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        await self._channel.close()

    async def _say_at_once(self, state: registry_pb2.ServiceState.ValueType) -> None:
        async with self._speaking:
            self._request.state = state
            if not self._is_registered:
                # It has no place, and a coordinator that is not there need not be waited for.
                return
            try:
                await self._stub.RegisterService(self._request, timeout=CALL_S)
            except RolemeshError as error:
                # The lease says it in a few seconds.
                logger.warning("%s could not tell the coordinator: %s", self._place, error.message)

    async def _keep(self) -> None:
        while not self.refusal and self._request.state != registry_pb2.SERVICE_STATE_ENDED:
            async with self._speaking:
                try:
                    answer = await self._stub.RegisterService(self._request, timeout=CALL_S)
                except RolemeshError as error:
                    self._failed(error)
                else:
                    self._registered(answer.lease.ToTimedelta().total_seconds())
            await asyncio.sleep(self._pause_s)

    def _registered(self, lease_s: float) -> None:
        if not self._is_registered or self._told:
            logger.info("registered as %s at %s", self._place, self._config.register_at)
        self._is_registered, self._told, self._taken_since = True, "", None
        self._pause_s = max(lease_s / RENEWALS_PER_LEASE, 0.1)

    def _failed(self, error: RolemeshError) -> None:
        where = f"register_at is {self._config.register_at!r}"
        told = f"{where}: {error.message}"
        is_final = not isinstance(error, _PASSING)
        if NOT_TRUSTED in error.message:
            is_final = True
            told = (
                f"{where}, whose certificate is not of this service's mesh ({error.message}): give "
                "the member_port of a coordinator of the same authority, or an identity of its "
                "authority (--identity)"
            )
        elif CLOSED in error.message:
            told += (
                ". A coordinator that closes connections may not trust this service's certificate, "
                "or the port is not its member_port"
            )
        elif error.reason == "PLACE_TAKEN":
            now = time.monotonic()
            self._taken_since = now if self._taken_since is None else self._taken_since
            is_final = now - self._taken_since >= PLACE_WAIT_S
        if is_final and not self._is_registered:
            self.refusal = f"{self._place} is refused: {told}"
            self._on_refused()
        elif told != self._told:
            logger.warning("%s is not registered, and tries again: %s", self._place, told)
        self._told = told
