"""A rank's ends of exchanges: kept by name, joined and received from on a thread of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch

from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.weights.exchanges.exchange import ExchangeEnd
from rolemesh.engine.weights.transfer import TransferMismatchError
from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.ranks.device import select_device

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.5
"""How often a transfer looks whether its call was given up."""


class Exchanges:
    """Ends of the exchanges that a rank has offered to join. Owner: the loop; `close` from any.

    Invariant: an end that is found by its name can be used; one whose transfer failed is gone.

    Example: after `await offer("rollout-0/1", make)` and `await join("rollout-0/1", offers)`, the
    compute thread sends over `get("rollout-0/1")`.
    """

    def __init__(self) -> None:
        self._ends: dict[str, ExchangeEnd] = {}
        self._thread: ComputeThread | None = None

    async def offer(self, name: str, make: Callable[[torch.device], ExchangeEnd]) -> ExchangeEnd:
        """Makes an end.

        Args:
            name: Of the exchange.
            make: Makes it, for the device of this rank.

        Raises:
            PreconditionError: TRANSPORT_UNAVAILABLE: this rank cannot take part.
        """
        await self.leave(name)
        if self._thread is None:
            self._thread = ComputeThread("exchange")
        end = await self._possible(self._thread.run(lambda: make(select_device())))
        self._ends[name] = end
        return end

    async def join(self, name: str, offers: Sequence[bytes]) -> ExchangeEnd:
        """Connects an end; where that fails, it is gone.

        Raises:
            PreconditionError: TRANSPORT_UNAVAILABLE: the ranks cannot be connected, or this one
                has not offered.
        """
        end = self.get(name)
        if end is None or self._thread is None:
            raise PreconditionError(
                f"exchange is {name!r}, for which this rank has made no offer, or no longer: call "
                "OfferExchange on both services anew",
                reason="TRANSPORT_UNAVAILABLE",
            )
        try:
            await self._possible(self._thread.run(end.connect, offers))
        except BaseException:
            # Others may be waiting for this rank to connect.
            await self.leave(name)
            raise
        return end

    async def receive(
        self, name: str, policy_version: int, call: Call
    ) -> tuple[ExchangeEnd, list[tuple[str, torch.Tensor]]]:
        """Takes weights that the actor sends over an exchange.

        Raises:
            TransferMismatchError: The actor has another version; the exchange goes on.
            TransferFailedError: A rank vanished or was late, or this one is not in the exchange.
            UnavailableError: SERVICE_DRAINING: the call was given up.
        """
        end, thread = self.get(name), self._thread
        if end is None or thread is None:
            raise TransferFailedError(
                "this rank is not in it",
                rank=0,
                peer=None,
                transport="an exchange",
                waited_for=f"exchange {name!r}",
                seconds=0.0,
            )
        receiving = thread.run(end.receive, policy_version=policy_version)
        try:
            return end, await watched(receiving, call, "receive weights", [end])
        except TransferMismatchError:
            raise
        except BaseException:
            await self.leave(name)
            raise

    def get(self, name: str) -> ExchangeEnd | None:
        """The end of that name; None where this rank is not in the exchange."""
        return self._ends.get(name)

    async def leave(self, name: str) -> None:
        """Closes an end, if there is one."""
        end = self._ends.pop(name, None)
        if end is not None:
            # NCCL's end waits for the device.
            await asyncio.to_thread(end.close)

    def close(self) -> None:
        """Closes all ends."""
        ends, self._ends = self._ends, {}
        for end in ends.values():
            end.close()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            # What NCCL's start has hung cannot be ended: the thread is left behind then.
            thread.close(_LOOK_S)

    async def _possible(self, work: Awaitable[T]) -> T:
        """What makes a transport unusable is no fault of the service."""
        try:
            return await work
        except (
            OSError,  # cupy is not installed, shared memory is full
            RuntimeError,  # ranks do not come or cannot reach each other; CUDA and NCCL
            ValueError,  # plans, offers or versions do not fit
        ) as error:
            raise PreconditionError(str(error), reason="TRANSPORT_UNAVAILABLE") from error


async def watched(work: Awaitable[T], call: Call, stage: str, ends: Sequence[ExchangeEnd]) -> T:
    """Waits for a transfer; where its call is given up or cancelled, the transfer is aborted.

    Raises:
        UnavailableError: SERVICE_DRAINING.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            call.progress(stage)
            await asyncio.wait({task}, timeout=_LOOK_S)
        return task.result()
    finally:
        if not task.done():
            for end in ends:
                await asyncio.to_thread(end.abort)
            # It ends soon, and must not use what its caller frees.
            await asyncio.wait({task})
