"""The server of a host's agent: it says who it is, and on the first host keeps the meeting."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from rolemesh.rpc.address import host_and_port
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import UnsupportedError
from rolemesh.rpc.limits import MAX_CALLS
from rolemesh.rpc.members.identity import server_credentials
from rolemesh.services.runtime.hosts.keys import KeyStore
from rolemesh.services.runtime.hosts.meeting import HostMeeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.interceptor import ServiceInterceptor
from rolemesh.services.runtime.server.metrics import ServiceMetrics
from rolemesh.v1 import hosts_pb2, hosts_pb2_grpc

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Pause between two looks for hosts that are lost."""

_Context = grpc.aio.ServicerContext[Any, Any]


class AgentDoor(hosts_pb2_grpc.HostsServiceServicer):
    """HostsService of one agent. Owner: the loop on which it was opened.

    Example::

        door = AgentDoor(config, incarnation, HostMeeting(service, 300.0))
        port = await door.open("10.0.0.2", 29400)
        ...
        await door.close()
    """

    def __init__(
        self, config: ServiceConfig, incarnation: str, meeting: HostMeeting | None
    ) -> None:
        """Prepares.

        Args:
            config: Of the service.
            incarnation: Name of the agent's process.
            meeting: On the first host; None on the others.
        """
        self._config = config
        self._incarnation = incarnation
        self._meeting = meeting
        self._keys = KeyStore()
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> int:
        """Serves, to members of the service alone where it has an identity; returns the port.

        Raises:
            RuntimeError: gRPC cannot listen there.
            IdentityError: The identity cannot be used.
        """
        config = self._config
        server = grpc.aio.server(
            interceptors=[
                ServiceInterceptor(
                    config.role,
                    config.host_rank * config.ranks_per_host,
                    ServiceMetrics(config.role, config.rank),
                    has_identity=config.identity is not None,
                )
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        hosts_pb2_grpc.add_HostsServiceServicer_to_server(self, server)
        place = host_and_port(host, port)
        if config.identity is None:
            bound = server.add_insecure_port(place)
        else:
            bound = server.add_secure_port(place, server_credentials(config.identity))
        await server.start()
        self._server = server
        if self._meeting is not None:
            self._looking = asyncio.create_task(self._look(self._meeting))
        return bound

    async def close(self) -> None:
        """Serves no longer."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.stop(None)

    async def JoinHosts(
        self, request: hosts_pb2.JoinHostsRequest, context: _Context
    ) -> hosts_pb2.JoinHostsResponse:
        """See hosts.proto."""
        return hosts_pb2.JoinHostsResponse(hosts=self._kept_meeting().join(request))

    async def ReportHost(
        self, request: hosts_pb2.ReportHostRequest, context: _Context
    ) -> hosts_pb2.ReportHostResponse:
        """See hosts.proto."""
        return self._kept_meeting().report(request)

    async def LookAtHost(
        self, request: hosts_pb2.LookAtHostRequest, context: _Context
    ) -> hosts_pb2.LookAtHostResponse:
        """See hosts.proto."""
        return hosts_pb2.LookAtHostResponse(
            host_rank=self._config.host_rank, incarnation=self._incarnation
        )

    async def SetKey(
        self, request: hosts_pb2.SetKeyRequest, context: _Context
    ) -> hosts_pb2.SetKeyResponse:
        """See hosts.proto."""
        self._kept_meeting()
        self._keys.set(request.key, request.value)
        return hosts_pb2.SetKeyResponse()

    async def GetKey(
        self, request: hosts_pb2.GetKeyRequest, context: _Context
    ) -> hosts_pb2.GetKeyResponse:
        """See hosts.proto."""
        self._kept_meeting()
        value = await self._keys.get(request.key, request.wait_ms / 1e3)
        return hosts_pb2.GetKeyResponse(value=value)

    async def AddToKey(
        self, request: hosts_pb2.AddToKeyRequest, context: _Context
    ) -> hosts_pb2.AddToKeyResponse:
        """See hosts.proto."""
        self._kept_meeting()
        value = self._keys.add(request.key, request.amount, request.caller, request.sequence)
        return hosts_pb2.AddToKeyResponse(value=value)

    async def DeleteKey(
        self, request: hosts_pb2.DeleteKeyRequest, context: _Context
    ) -> hosts_pb2.DeleteKeyResponse:
        """See hosts.proto."""
        self._kept_meeting()
        return hosts_pb2.DeleteKeyResponse(was_there=self._keys.delete(request.key))

    def _kept_meeting(self) -> HostMeeting:
        if self._meeting is None:
            raise UnsupportedError(
                f"this is host {self._config.host_rank} of the {self._config.role}, and the first "
                f"one keeps the meeting: give --meet {self._config.meet}"
            )
        return self._meeting

    async def _look(self, meeting: HostMeeting) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            meeting.look()
