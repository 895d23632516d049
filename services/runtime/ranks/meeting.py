"""Meeting of the ranks of a service: their addresses once, and the process groups of each run.

On one host they meet through a file in the agent's private folder, on several through the first
host's agent: torch's TCP store would listen on all interfaces without authentication.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.rpc.members.identity import Identity
from rolemesh.services.runtime.hosts.store import HostsStore
from rolemesh.services.runtime.server.config import ServiceConfig

MEET_TIMEOUT_S = 300.0
"""Longest wait for a rank to start. It imports torch and vLLM first."""

_LOOK_S = 0.05
"""Pause between two looks for the other ranks."""

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait inside one collective operation: another rank may be in a long forward pass. The
agent notices the death of a rank much sooner."""


class Meeting:
    """This rank's part of the meeting. Used before the first run, then by the compute thread.

    Invariant: every rank makes the meshes of a service in the same order, one for each Initialize
    that the face passes on. So the n-th mesh of one rank meets the n-th mesh of the others.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        """Joins the meeting.

        Args:
            store: torch.distributed.Store of the service's ranks, fresh at their start.
            rank: This rank.
            world_size: Number of ranks.
        """
        self._rank = rank
        self._world_size = world_size
        self._num_meshes = 0
        self._store = store
        self._store.set_timeout(datetime.timedelta(seconds=MEET_TIMEOUT_S))

    async def exchange(self, address: str, is_ended: Callable[[], bool]) -> list[str] | None:
        """Gives this rank's address to all ranks, and waits for theirs.

        Args:
            address: "host:port" of this rank.
            is_ended: Whether this rank is told to end; it then waits no longer.

        Returns:
            "host:port" by rank; None where this rank is to end first.

        Raises:
            RuntimeError: A rank did not come within MEET_TIMEOUT_S.
        """
        return await asyncio.to_thread(self._exchange, address, is_ended)

    def _exchange(self, address: str, is_ended: Callable[[], bool]) -> list[str] | None:
        # Not on the loop, since a store may be on another host.
        self._store.set(f"address/{self._rank}", address)
        keys = [f"address/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + MEET_TIMEOUT_S
        addresses: list[str] = []
        while len(addresses) < len(keys):
            # `get` would wait where no signal reaches it.
            if self._store.check([keys[len(addresses)]]):
                addresses.append(self._store.get(keys[len(addresses)]).decode())
                continue
            if is_ended():
                return None
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"rank {self._rank}: the ranks {absent} did not come within "
                    f"{MEET_TIMEOUT_S:.0f} s: see their logs"
                )
            time.sleep(_LOOK_S)
        return addresses

    def connect(self, layout: HybridLayout) -> RankMesh:
        """Makes the process groups of a run, together with all other ranks."""
        self._num_meshes += 1
        return RankMesh.connect(
            layout,
            rank=self._rank,
            store=PrefixStore(f"mesh/{self._num_meshes}", self._store),
            backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )


def store_of_ranks(config: ServiceConfig, identity: Identity | None) -> Any:
    """The torch.distributed.Store through which the ranks of a service meet.

    Args:
        config: Of a rank.
        identity: Of the service; None where it speaks in clear.
    """
    if config.hosts > 1:
        return HostsStore(config.meet or "", identity)
    return FileStore(str(config.rank_store), config.world_size)
