"""Exchanges of a fake role: services that join, and two calls that carry weights together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message
from support.fake_core import FakeCore

from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import exchange_pb2


class FakeExchange:
    """One of an actor and one rollout service. Two calls carry weights when both are there."""

    def __init__(self) -> None:
        self.joined: set[str] = set()
        """Services that are in it."""
        self.sent = (0, 0.0)
        """Version and weight."""
        self.barrier = asyncio.Barrier(2)

    async def meet(self) -> bool:
        """Returns when both calls are there; False where the other service is gone."""
        try:
            await self.barrier.wait()
        except asyncio.BrokenBarrierError:
            return False
        return True


class FakeExchanges(FakeCore):
    """ExchangeService."""

    async def OfferExchange(self, request: Any, context: Any) -> Any:
        self._note("OfferExchange", request)
        if self.service in self.mesh.unable:
            await self.refuse(
                context, PreconditionError("no libnccl", reason="TRANSPORT_UNAVAILABLE")
            )
        self.mesh.exchanges.setdefault(request.exchange, FakeExchange())
        assert request.plan == (b"plan" if self.role == "actor" else b"")
        return exchange_pb2.OfferExchangeResponse(offers=[self.service.encode()], plan=b"plan")

    async def JoinExchange(self, request: Any, context: Any) -> Any:
        self._note("JoinExchange" if request.offers else "leave", request)
        joined = self.mesh.exchanges.setdefault(request.exchange, FakeExchange()).joined
        if not request.offers:
            joined.discard(self.service)
            return exchange_pb2.JoinExchangeResponse()
        assert request.offers[0] == b"actor"
        joined.add(self.service)
        return exchange_pb2.JoinExchangeResponse(transport="NCCL")

    async def SendWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async def events() -> AsyncIterator[Message]:
            failures = {}
            for name in request.exchanges:
                exchange = self.mesh.exchanges[name]
                assert len(exchange.joined) == 2
                exchange.sent = (self.policy_version, self.weight)
                if not await exchange.meet() or name in self.mesh.breaking:
                    failures[name] = "rank 1 vanished"
            yield exchange_pb2.SendWeightsResult(failures=failures, report=self.report(0))

        async for response in self.keyed(
            "SendWeights", request, context, exchange_pb2.SendWeightsResponse, events=events
        ):
            yield response

    async def taken(self, name: str, version: int) -> bool:
        """Takes weights of a version over an exchange; False where they have to be fetched."""
        exchange = self.mesh.exchanges[name]
        assert len(exchange.joined) == 2
        if not await exchange.meet() or name in self.mesh.breaking or exchange.sent[0] != version:
            return False
        self.policy_version, self.weight = exchange.sent
        return True

    def _note(self, method: str, request: Any) -> None:
        from support.fake_roles import CallRecord

        key = request.key
        identity = (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)
        self.mesh.calls.append(CallRecord(self.service, method, identity, request, "done"))
