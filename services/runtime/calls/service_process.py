"""What a service process has once, whatever number of runs it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transport.slots.shm import host_identity
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.limits import MAX_PEERS
from rolemesh.rpc.members.identity import Identity
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.calls.hold import RunHold
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.services.runtime.ranks.meeting import Meeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.metrics import ServiceMetrics

logger = logging.getLogger(__name__)

LAST_CALLS_S = 120.0
"""How long calls in progress may take on a channel that is given up for others: as a Fetch may."""


class ServiceProcess:
    """The compute thread, the channels to peers, and who the process is. Owner: the loop."""

    def __init__(self, role: str, config: ServiceConfig) -> None:
        """Prepares; `role` is the name of what it serves."""
        self.config = config
        self.started_at = time.time()
        self.host_id = host_identity() if config.shared_memory else ""
        self.compute = ComputeThread()
        self.traffic = ChannelTraffic()
        self.metrics = ServiceMetrics(role, config.rank)
        self.identity: Identity | None = None
        """Of this service; None where it speaks in clear. Set before the server is bound."""
        self.address = ""
        """host:port under which peers reach this process; set when the server is bound."""
        self.services: list[str] = []
        """Full names of the services of this process."""
        self.exit_requested = asyncio.Event()
        """Set when the process shall end."""
        self.meeting: Meeting | None = None
        """Where the ranks of this service meet; None where there is one."""
        self.rank_addresses: Sequence[str] = ()
        """Where each rank of the service answers; empty where there is one."""
        self.face: Face | None = None
        """On rank 0 of several: passes calls on to all ranks."""
        self._mesh: RankMesh | None = None
        self._num_meshes = 0
        self.holds: list[RunHold] = []
        """Of the runs that it may serve at once."""
        self._channels: OrderedDict[str, MeshChannel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_face(self) -> bool:
        """Whether this rank speaks for the service."""
        return self.config.rank == 0

    def join_ranks(self, layout: HybridLayout) -> RankMesh:
        """The process groups of all ranks, made or had already for another run.

        Every rank calls it together, on the compute thread, and `leave_ranks` once for each time.

        Raises:
            InvalidRequestError: LAYOUT_MISMATCH: the run beside has another layout.
        """
        if self.meeting is None:
            return RankMesh.single()
        if self._mesh is None:
            self._mesh = self.meeting.connect(layout)
        elif self._mesh.layout != layout:
            raise InvalidRequestError(
                f"generate is tp={layout.generate.tp},pp={layout.generate.pp}, but a run beside, "
                f"which shares the service, has tp={self._mesh.layout.generate.tp},"
                f"pp={self._mesh.layout.generate.pp}: give the same, or another service",
                reason="LAYOUT_MISMATCH",
            )
        self._num_meshes += 1
        return self._mesh

    def leave_ranks(self) -> None:
        """Ends a use of the groups, and the groups with the last one."""
        if self._mesh is None:
            return
        self._num_meshes -= 1
        if not self._num_meshes:
            self._mesh.close()
            self._mesh = None

    def peer(self, address: str) -> MeshChannel:
        """The channel to a peer, opened on first use; MAX_PEERS are kept, those used last."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(
                address, traffic=self.traffic, identity=self.identity
            )
        self._channels.move_to_end(address)
        if len(self._channels) > MAX_PEERS:
            gone, unused = self._channels.popitem(last=False)
            self.metrics.forget_peer(gone)
            closing = asyncio.create_task(unused.close(LAST_CALLS_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return channel

    def count_pulled(self, address: str, way: str, num_bytes: int) -> None:
        """Counts bytes that a peer gave, and logs each way between the two once."""
        if self.metrics.pulled(address, way, num_bytes):
            logger.info("bytes of %s come by %s", address, way)

    async def close_channels(self) -> None:
        """Closes the channels to peers."""
        channels, self._channels = self._channels, OrderedDict()
        for channel in channels.values():
            await channel.close()
        for closing in tuple(self._closing):
            closing.cancel()
