"""Workers of servers in a group with a sender of weights, and that sender, in one process.

As with NCCL, nothing ends before all ranks have entered, and tensors come in order.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

import torch

from rolemesh.engine.rollout.servers.senders import BroadcastFailedError, WeightSender

WAIT_S = 10.0


class FakeGroup:
    """What a sender and all workers share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.unique_id = b""
        self.world_size = 0
        self.ranks: dict[int, Any] = {}
        """Who has entered, by rank; 0 is the sender."""
        self.sent: list[torch.Tensor] = []
        """Since the group exists."""
        self.taken: dict[int, int] = {}
        self.is_gone = False
        self.received: dict[str, list[tuple[str, torch.Tensor]]] = {}
        """By server, with names, in order."""
        self.infos: list[dict[str, Any]] = []
        """That servers were initialised with."""
        self.refused: list[int] = []
        """Number of the tensor at which a server fails, once each."""

    def enter(self, rank: int, who: Any, unique_id: bytes, world_size: int) -> None:
        with self.changed:
            if self.unique_id != unique_id:
                self.unique_id, self.world_size = unique_id, world_size
                self.ranks, self.sent, self.taken, self.is_gone = {}, [], {}, False
            assert world_size == self.world_size
            assert rank not in self.ranks, "two of one rank"
            self.ranks[rank] = who
            self.changed.notify_all()
            is_whole = self.changed.wait_for(
                lambda: len(self.ranks) == world_size or self.is_gone, WAIT_S
            )
            if not is_whole or self.is_gone:
                raise BroadcastFailedError("not all came")

    # --- as workers do, on threads of the fake servers ---------------------------------------

    def join(self, server: Any, info: dict[str, Any]) -> None:
        self.infos.append(info)
        unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == 128
        assert info["packed"] is False
        threads = [
            threading.Thread(
                target=self.enter,
                args=(info["rank_offset"] + index, server, unique_id, info["world_size"]),
            )
            for index in range(server.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def receive(self, server: Any, info: dict[str, Any]) -> None:
        rank = next(rank for rank, who in self.ranks.items() if who is server)
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            with self.changed:
                number = self.taken.get(rank, 0)
                if number in self.refused:
                    self.refused.remove(number)
                    server.kill_soon()
                    return
                is_there = self.changed.wait_for(
                    lambda n=number: len(self.sent) > n or self.is_gone, WAIT_S
                )
                if not is_there or self.is_gone:
                    raise BroadcastFailedError("nothing came")
                tensor = self.sent[number]
                assert str(tensor.dtype) == f"torch.{dtype}"
                assert list(tensor.shape) == shape
                self.taken[rank] = number + 1
                self.received.setdefault(server.url, []).append((name, tensor))
                self.changed.notify_all()


class FakeSender(WeightSender):
    """Rank 0. A broadcast is queued; `wait` ends when all workers have taken it."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self._ids = iter(range(1, 100))
        self.num_connects = 0

    def unique_id(self) -> bytes:
        return next(self._ids).to_bytes(128, "big")

    def connect(self, unique_id: bytes, world_size: int, *, timeout_s: float) -> None:
        self.num_connects += 1
        self._group.enter(0, self, unique_id, world_size)

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        with self._group.changed:
            if self._group.is_gone:
                raise BroadcastFailedError("aborted")
            self._group.sent.append(tensor.clone())
            self._group.changed.notify_all()

    def wait(self, *, timeout_s: float) -> None:
        group = self._group
        with group.changed:
            servers = [rank for rank, who in group.ranks.items() if rank and who is not self]
            heads = {id(group.ranks[rank]): rank for rank in reversed(servers)}
            group.changed.wait_for(
                lambda: (
                    group.is_gone
                    or all(group.taken.get(rank, 0) == len(group.sent) for rank in heads.values())
                ),
                WAIT_S,
            )
            if group.is_gone:
                raise BroadcastFailedError("aborted: the data is partial")

    def abort(self) -> None:
        with self._group.changed:
            self._group.is_gone = True
            self._group.changed.notify_all()
