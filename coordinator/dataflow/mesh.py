"""The services of one run: met, given their part of the run, told what they may drop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

from rolemesh.coordinator.dataflow.calls.connection import (
    OnPhase,
    OpenChannel,
    RoleConnection,
    open_watched,
    unbroken,
)
from rolemesh.coordinator.dataflow.calls.endpoints import base_url
from rolemesh.coordinator.dataflow.errors import NodeFailedError, ServiceLostError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import (
    PreconditionError,
    RolemeshError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.rpc.members.identity import Identity
from rolemesh.rpc.together import together
from rolemesh.v1 import operation_pb2, worker_pb2

TRAINED_ROLES = ("actor", "critic")
"""Roles whose weights always change: they have a part in a checkpoint."""

_SAME_TIME_S = 1.0
"""Services whose waits end within this time are lost together: looks at them are 0.2 s apart."""

_NOT_ATTACHABLE = ("NOT_INITIALIZED", "RUN_MISMATCH", "SPEC_CHANGED", "NOT_WHOLE")
"""Reasons why a service has to be initialised, though it may have held the run before."""


class RunMesh:
    """Connections to the services of a run, by their names. Owner: the coordinator's loop."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        services: Iterable[str],
        journal: Journal,
        observer: RunObserver,
        traffic: ChannelTraffic | None = None,
        *,
        identity: Identity | None = None,
        open_channel: OpenChannel = open_watched,
        is_reward_trained: bool = False,
    ) -> None:
        """Opens channels; nothing is sent yet.

        Args:
            addresses: "host:port" by name of the service.
            services: Services of the roles that the algorithm asks for.
            journal: Names what is asked of them.
            observer: Is told how far they are.
            traffic: Counters to add to; None makes fresh ones.
            identity: Of the coordinator; None where the services speak in clear.
            open_channel: Opens a channel to a service.
            is_reward_trained: Whether the weights of the reward change, too.
        """
        self._journal = journal
        self.traffic = traffic or ChannelTraffic()
        self._identity = identity
        self._open_channel = open_channel
        self.connections = {
            service: RoleConnection(
                service, addresses[service], self.traffic, identity, open_channel
            )
            for service in services
        }
        self.facts: dict[str, Mapping[str, str]] = {}
        """What each service said when it was initialised, by its name."""
        self.fresh: set[str] = set()
        """Services that have loaded their models just now; the others held the run before."""
        self.replaceable: frozenset[str] = frozenset()
        """Services that may be replaced while a step goes on."""
        self._observer = observer
        self._is_reward_trained = is_reward_trained

    @property
    def trained(self) -> list[RoleConnection]:
        """The connections of the roles whose weights change."""
        roles = (*TRAINED_ROLES, "reward") if self._is_reward_trained else TRAINED_ROLES
        return [known for known in self.connections.values() if known.role in roles]

    async def meet(self, deadlines_s: Mapping[str, float]) -> None:
        """Returns once every service answers and can stand in for its role.

        Args:
            deadlines_s: Longest wait for each service, in seconds, by its name.

        Raises:
            ServiceLostError: One does not answer in time, or several do not.
            RunError: One is another role.
        """
        lost: dict[str, str] = {}

        async def one(connection: RoleConnection) -> None:
            self._observer.on_phase(connection.service, "start", 0, 0)
            try:
                await connection.wait_healthy(deadlines_s[connection.service])
            except ServiceLostError as error:
                lost[error.role] = error.cause
                # Else each of several would cost an attempt with such a wait.
                await asyncio.sleep(_SAME_TIME_S)
                raise
            await connection.learn_capabilities()

        try:
            await together(one(connection) for connection in self.connections.values())
        except ServiceLostError as error:
            error.others = {name: cause for name, cause in lost.items() if name != error.role}
            raise

    async def initialize(self, recipe: Recipe) -> None:
        """Gives every service its section of the recipe, side by side.

        A service that holds this run already, of an attempt before, keeps its models. Roles that
        share devices and leave them for each other are loaded one after another.

        Raises:
            RolemeshError: A service refuses or fails.
        """
        sleepers = [
            [known for known in self.connections.values() if known.role in pool.roles]
            for pool in recipe.pools.values()
            if pool.lets_roles_sleep
        ]
        in_turn = {known.service for roles in sleepers for known in roles}
        await together(
            (
                *(self._initialize_in_turn(roles, recipe) for roles in sleepers),
                *(
                    self._initialize(connection, recipe)
                    for service, connection in self.connections.items()
                    if service not in in_turn
                ),
            )
        )

    async def _initialize_in_turn(
        self, connections: Sequence[RoleConnection], recipe: Recipe
    ) -> None:
        for connection in connections:
            await self._initialize(connection, recipe)
            await self.sleep(connection.service, 0)

    async def sleep(self, service: str, step: int) -> None:
        """Has a service move what it holds to host memory."""
        key = self._journal.next_key(step, f"{service}.sleep")
        await self._moved(service, "sleep", step, lambda client: client.sleep(key))

    async def wake(self, service: str, step: int) -> None:
        """Has a service bring what it holds back to its devices."""
        key = self._journal.next_key(step, f"{service}.wake")
        await self._moved(service, "wake", step, lambda client: client.wake(key))

    async def _moved(
        self, service: str, move: str, step: int, call: Callable[[ServiceClient], Awaitable[object]]
    ) -> None:
        connection = self.connections[service]

        async def once() -> None:
            client = connection.client
            # Nothing is left of a lost process, and the next one is awake once it has loaded.
            if not connection.is_present:
                return
            try:
                await call(client)
            except RolemeshError:
                if connection.is_present and client is connection.client:
                    raise

        self._observer.on_phase(service, move, 0, 0)
        try:
            await unbroken(once)
        except RolemeshError as error:
            # By itself it would look like a failure of the node that needs the devices.
            raise NodeFailedError(f"{service}.{move}", step, service, error) from error
        finally:
            self._observer.on_phase(service, "", 0, 0)

    async def replace(
        self,
        service: str,
        address: str,
        recipe: Recipe,
        deadline_s: float,
        step: int,
        room: AbstractAsyncContextManager[None],
        prepare: Callable[[RoleConnection, OnPhase], Awaitable[None]],
    ) -> None:
        """Puts a new process in the place of one that is lost, and gives it the run.

        Args:
            service: One of `replaceable`.
            address: "host:port" of the new process.
            recipe: Of the run.
            deadline_s: Longest wait for its first answer, in seconds.
            step: Steps committed. Each replacement has a key of its own: a service of others may
                still be the process that knows the key of its first Initialize.
            room: Holds the service's devices for it.
            prepare: Gives the process what the lost one had beside its models, before the calls
                that wait for it go on.

        Raises:
            RunError: It does not answer in time, or cannot stand in for the role.
            RolemeshError: It refuses or fails.
        """
        async with self._met(service, address, deadline_s) as new, room:
            await self._load(new, recipe, "replace", step)
            await prepare(new, self._observer.on_phase)
            self.connections[service].replace(new)

    async def loaded(
        self, service: str, address: str, recipe: Recipe, deadline_s: float, step: int
    ) -> RoleConnection:
        """A service that may `join`: it has been given the run, while others go on.

        Args:
            service: Its name.
            address: Its "host:port".
            recipe: Of the run.
            deadline_s: Longest wait for its first answer, in seconds.
            step: Steps committed.

        Raises:
            RunError: It does not answer in time, or cannot stand in for the role.
            RolemeshError: It refuses or fails.
        """
        async with self._met(service, address, deadline_s) as new:
            new.may_leave = True
            await self._load(new, recipe, "join", step)
        return new

    @asynccontextmanager
    async def _met(
        self, service: str, address: str, deadline_s: float
    ) -> AsyncIterator[RoleConnection]:
        """The connection to a new process, which answers; it is closed where the block fails."""
        new = RoleConnection(service, address, self.traffic, self._identity, self._open_channel)
        try:
            await new.wait_healthy(deadline_s)
            await new.learn_capabilities()
            yield new
        except BaseException:
            await new.close()
            raise

    def join(self, connection: RoleConnection) -> None:
        """Takes a service in, between two steps."""
        self.connections[connection.service] = connection
        self.replaceable |= {connection.service}

    async def drop(self, service: str) -> None:
        """Lets a service go that has left, between two steps."""
        self.replaceable -= {service}
        await self.connections.pop(service).close()

    async def attach(self, recipe: Recipe) -> bool:
        """Goes on with services that hold the run; False where one does not.

        Raises:
            RolemeshError: A service fails.
        """
        known = self.connections.values()
        return all(await together(self._attach(connection, recipe) for connection in known))

    async def initialize_again(self, recipe: Recipe, services: Iterable[str]) -> None:
        """Has services load the models of the recipe once more, whatever they hold.

        Raises:
            RolemeshError: A service refuses or fails.
        """
        await together(
            self._load(self.connections[service], recipe, "initialize", 0) for service in services
        )

    async def _initialize(self, connection: RoleConnection, recipe: Recipe) -> None:
        # Before its second epoch no service can hold the run.
        if self._journal.epoch == 1 or not await self._attach(connection, recipe):
            await self._load(connection, recipe, "initialize", 0)

    async def _attach(self, connection: RoleConnection, recipe: Recipe) -> bool:
        """Goes on with a service that holds the run; False where it has to be initialised."""
        key = self._journal.next_key(0, f"{connection.service}.attach")
        try:
            await self._taken(connection, recipe, key, "attach")
        except UnsupportedError:
            return False
        except PreconditionError as error:
            if error.reason not in _NOT_ATTACHABLE:
                raise
            return False
        return True

    async def _load(
        self, connection: RoleConnection, recipe: Recipe, operation: str, step: int
    ) -> None:
        service = connection.service
        key = self._journal.next_key(step, f"{service}.{operation}")
        result = await self._taken(connection, recipe, key, "initialize")
        self.fresh.add(service)
        size = result.num_parameters
        self._observer.on_event(f"{service} is ready" + (f", {size:,} parameters" if size else ""))
        gpus = [one for one in connection.capabilities.devices if one.startswith("cuda")]
        if gpus and recipe.has_model(connection.role) and not recipe.wants_gpu(connection.role):
            self._observer.on_event(
                f"caution: {service} computes on {gpus[0]}, though its pool in the recipe has the "
                "devices [cpu]; name GPUs there, or start it with CUDA_VISIBLE_DEVICES= to leave "
                "the GPU alone"
            )

    async def _taken(
        self,
        connection: RoleConnection,
        recipe: Recipe,
        key: operation_pb2.OperationKey,
        stage: Literal["attach", "initialize"],
    ) -> worker_pb2.InitializeResult:
        """Makes a call that ends with the service holding the run."""
        spec = recipe.sent_spec(connection.role)
        device_type = "cuda" if recipe.wants_gpu(connection.role) else ""

        async def call(on_progress: ProgressCallback) -> worker_pb2.InitializeResult:
            client = connection.client
            if stage == "attach":
                begun = client.attach(key, spec, recipe.run.seed)
            else:
                begun = client.initialize(
                    key,
                    spec,
                    recipe.run.seed,
                    device_type=device_type,
                    deterministic=recipe.run.deterministic,
                )
            return await begun.result(on_progress)

        def note(result: worker_pb2.InitializeResult) -> dict[str, int]:
            connection.policy_version = result.policy_version
            self.facts[connection.service] = dict(result.facts)
            connection.endpoint = base_url(result.facts.get("endpoint", ""), connection.address)
            return {"policy_version": result.policy_version}

        return await connection.make(
            key, stage, call, note, journal=self._journal, on_phase=self._observer.on_phase
        )

    async def release(self, through_step: int) -> None:
        """Drops the experience of this step and earlier ones, wherever it is held."""
        run_id, epoch = self._journal.run_id, self._journal.epoch
        await self.unless_lost(
            lambda client: client.release(run_id, epoch, through_step=through_step),
            (
                connection
                for connection in self.connections.values()
                if connection.serves("rolemesh.v1.ExperienceService")
            ),
        )

    async def unless_lost(
        self,
        call: Callable[[ServiceClient], Awaitable[object]],
        connections: Iterable[RoleConnection],
    ) -> None:
        """Has services let something go. One that is lost, and will be replaced, holds nothing.

        Args:
            call: Made of each.
            connections: Of the services.

        Raises:
            RolemeshError: A service failed, or one that cannot be replaced is lost.
        """

        async def one(connection: RoleConnection) -> None:
            if not connection.is_present or connection.has_left:
                return
            try:
                await call(connection.client)
            except UnavailableError:
                if connection.service not in self.replaceable:
                    raise

        await together(one(connection) for connection in connections)

    async def give_back(self, services: Iterable[str], timeout_s: float) -> None:
        """Lets services that outlive the run take part in another one.

        A service that does not say so in time is named to the observer: the run has ended already,
        and a service that still computes frees itself afterwards.
        """
        run_id, epoch = self._journal.run_id, self._journal.epoch

        async def one(connection: RoleConnection) -> None:
            try:
                await connection.client.within(timeout_s).drain(run_id, epoch)
            except RolemeshError as error:
                self._observer.on_event(
                    f"{connection.service} at {connection.address} may not be free: {error.message}"
                )

        await together(one(self.connections[service]) for service in services)

    async def close(self) -> None:
        """Lets the channels go."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))
