"""A rank's end of a process group of torch, which the transports over torch share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transport.base import Transport


class TorchGroupTransport(Transport):
    """Messages by a process group of its own, so that an abort harms no other group."""

    def __init__(self, mesh: RankMesh) -> None:
        """Makes no group yet.

        Args:
            mesh: Of this rank, of several.
        """
        super().__init__(mesh.rank, mesh.world.size)
        self._torch_ranks = [mesh.torch_rank(rank) for rank in range(mesh.world.size)]
        self._group: Any = None

    def abort(self) -> None:
        """Ends the group: rounds under way fail, also of peers that wait for this rank."""
        super().abort()
        self.close()

    def close(self) -> None:
        """Ends the group."""
        self._fail("closed")
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()
            dist.destroy_process_group(group)
