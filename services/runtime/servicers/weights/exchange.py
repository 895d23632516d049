"""ExchangeService: how a service's ranks join those of another one, and what an actor sends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Protocol

import torch
from google.protobuf.message import Message

from rolemesh.engine.layout.manifest import DtypeName, ManifestError
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import LayoutSpec
from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.weights.exchanges.exchange import ExchangeEnd
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.transfer import TransferMismatchError
from rolemesh.rpc.errors import PreconditionError, UnsupportedError
from rolemesh.rpc.together import all_ended
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer, Runtime
from rolemesh.services.runtime.experience.published_weights import dtype_of
from rolemesh.services.runtime.ranks.face import join_answers
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.weights.exchange_ends import Exchanges, logger, watched
from rolemesh.v1 import exchange_pb2, exchange_pb2_grpc


class ExchangingRole(Protocol):
    """What an exchange needs of a role."""

    exchanges: Exchanges
    """Of this rank."""

    def plan_exchange(self, peer: TrainLayout, dtype: DtypeName) -> Plan:
        """What travels between this service and one of another layout.

        Raises:
            ManifestError: The model has no plan.
            LayoutError: The model cannot be cut so.
            UnsupportedFamilyError: The same.
        """


class ExchangeServicer(RoleServicer[ExchangingRole], exchange_pb2_grpc.ExchangeServiceServicer):
    """ExchangeService of a service that takes weights."""

    async def OfferExchange(
        self, request: exchange_pb2.OfferExchangeRequest, context: Context
    ) -> exchange_pb2.OfferExchangeResponse:
        """See exchange.proto."""
        peer = LayoutSpec.model_validate(dict(request.peer_layout)).layout()
        dtype = dtype_of(request.dtype, "dtype")

        def make(device: torch.device) -> ExchangeEnd:
            plan = self._role.plan_exchange(peer, dtype)
            return ExchangeEnd(
                plan, self._first_rank(plan) + self._runtime.process.config.rank, device
            )

        async def own() -> exchange_pb2.OfferExchangeResponse:
            end = await self._role.exchanges.offer(request.exchange, make)
            if request.plan not in (b"", end.plan_digest):
                await self._role.exchanges.leave(request.exchange)
                raise PreconditionError(
                    "the other service plans another transfer of the weights: give both services "
                    "the same model folder and the same version of rolemesh",
                    reason="TRANSPORT_UNAVAILABLE",
                )
            return exchange_pb2.OfferExchangeResponse(offers=[end.offer], plan=end.plan_digest)

        async def work(call: Call) -> exchange_pb2.OfferExchangeResponse:
            answers = await self._on_all_ranks(request, own())
            return exchange_pb2.OfferExchangeResponse(
                offers=[offer for answer in answers for offer in answer.offers],
                plan=answers[0].plan,
            )

        return await self._runtime.keyed_unary(request, work, on_all_ranks=False)

    async def JoinExchange(
        self, request: exchange_pb2.JoinExchangeRequest, context: Context
    ) -> exchange_pb2.JoinExchangeResponse:
        """See exchange.proto."""
        exchanges = self._role.exchanges

        async def own() -> exchange_pb2.JoinExchangeResponse:
            if not request.offers:
                await exchanges.leave(request.exchange)
                return exchange_pb2.JoinExchangeResponse()
            end = await exchanges.join(request.exchange, request.offers)
            return exchange_pb2.JoinExchangeResponse(transport=end.way)

        async def work(call: Call) -> exchange_pb2.JoinExchangeResponse:
            answers: Sequence[exchange_pb2.JoinExchangeResponse] = await self._on_all_ranks(
                request, own()
            )
            return answers[0]

        # Asleep, it may still leave.
        return await self._runtime.keyed_unary(
            request, work, on_all_ranks=False, needs_awake=bool(request.offers)
        )

    def SendWeights(
        self, request: exchange_pb2.SendWeightsRequest, context: Context
    ) -> AsyncIterator[exchange_pb2.SendWeightsResponse]:
        """UNIMPLEMENTED; the actor's servicer has it."""
        raise UnsupportedError("this service only takes weights: the actor sends them")

    def _first_rank(self, plan: Plan) -> int:
        """Number of this service's rank 0 within an exchange."""
        return len(plan.source.ranks)

    async def _on_all_ranks(self, request: Message, own: Awaitable[Any]) -> Sequence[Any]:
        """Answers by rank, once all ranks have ended it. Beside calls, which may take minutes."""
        face = self._runtime.process.face
        if face is None:
            return [await own]
        mine, others = await all_ended([own, face.beside(request)])
        return [mine, *others]


class GivingExchangeServicer(ExchangeServicer):
    """ExchangeService of a trained role, which also sends its weights."""

    def __init__(self, role: Any, runtime: Runtime) -> None:
        super().__init__(role, runtime)
        self._trained: ModelRole = role

    def _first_rank(self, plan: Plan) -> int:
        return 0

    def SendWeights(
        self, request: exchange_pb2.SendWeightsRequest, context: Context
    ) -> AsyncIterator[exchange_pb2.SendWeightsResponse]:
        """See exchange.proto."""

        async def own(call: Call) -> exchange_pb2.SendWeightsResult:
            ends = {name: self._role.exchanges.get(name) for name in request.exchanges}
            with call.phase("send"):
                failures, num_bytes = await watched(
                    call.compute(self._send, ends),
                    call,
                    "send weights",
                    [end for end in ends.values() if end is not None],
                )
            for name in failures:
                await self._role.exchanges.leave(name)
            return exchange_pb2.SendWeightsResult(
                failures=failures, report=call.report({"weights_sent_bytes": num_bytes}, 0)
            )

        async def work(call: Call) -> exchange_pb2.SendWeightsResult:
            face = self._runtime.process.face
            answers = (
                [await own(call)]
                if face is None
                else await face.everywhere(request, lambda: own(call))
            )
            result = join_answers(answers)
            for answer in answers:
                result.failures.update(answer.failures)
            result.report.metrics["weights_sent_bytes"] = sum(
                answer.report.metrics["weights_sent_bytes"] for answer in answers
            )
            return result

        return self._runtime.keyed(
            request, exchange_pb2.SendWeightsResponse, work, on_all_ranks=False
        )

    def _send(self, ends: dict[str, ExchangeEnd | None]) -> tuple[dict[str, str], int]:
        """Sends over exchanges; says which have failed, and the bytes. On the compute thread."""
        trainer = self._trained.trainer
        weights, version = dict(trainer.named_weights()), trainer.policy_version
        failures: dict[str, str] = {}
        num_bytes = 0
        for name, end in ends.items():
            if end is None:
                failures[name] = (
                    f"rank {self._runtime.process.config.rank} of the actor is not in it"
                )
                continue
            before = end.sent_bytes
            try:
                end.send(weights, policy_version=version)
            except TransferMismatchError as error:
                # Weights that have changed since they were published: the takers fetch those.
                logger.warning("exchange %s: nothing was sent: %s", name, error)
            except (ManifestError, TransferFailedError) as error:
                failures[name] = str(error)
            num_bytes += end.sent_bytes - before
        return failures, num_bytes
