"""Exchanges between the actor and rollout services: who is in one, and who uses it when.

Weights are sent and taken by two calls at the same time. Neither waits long for the other: a take
that finds no sender fetches what was published, as it does without an exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.calls.role_calls import StepContext
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError
from rolemesh.rpc.experience.tensors import data_type_of
from rolemesh.rpc.together import all_ended
from rolemesh.v1 import exchange_pb2, operation_pb2

PAIR_S = 2.0
"""How long a sender and a taker of the same weights wait for each other. Both become possible at
the same time; then either may have to wait for its pool."""

SERVICE = "rolemesh.v1.ExchangeService"
"""Family of calls that both ends of an exchange serve."""

LEAVE_S = 5.0
"""How long a service may take to leave an exchange. One that does not is not waited for."""

OnEvent = Callable[[str], None]
"""Is told what is worth a line."""


class Pairing:
    """Where the sender of some weights meets those who take them. Owner: one asyncio loop.

    Invariant: a taker that has been given to the sender is told an exchange, or that there is none;
    another one is told after PAIR_S that there is none.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._expected = set(services)
        """Takers that have not come yet."""
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    async def exchange_for(self, service: str) -> str:
        """For a taker: the name of the exchange by which its weights come; "" for none."""
        if self._is_over:
            return ""
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[service] = told
        self._expected.discard(service)
        self._changed.set()
        try:
            await asyncio.wait({told}, timeout=PAIR_S)
            if service not in self._waiting:
                return await told
            return ""
        finally:
            if self._waiting.get(service) is told:
                del self._waiting[service]

    async def takers(self) -> Mapping[str, asyncio.Future[str]]:
        """For the sender: who waits by now, or comes soon; each is to be told."""
        deadline = asyncio.get_running_loop().time() + PAIR_S
        while self._expected and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        self._is_over = True
        takers, self._waiting = self._waiting, {}
        return takers


@dataclass(frozen=True, slots=True)
class _Exchange:
    service: str
    name: str
    taker: ServiceClient
    """The process that is in it; its successor is not."""


class WeightExchanges:
    """The exchanges of one attempt. Owner: the coordinator's loop.

    Invariant: a sender and a taker are told of an exchange only after all ranks of both services
    have joined it. One that has failed is not used again; the next process of a service, and the
    next attempt, meet anew.
    """

    def __init__(self, recipe: Recipe, dtype: str, on_event: OnEvent) -> None:
        """Prepares; nothing is asked yet.

        Args:
            recipe: With an actor and rollout services.
            dtype: Element type in which weights travel.
            on_event: Is told how weights go to each service.
        """
        self._dtype = data_type_of(dtype)
        self._actor_layout = recipe.layout("actor").as_texts()
        self._rollout_layout = recipe.layout("rollout").as_texts()
        self._on_event = on_event
        # Who sleeps has left its exchanges.
        self._is_lasting = not any(map(recipe.sleeps, ("actor", "rollout")))
        self._held: dict[str, _Exchange] = {}
        """By service."""
        self._ended: list[_Exchange] = []
        """What is used no more, but may still take memory."""
        self._given_up: dict[str, ServiceClient] = {}
        """Services whose process is asked no more."""
        self._told: set[str] = set()
        """Services of which an event said that they are in an exchange."""
        self._num_meetings = 0

    async def pair(self, context: StepContext, pairing: Pairing) -> list[str]:
        """Brings the sender and its takers together; names the exchanges by which to send.

        Raises:
            PreconditionError: STALE_EPOCH.
        """
        takers = await pairing.takers()
        names: dict[str, str] = {}
        try:
            ended, self._ended = self._ended, []
            for one in ended:
                await self._leave(context, one)
            for service in takers:
                names[service] = await self._name_for(context, context.connections[service])
        except BaseException:
            # Nothing will be sent.
            names.clear()
            raise
        finally:
            for service, told in takers.items():
                if not told.done():
                    told.set_result(names.get(service, ""))
        return [name for name in names.values() if name]

    def sent(self, failures: Mapping[str, str]) -> None:
        """Told how a sending went: exchanges that have failed, and why."""
        for one in tuple(self._held.values()):
            if one.name in failures:
                self._give_up(one.service, one.taker, failures[one.name])

    def taken(self, service: str, client: ServiceClient, failure: str) -> None:
        """Told why a process has fetched the weights that were to come by its exchange."""
        if service in self._held and self._held[service].taker is client:
            self._give_up(service, client, failure)

    async def _name_for(self, context: StepContext, connection: RoleConnection) -> str:
        """The exchange that a service is in, after a meeting where it is in none."""
        service, client = connection.service, connection.client
        held = self._held.get(service)
        if held is not None and held.taker is client and self._is_lasting:
            return held.name
        if held is not None:
            await self._leave(context, self._held.pop(service))
        if self._given_up.get(service) is client:
            return ""
        return await self._meet(context, connection)

    async def _meet(self, context: StepContext, connection: RoleConnection) -> str:
        """Has the ranks of the actor and of a service join; "" where they cannot."""
        actor, service, client = context.connections["actor"], connection.service, connection.client
        for one in (actor, connection):
            if not one.serves(SERVICE):
                self._give_up(service, client, f"{one.service} has no {SERVICE}")
                return ""
        self._num_meetings += 1
        name = f"{service}/{context.journal.epoch}/{self._num_meetings}"
        exchange = _Exchange(service, name, client)

        def key(asked: str, method: str) -> operation_pb2.OperationKey:
            return context.journal.next_key(context.step, f"{asked}.{method}")

        def join(asked: str, of: ServiceClient) -> Awaitable[exchange_pb2.JoinExchangeResponse]:
            return of.join_exchange(key(asked, "join_exchange"), name, offers)

        try:
            theirs = await client.offer_exchange(
                key(service, "offer_exchange"), name, self._actor_layout, self._dtype
            )
            # The id of NCCL is made only now: by the actor, when the others can use it.
            ours = await actor.client.offer_exchange(
                key("actor", "offer_exchange"), name, self._rollout_layout, self._dtype, theirs.plan
            )
            offers = [*ours.offers, *theirs.offers]
            joined = await all_ended([join("actor", actor.client), join(service, client)])
        except RolemeshError as error:
            await self._leave(context, exchange)
            if error.reason == "STALE_EPOCH":
                raise
            # A service that is lost is found out elsewhere; its next process is asked.
            if not isinstance(error, UnavailableError | DeadlineError):
                self._give_up(service, client, error.message)
            return ""
        self._held[service] = exchange
        if service not in self._told:
            self._told.add(service)
            (transport,) = {one.transport for one in joined}
            self._on_event(f"weights go from the actor to {service} by {transport}")
        return name

    def _give_up(self, service: str, client: ServiceClient, why: str) -> None:
        """Leaves a process to fetching, for good."""
        self._given_up[service] = client
        if service in self._held:
            self._ended.append(self._held.pop(service))
        self._told.discard(service)
        self._on_event(f"{service} fetches weights by gRPC, not by an exchange: {why}")

    async def _leave(self, context: StepContext, exchange: _Exchange) -> None:
        """Has both ends of an exchange free its memory, as far as they are still there."""
        service = exchange.service
        clients = {"actor": context.connections["actor"].client}
        if context.connections[service].client is exchange.taker:
            clients[service] = exchange.taker
        for asked, client in clients.items():
            key = context.journal.next_key(context.step, f"{asked}.leave_exchange")
            with contextlib.suppress(RolemeshError):
                await client.within(LEAVE_S).join_exchange(key, exchange.name, ())
