"""A role's service as the coordinator sees it: its client, its version, and calls with a key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolemesh.coordinator.dataflow.errors import RunError, ServiceLeftError, ServiceLostError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.recipe.role_names import kind_of, role_of
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, open_channel
from rolemesh.rpc.errors import (
    DeadlineError,
    RolemeshError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.rpc.members.identity import Identity
from rolemesh.v1 import experience_pb2, operation_pb2, worker_pb2

Result = TypeVar("Result")

OpenChannel = Callable[[str, ChannelTraffic, Identity | None], MeshChannel]
"""Opens a channel to "host:port", with the traffic's counters and the caller's identity."""

OnPhase = Callable[[str, str, int, int], None]
"""Gets a service, its stage, units done and units in all; an empty stage when a call has ended."""

REQUIRED_SERVICES: Mapping[str, tuple[str, ...]] = {
    "actor": (
        "rolemesh.v1.ExperienceService",
        "rolemesh.v1.RolloutService",
        "rolemesh.v1.TrainerService",
        "rolemesh.v1.WeightsService",
    ),
    "critic": (
        "rolemesh.v1.ExperienceService",
        "rolemesh.v1.TrainerService",
        "rolemesh.v1.ValueService",
        "rolemesh.v1.WeightsService",
    ),
    "reference": ("rolemesh.v1.ExperienceService", "rolemesh.v1.LogprobService"),
    "teacher": ("rolemesh.v1.ExperienceService", "rolemesh.v1.LogprobService"),
    "reward": ("rolemesh.v1.RewardService",),
    "cost": ("rolemesh.v1.RewardService",),
    "rollout": ("rolemesh.v1.ExperienceService", "rolemesh.v1.RolloutService"),
}
"""What a service has to serve to stand in for a role."""

OUTAGE_S = 30.0
"""How long a call with a key is made again while its connection is broken. A service that is really
lost is found sooner: by its launcher or by the watcher."""


def open_watched(
    address: str, traffic: ChannelTraffic, identity: Identity | None = None
) -> MeshChannel:
    """Opens a channel whose peer is noticed within seconds when it is stopped or cut off."""
    return open_channel(address, traffic=traffic, is_watched=True, identity=identity)


LEAVE_S = 6.0
"""When a service that may leave refuses a call since it drains, that it leaves is known after at
most this long."""

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
_HEALTH_PAUSE_S = 0.2


class RoleConnection:
    """One service: its channel and client, and the version of its weights.

    Owner: the coordinator's loop.
    """

    def __init__(
        self,
        service: str,
        address: str,
        traffic: ChannelTraffic,
        identity: Identity | None = None,
        open_channel: OpenChannel = open_watched,
    ) -> None:
        self.service = service
        """Its name: that of the role, with a number where the role has several services."""
        self.role = role_of(service)
        self.address = address
        self.policy_version = 0
        self.endpoint = ""
        """Base URL where programs ask its policy; empty where there is none."""
        self.capabilities = worker_pb2.GetCapabilitiesResponse()
        self._channel = open_channel(address, traffic, identity)
        self.client = ServiceClient(self._channel, name=service)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._before: list[MeshChannel] = []
        """Channels to processes that were replaced: calls may still be ending on them."""
        self._present = asyncio.Event()
        self._present.set()
        self.may_leave = False
        """Whether the run goes on without it, once it `leave`s."""
        self._left = asyncio.Event()

    async def close(self) -> None:
        """Lets the channels go."""
        for channel in (*self._before, self._channel):
            await channel.close()

    @property
    def is_present(self) -> bool:
        """Whether the service is there; else it is being replaced."""
        return self._present.is_set()

    async def present(self) -> None:
        """Returns when the service is there."""
        await self._present.wait()

    def lost(self) -> None:
        """Told that the service is gone and will be replaced: calls wait for the new one."""
        self._present.clear()

    @property
    def has_left(self) -> bool:
        """Whether the service takes no part in the run any more."""
        return self._left.is_set()

    def leave(self) -> None:
        """Told that the service leaves the run: its calls end, and others make them."""
        self._left.set()

    async def _unless_it_leaves(self, call: Awaitable[Result]) -> Result:
        """The result of a call, unless the service leaves before: what it makes is gone then."""
        if not self.may_leave:
            return await call
        made, leaves = asyncio.ensure_future(call), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({made, leaves}, return_when=asyncio.FIRST_COMPLETED)
            if self.has_left:
                raise ServiceLeftError(self.service)
            return made.result()
        finally:
            made.cancel()
            leaves.cancel()
            await asyncio.gather(made, leaves, return_exceptions=True)

    async def _leaves(self, error: RolemeshError) -> bool:
        """Whether a call failed since the service leaves. It may say so before that is known."""
        if self.may_leave and error.reason == "SERVICE_DRAINING":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), LEAVE_S)
        return self.has_left

    def replace(self, new: RoleConnection) -> None:
        """Takes the place of what is gone: calls that wait go to the new service."""
        self._before.append(self._channel)
        self._channel, self.client, self._health = new._channel, new.client, new._health
        self.address, self.capabilities = new.address, new.capabilities
        self.policy_version, self.endpoint = new.policy_version, new.endpoint
        self._present.set()

    def facts(self) -> dict[str, Any]:
        """What the run's record says of it."""
        facts = {"role": self.role, "address": self.address, "policy_version": self.policy_version}
        return {**facts, "endpoint": self.endpoint} if self.endpoint else facts

    def serves(self, service: str) -> bool:
        """Whether the service has this family of calls, by full name."""
        return service in self.capabilities.services

    async def wait_healthy(self, deadline_s: float) -> None:
        """Returns when the service says that it serves.

        Raises:
            ServiceLostError: It does not within deadline_s seconds.
            RunError: It cannot.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        last = "it never answered"
        while loop.time() < deadline:
            try:
                answer = await self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S
                )
            except (UnavailableError, DeadlineError) as error:
                last = error.message
            except UnsupportedError as error:
                raise RunError(
                    f"services.{self.role}: the service at {self.address} has no standard gRPC "
                    f"health, for which a run waits: {self._as_outsider()}"
                ) from error
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                last = f"its health is {status}"
            await asyncio.sleep(_HEALTH_PAUSE_S)
        raise ServiceLostError(
            self.service,
            f"{self.role} at {self.address} did not become healthy within {deadline_s:.0f} s "
            f"({last}): see its log, or correct services.{self.role}.address",
        )

    async def learn_capabilities(self) -> None:
        """Asks what the service can do, and refuses one that cannot stand in for the role.

        Raises:
            ServiceLostError: It has ended meanwhile.
            RunError: It is another role, lacks a family of calls, or pulls no experience.
        """
        where = f"services.{self.role}: the service at {self.address}"
        try:
            self.capabilities = await self.client.get_capabilities()
        except UnsupportedError as error:
            # A server that is being stopped answers so, too.
            await self.wait_healthy(_HEALTH_TIMEOUT_S)
            raise RunError(
                f"{where} has no WorkerService, which every role serves: {self._as_outsider()}"
            ) from error
        kind = kind_of(self.role)
        if self.capabilities.role != kind:
            raise RunError(
                f"{where} is a {self.capabilities.role!r}, not a {kind!r}: correct the address"
            )
        missing = [name for name in REQUIRED_SERVICES[kind] if not self.serves(name)]
        if missing:
            raise RunError(
                f"{where} lacks {', '.join(missing)}: serve them (`rolemesh compliance "
                f"{self.address} --role {kind}` says more), or point the recipe at another service"
            )
        if not self.capabilities.accepts_references:
            raise RunError(
                f"{where} takes no references (accepts_references is false): {self._as_outsider()}"
            )

    def _as_outsider(self) -> str:
        """What to do about a service that does not pull experience by itself."""
        if self.role in ("reward", "cost"):
            return (
                f"leave services.{self.role} out and write `{self.role}: grpc://{self.address}`, "
                "and rolemesh's own reward service sends it the trajectories"
            )
        return (
            f"add what is missing (`rolemesh compliance {self.address} --role "
            f"{kind_of(self.role)}` says what), or point the recipe at another service"
        )

    async def make(
        self,
        key: operation_pb2.OperationKey,
        stage: str,
        call: Callable[[ProgressCallback], Awaitable[Result]],
        note: Callable[[Result], Mapping[str, Any]],
        *,
        journal: Journal,
        on_phase: OnPhase,
    ) -> Result:
        """Makes a call with a key: announces it, tells its progress, records that it was answered.

        A broken connection is no failure of the service: the same call is made again with the same
        key, as `unbroken` says. What it told before may be told again. Where the service is
        being replaced, the call waits for the new one.

        Args:
            key: Of the call.
            stage: What the call does, for people.
            call: Makes the call, always with the same key; gets whom to tell how far it is.
            note: Takes the result, and gives what the journal keeps of it.
            journal: Records the answer.
            on_phase: Is told how far the call is, and that it has ended.

        Raises:
            RolemeshError: The call failed, or ended without a result.
            ServiceLeftError: The service has left the run.
        """
        outage = Outage()

        async def once() -> Result:
            while True:
                if self.has_left:
                    raise ServiceLeftError(self.service)
                if not self.is_present:
                    await self.present()
                client = self.client
                try:
                    result = await self._unless_it_leaves(call(on_progress))
                    await journal.acknowledge(key, note(result))
                except RolemeshError as error:
                    if await self._leaves(error):
                        raise ServiceLeftError(self.service) from error
                    if self.is_present and client is self.client:
                        raise
                else:
                    if self.is_present and client is self.client:
                        return result
                # What a lost process has answered is lost with it: the next one is asked.
                outage.is_over()

        def on_progress(progress: operation_pb2.Progress) -> None:
            outage.is_over()
            told = f"{stage}: {progress.stage}" if progress.stage else stage
            on_phase(self.service, told, progress.done, progress.total)

        on_phase(self.service, stage, 0, 0)
        try:
            return await unbroken(once, outage)
        except RolemeshError as error:
            # A broken connection says nothing of itself; a service's own words stay.
            error.metadata.setdefault("role", self.role)
            error.metadata.setdefault("rank", str(self.capabilities.rank))
            raise
        finally:
            # Also of a failure that the run survives.
            on_phase(self.service, "", 0, 0)


class Outage:
    """For how long the connection of a call has been broken. Owner: one asyncio loop."""

    def __init__(self) -> None:
        self._ends_at: float | None = None
        self._wait_s = _FIRST_WAIT_S

    def is_over(self) -> None:
        """The service was heard."""
        self._ends_at, self._wait_s = None, _FIRST_WAIT_S

    async def wait(self) -> bool:
        """Waits until the call may be made again; False when it was broken for OUTAGE_S."""
        now = asyncio.get_running_loop().time()
        if self._ends_at is None:
            self._ends_at = now + OUTAGE_S
        if now >= self._ends_at:
            return False
        await asyncio.sleep(min(self._wait_s, self._ends_at - now))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        return True


async def unbroken(call: Callable[[], Awaitable[Result]], outage: Outage | None = None) -> Result:
    """Makes a call that carries a key, again and again while its connection is broken.

    The service's ledger gives the first answer once more, or lets the repeat join the call.

    Args:
        call: Makes the call, always with the same key.
        outage: Of this call, for a caller that hears of its progress.

    Raises:
        RolemeshError: The call failed, or its connection was broken for OUTAGE_S seconds.
    """
    outage = outage or Outage()
    while True:
        try:
            return await call()
        except UnavailableError as error:
            if not error.is_broken_connection or not await outage.wait():
                raise


def summarize_reference(reference: experience_pb2.ExperienceRef) -> dict[str, Any]:
    """What the journal keeps of a reference."""
    return {
        "num_rows": reference.num_rows,
        "experience_ids": [s.experience_id for group in reference.groups for s in group.shards],
    }
