"""Messages between GPUs by what torch itself has, where cupy or its NCCL is missing.

Either torch's NCCL (each rank with a GPU of its own), or gloo with a copy in host memory on both
sides, which always works and is the slowest. Torch's NCCL is not verified on a GPU; its calls run
over gloo in tests.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.messages import on_one_line
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transport.base import (
    Deadline,
    Exchange,
    Message,
    TransferFailedError,
)
from rolemesh.engine.transport.groups.gloo import GlooTransport
from rolemesh.engine.transport.groups.torch_group import TorchGroupTransport


class HostMemoryTransport(GlooTransport):
    """Gloo for tensors of any device: each message is copied to host memory, and from there."""

    name = "gloo through host memory"

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        out = [Message(message.peer, message.buffer.cpu()) for message in sends]
        hosts = [torch.empty(message.buffer.numel(), dtype=torch.uint8) for message in receives]
        into = [Message(message.peer, host) for message, host in zip(receives, hosts, strict=True)]
        under_way = super()._start(out, into, label, is_control)
        return _Staged(under_way, list(zip(hosts, receives, strict=True)))


class _Staged(Exchange):
    def __init__(self, under_way: Exchange, arriving: list[tuple[torch.Tensor, Message]]) -> None:
        self._under_way = under_way
        self._arriving = arriving

    def wait(self, timeout_s: float) -> None:
        self._under_way.wait(timeout_s)
        for host, message in self._arriving:
            message.buffer.copy_(host)
        self._arriving = []


class TorchPairsTransport(TorchGroupTransport):
    """A rank's end of a process group of torch, whose sends and receives of a round go as one.

    Example, on every rank of a mesh: `transport = TorchPairsTransport(mesh, device)`, then
    `transport.connect((), timeout_s=120)`; `close` it before the mesh.
    """

    name = "torch's NCCL"
    offer = b""
    """Torch's ranks meet by the store of their world: there is nothing to tell."""

    def __init__(self, mesh: RankMesh, device: torch.device, *, backend: str = "nccl") -> None:
        """Looks whether torch has the backend, and makes nothing yet.

        Args:
            mesh: Of this rank, of several.
            device: Where the messages lie.
            backend: Of torch.distributed.

        Raises:
            OSError: This torch was built without it.
        """
        if backend == "nccl" and not dist.is_nccl_available():
            raise OSError("this torch was built without NCCL: install its build for CUDA")
        super().__init__(mesh)
        self._device = device
        self._backend = backend

    def connect(self, offers: Sequence[bytes], *, timeout_s: float) -> None:
        """Makes the group; every rank of the mesh calls it.

        Args:
            offers: Of all ranks; they say nothing.
            timeout_s: Seconds for all ranks to come.

        Raises:
            RuntimeError: A rank did not come, or NCCL cannot connect the devices.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend=self._backend, timeout=timeout)
        # NCCL connects at the first use, which must be one of all ranks: a first round may be one
        # of a few.
        first = torch.zeros(1, device=self._device)
        dist.all_reduce(first, group=self._group, async_op=True).wait(timeout)

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        deadline = Deadline(1.0)
        calls = [
            dist.P2POp(call, message.buffer, self._torch_ranks[message.peer], group=self._group)
            for call, messages in ((dist.irecv, receives), (dist.isend, sends))
            for message in messages
        ]
        try:
            works = dist.batch_isend_irecv(calls)
        except RuntimeError as error:
            self.abort()
            raise self.failed(error, label, deadline) from error
        for message in sends:
            self._count_sent(message.buffer.numel(), is_control)
        return _Round(self, works, receives, label, is_control)

    def failed(self, error: Exception, label: str, deadline: Deadline) -> TransferFailedError:
        """The error of a round that broke."""
        cause = f"torch reports: {on_one_line(str(error)) or type(error).__name__}"
        return self.failure(cause, None, label, seconds=deadline.elapsed_s)


class _Round(Exchange):
    def __init__(
        self,
        transport: TorchPairsTransport,
        works: list[Any],
        receives: Sequence[Message],
        label: str,
        is_control: bool,
    ) -> None:
        self._transport = transport
        self._works = works
        self._receives = list(receives)
        self._label = label
        self._is_control = is_control

    def wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        try:
            for work in self._works:
                # With a time NCCL too waits for the end; without one it only orders streams.
                work.wait(datetime.timedelta(seconds=max(deadline.remaining_s, 1e-3)))
        except RuntimeError as error:
            failure = self._transport.failed(error, self._label, deadline)
            self._transport.abort()
            raise failure from error
        for message in self._receives:
            self._transport._count_received(message.buffer.numel(), self._is_control)
        self._works, self._receives = [], []
