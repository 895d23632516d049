"""Messages over torch.distributed's gloo: TCP between ranks of a mesh, in host memory."""

from __future__ import annotations

import datetime
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rolemesh.engine.messages import on_one_line
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transport.base import (
    Deadline,
    Exchange,
    Message,
    TransferFailedError,
)
from rolemesh.engine.transport.groups.torch_group import TorchGroupTransport

_TAG = 0x72

_TICK_S = 2e-3
"""Gloo waits for whole milliseconds, so its time ends up to one before the caller's does."""


class GlooTransport(TorchGroupTransport):
    """Messages in host memory, each by a send and a receive of its own.

    Example: on every rank `transport = GlooTransport(mesh)`; `close` it before the mesh.
    """

    name = "gloo"

    def __init__(self, mesh: RankMesh, *, timeout_s: float = 120.0) -> None:
        """Makes the process group; every rank of the mesh calls it.

        Args:
            mesh: Of this rank.
            timeout_s: Seconds for all ranks to come. Torch's own limit is half an hour.

        Raises:
            RuntimeError: A rank did not come.
            ValueError: The mesh has one rank only.
        """
        if mesh.world.process_group is None:
            raise ValueError("the mesh has one rank: it has no peer to exchange with")
        super().__init__(mesh)
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        works: list[tuple[Message, bool, Any]] = []
        deadline = Deadline(math.inf)  # A start waits for no peer: if it fails, something broke.
        # Receives first: what comes in early then needs no place in between.
        for is_send, messages in ((False, receives), (True, sends)):
            start = dist.isend if is_send else dist.irecv
            for message in messages:
                try:
                    work = start(
                        message.buffer,
                        self._torch_ranks[message.peer],
                        group=self._group,
                        tag=_TAG,
                    )
                except RuntimeError as error:
                    self.abort()
                    raise self._failed(message.peer, error, label, deadline) from error
                if is_send:
                    self._count_sent(message.buffer.numel(), is_control)
                works.append((message, is_send, work))
        return _GlooExchange(self, works, label, is_control)

    def _failed(
        self, peer: int, error: Exception, label: str, deadline: Deadline
    ) -> TransferFailedError:
        said = on_one_line(str(error)) or type(error).__name__
        if deadline.remaining_s < _TICK_S:
            cause = "it did not do its part in time"
        else:
            cause = f"the connection broke, so it ended or gave up ({said})"
        return self.failure(cause, peer, label, seconds=deadline.elapsed_s)


class _GlooExchange(Exchange):
    def __init__(
        self,
        transport: GlooTransport,
        works: list[tuple[Message, bool, Any]],
        label: str,
        is_control: bool,
    ) -> None:
        self._transport = transport
        self._works = works
        self._label = label
        self._is_control = is_control

    def wait(self, timeout_s: float) -> None:
        # A gloo send or receive never says is_completed() before it was waited for (torch 2.13,
        # measured), so the deadline goes into wait(). One thread a peer: a peer that breaks off
        # is noticed first, also while another merely takes long.
        deadline = Deadline(timeout_s)
        by_peer: defaultdict[int, list[tuple[Message, bool, Any]]] = defaultdict(list)
        for part in self._works:
            by_peer[part[0].peer].append(part)
        outcomes: queue.SimpleQueue[tuple[int, RuntimeError | None]] = queue.SimpleQueue()

        def wait_for(peer: int) -> None:
            try:
                for _, _, work in by_peer[peer]:
                    # Not below a millisecond: zero would mean the group's own timeout.
                    seconds = max(deadline.remaining_s, 1e-3)
                    work.wait(datetime.timedelta(seconds=seconds))
            except RuntimeError as error:
                outcomes.put((peer, error))
            else:
                outcomes.put((peer, None))

        if len(by_peer) == 1:
            wait_for(*by_peer)
        else:
            for peer in by_peer:
                threading.Thread(target=wait_for, args=(peer,), daemon=True).start()
        for _ in by_peer:
            peer, error = outcomes.get()
            if error is not None:
                failure = self._transport._failed(peer, error, self._label, deadline)
                self._transport.abort()
                raise failure from error
        for message, is_send, _ in self._works:
            if not is_send:
                self._transport._count_received(message.buffer.numel(), self._is_control)
        self._works = []
