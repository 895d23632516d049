"""Updates of a rollout service's sampler: fetched at once, loaded in flight or in their turn.

Where there are several ranks, the face tells them of an update twice. First beside the call that
has the turn: they fetch, and a generation that runs takes the weights between two steps. Then in
the turn of the update, unless all ranks hold the weights by then: only there may ranks that
generate nothing load, since no other call can come between on some of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any, Protocol

from rolemesh.engine.layout.manifest import DtypeName, Manifest, ManifestError
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.weights.exchanges.published import Taking
from rolemesh.engine.weights.transfer import TransferMismatchError
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.together import together
from rolemesh.services.rollout.deliveries import Deliveries, Delivery
from rolemesh.services.runtime.calls.runtime import Call, Runtime
from rolemesh.services.runtime.experience.published_weights import (
    FetchedBoxes,
    dtype_of,
    fetch_boxes,
    layout_of,
    manifest_of,
    probe_of,
)
from rolemesh.services.runtime.ranks.face import Face, join_answers
from rolemesh.services.runtime.server.operations import Identity, identity_of
from rolemesh.services.runtime.servicers.weights.exchange_ends import Exchanges
from rolemesh.v1 import rollout_pb2, weights_pb2

logger = logging.getLogger(__name__)

_AHEAD = ".ahead"
"""Ends the operation of an update that a rank is told of beside its generation."""

_LOOK_S = 0.5
"""How often an update that waits for the sampler looks whether it was given up."""


class TakingRole(Protocol):
    """What an update needs of a role."""

    @property
    def deliveries(self) -> Deliveries:
        """Where weights go; raises NOT_INITIALIZED before Initialize."""

    exchanges: Exchanges
    """Of this rank, with the actor."""

    def plan(self, manifest: Manifest, train: TrainLayout, dtype: DtypeName) -> Taking:
        """What this rank takes of published weights."""


class WeightUpdates:
    """Updates of one rank, or, on the face, of the service. Owner: the loop.

    Invariant: updates take effect in the order in which they came, however long each one travels.
    """

    def __init__(self, role: TakingRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime
        self._turn = asyncio.Lock()
        self._arriving: tuple[Identity, asyncio.Task[Delivery]] | None = None
        """The newest update that the face told of, and its fetch."""

    async def whole(
        self, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        """An update of the service, on its face.

        Raises:
            RolemeshError: As UpdateWeights says.
        """
        async with self._turn:
            face = self._runtime.process.face
            if face is None:
                result = await self._alone(request, call)
            else:
                result = await self._on_all_ranks(face, request, call)
        # Nothing else was fetched, by any rank.
        report = result.report
        report.metrics["weight_sync_bytes"] = sum(report.fetched_bytes.values())
        return result

    async def ahead(
        self, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        """An update that the face has told this rank of beside a generation.

        Returns once the sampler holds the weights, in flight or in the turn of the update.

        Raises:
            InvalidRequestError: REQUEST_INVALID: this rank is the face.
            RolemeshError: What kept this rank from it.
        """
        if self._runtime.is_face:
            raise InvalidRequestError(
                "ahead is true, which only rank 0 of a service says to its other ranks: leave it "
                "out",
                reason="REQUEST_INVALID",
            )
        return await self._ahead(request, call)

    async def in_turn(
        self, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        """The turn of an update, on every rank; the answer is that of `ahead`.

        Raises:
            RolemeshError: What kept this rank, or another one, from it.
        """
        delivery = await self._arrival(request, call)
        try:
            # Not by the call, which would refuse what was given up, and leave the others waiting.
            await self._runtime.compute.run(self._role.deliveries.load, delivery)
        except BaseException:
            self._forget(request)
            raise
        return rollout_pb2.UpdateWeightsResult()

    async def _alone(
        self, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        """Of one rank, where the turn of an update is its place on the compute thread."""
        delivery = await self._bring(request, call)
        _count_bytes(delivery, call)
        deliveries = self._role.deliveries
        with call.phase("load"):
            deliveries.put(delivery)
            loaded: asyncio.Future[Any] = asyncio.wrap_future(delivery.loaded)
            turn: asyncio.Future[Any] = asyncio.ensure_future(
                call.compute(deliveries.load, delivery)
            )
            try:
                await asyncio.wait({loaded, turn}, return_when=asyncio.FIRST_COMPLETED)
                if not loaded.done():
                    # It is being loaded, or the turn was refused because the service drains.
                    await turn
                await loaded
            finally:
                # A turn that has not come is of no more use.
                turn.cancel()
                loaded.cancel()
                deliveries.give_up(delivery)
                await asyncio.gather(turn, loaded, return_exceptions=True)
        return _result(delivery, call)

    async def _on_all_ranks(
        self, face: Face, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        """Of several ranks: whichever is first, the generations that run or the turn."""
        has_begun = False

        def begin() -> Any:
            nonlocal has_begun
            # Before any rank is asked: those that are wait for each other.
            call.progress("load")
            has_begun = True
            return self.in_turn(request, call)

        ahead = asyncio.create_task(self._ahead_on_all_ranks(face, request, call))
        turn = asyncio.create_task(face.everywhere(request, begin))
        try:
            await asyncio.wait({ahead, turn}, return_when=asyncio.FIRST_COMPLETED)
            if not has_begun and ahead.done() and (call.is_abandoned or not ahead.exception()):
                return ahead.result()
            # In their turn all ranks tell each other how it went.
            await turn
            return await ahead
        finally:
            for task in (ahead, turn):
                task.cancel()
            await asyncio.gather(ahead, turn, return_exceptions=True)

    async def _ahead_on_all_ranks(
        self, face: Face, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        message = rollout_pb2.UpdateWeightsRequest()
        message.CopyFrom(request)
        message.ahead = True
        message.key.operation += _AHEAD
        own, others = await asyncio.gather(self._ahead(request, call), face.beside(message))
        joined: rollout_pb2.UpdateWeightsResult = join_answers([own, *others])
        failures = (answer.exchange_failure for answer in (own, *others))
        joined.exchange_failure = next(filter(None, failures), "")
        return joined

    async def _ahead(
        self, request: rollout_pb2.UpdateWeightsRequest, call: Call
    ) -> rollout_pb2.UpdateWeightsResult:
        delivery = await self._arrival(request, call)
        _count_bytes(delivery, call)
        deliveries = self._role.deliveries
        deliveries.put(delivery)
        loaded: asyncio.Future[Any] = asyncio.wrap_future(delivery.loaded)
        try:
            with call.phase("load"):
                while not loaded.done():
                    call.progress("wait for the sampler")
                    await asyncio.wait({loaded}, timeout=_LOOK_S)
                await loaded
        except BaseException:
            self._forget(request)
            raise
        finally:
            loaded.cancel()
            deliveries.give_up(delivery)
        return _result(delivery, call)

    async def _arrival(self, request: rollout_pb2.UpdateWeightsRequest, call: Call) -> Delivery:
        """What this rank fetches for an update, once, whichever message of the face is first."""
        identity = _identity(request)
        if self._arriving is None or self._arriving[0] != identity:
            task = asyncio.create_task(self._bring(request, call))
            self._arriving = (identity, task)
        return await asyncio.shield(self._arriving[1])

    def _forget(self, request: rollout_pb2.UpdateWeightsRequest) -> None:
        """Has a repeat of an update that failed fetch anew."""
        if self._arriving is not None and self._arriving[0] == _identity(request):
            self._arriving = None

    async def _bring(self, request: rollout_pb2.UpdateWeightsRequest, call: Call) -> Delivery:
        """Brings this rank's weights here: over the exchange that is named, or by fetching.

        Each rank decides for itself: both ways bring the same bits.
        """
        version, failure = request.weights.policy_version, ""
        probe = probe_of(request.weights)
        if request.exchange:
            try:
                with call.phase("fetch"):
                    received = await self._receive(request.exchange, version, call)
                    return replace(received, probe=probe)
            except TransferMismatchError as error:
                logger.warning("exchange %s: nothing was received: %s", request.exchange, error)
            except TransferFailedError as error:
                failure = (
                    f"rank {self._runtime.process.config.rank} of the rollout service: {error}"
                )
                logger.warning("exchange %s has ended: %s", request.exchange, error)
            except Exception as error:
                return Delivery(version, error=error)
        fetched = await self._fetch(request.weights, call)
        return replace(fetched, exchange_failure=failure, probe=probe)

    async def _receive(self, exchange: str, version: int, call: Call) -> Delivery:
        exchanges = self._role.exchanges
        end = exchanges.get(exchange)
        before = 0 if end is None else end.received_bytes
        end, tensors = await exchanges.receive(exchange, version, call)
        num_bytes: dict[str, int] = {end.way: end.received_bytes - before}
        return Delivery(version, received=tensors, fetched_bytes=num_bytes)

    async def _fetch(self, ref: weights_pb2.WeightsRef, call: Call) -> Delivery:
        """Brings this rank's boxes here, while the compute thread goes on.

        An error is part of the delivery: the ranks agree on it where they load.
        """
        version = ref.policy_version
        try:
            with call.phase("fetch"):
                taking = self._plan(ref)
                fetched = await self._fetch_all(ref, taking, call)
        except Exception as error:
            return Delivery(version, error=error)
        num_bytes: Counter[str] = Counter()
        for found in fetched.values():
            num_bytes[found.transport] += found.num_bytes
        return Delivery(version, taking, fetched, num_bytes)

    def _plan(self, ref: weights_pb2.WeightsRef) -> Taking:
        if ref.policy_version < 0:
            raise InvalidRequestError(
                f"weights.policy_version is {ref.policy_version}: give a reference of "
                "PublishWeights",
                reason="REFERENCE_INVALID",
            )
        try:
            return self._role.plan(
                manifest_of(ref), layout_of(ref), dtype_of(ref.dtype, "weights.dtype")
            )
        except ManifestError as error:
            raise InvalidRequestError(str(error), reason="MANIFEST_MISMATCH") from error

    async def _fetch_all(
        self, ref: weights_pb2.WeightsRef, taking: Taking, call: Call
    ) -> dict[int, FetchedBoxes]:
        """From all publishers at once; the first failure cancels the rest and is raised."""
        done = 0

        async def fetch(source: int) -> FetchedBoxes:
            nonlocal done
            address = ref.addresses[source]
            found = await fetch_boxes(
                self._runtime.process.peer(address),
                ref,
                source,
                taking.copies[source],
                self._runtime.process.host_id,
            )
            self._runtime.process.count_pulled(address, found.transport, found.num_bytes)
            done += 1
            call.progress("fetch weights", done, len(taking.copies))
            return found

        found = await together(fetch(source) for source in taking.copies)
        return dict(zip(taking.copies, found, strict=True))


def _identity(request: rollout_pb2.UpdateWeightsRequest) -> Identity:
    """The same for both messages of the face about one update."""
    run_id, epoch, step, operation, sequence = identity_of(request.key)
    return run_id, epoch, step, operation.removesuffix(_AHEAD), sequence


def _count_bytes(delivery: Delivery, call: Call) -> None:
    for transport, num_bytes in delivery.fetched_bytes.items():
        call.add_fetched(transport, num_bytes)


def _result(delivery: Delivery, call: Call) -> rollout_pb2.UpdateWeightsResult:
    return rollout_pb2.UpdateWeightsResult(
        policy_version=delivery.policy_version,
        report=call.report({}, 0),
        exchange_failure=delivery.exchange_failure,
    )
