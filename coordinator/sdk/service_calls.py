"""Base of all calls to a service, and the calls of its life."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from rolemesh.coordinator.sdk.retrying import RetryPolicy, repeated
from rolemesh.coordinator.sdk.values.experience import Report, Update
from rolemesh.coordinator.sdk.values.experts import LayerLoads
from rolemesh.coordinator.sdk.values.messages import from_message
from rolemesh.coordinator.sdk.values.services import Capabilities, Initialized, Status
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import CallCancelledError
from rolemesh.v1 import operation_pb2

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class RunCalls:
    """What services need of their mesh: the run that they speak for, keys, and calls."""

    def __init__(
        self, run_id: str, epoch: int, step: int, deadline_s: float | None, retry: RetryPolicy
    ) -> None:
        """Prepares; arguments as of AsyncMesh."""
        self.run_id = run_id
        self.epoch = epoch
        self.step = step
        """The step that calls belong to, which services give experience and draws by."""
        self.deadline_s: Final = deadline_s
        """Longest time of one call; None: that of its method."""
        self._retry = retry
        self._numbers = itertools.count()
        self._is_closed = False

    def new_key(self, operation: str) -> operation_pb2.OperationKey:
        """A key that was never used, for an operation of the current step."""
        return operation_pb2.OperationKey(
            run_id=self.run_id,
            fencing_epoch=self.epoch,
            step=self.step,
            operation=operation,
            sequence=next(self._numbers),
        )

    async def call(
        self,
        method: Callable[Arguments, Awaitable[Answer]],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The answer of a call, repeated with the same arguments while its peer does not answer."""

        async def once() -> Answer:
            if self._is_closed:
                raise CallCancelledError("the mesh is closed: make another one")
            return await method(*args, **kwargs)

        return await repeated(self._retry, once)


class ServiceCalls:
    """The life of a service, and what its calls share; see AsyncRole."""

    def __init__(
        self, mesh: RunCalls, name: str, channel: MeshChannel, policy_version: int | None
    ) -> None:
        """Prepares; made by the mesh."""
        self.name = name
        """Name of the service, e.g. "actor" or "rollout-1"."""
        self.address = channel.address
        self.policy_version = policy_version
        """Version of its weights as last heard; None before."""
        self._mesh = mesh
        self._call = mesh.call
        self._client = ServiceClient(channel, mesh.deadline_s, name=name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r} at {self.address})"

    # --- life ---

    async def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities.of(await self._call(self._client.get_capabilities))

    async def status(self) -> Status:
        """How it is right now; also tells it that the run goes on."""
        status = Status.of(await self._call(self._client.get_status, self._mesh.run_id))
        if status.run_id == self._mesh.run_id:
            self.policy_version = status.policy_version
        return status

    async def initialize(self, spec: Mapping[str, Any], run_seed: int = 0) -> Initialized:
        """Gives it its part of the run: models and data.

        Args:
            spec: The role's section of a recipe.
            run_seed: 0 <= run_seed < 2^53.
        """
        key = self._new_key("initialize")
        result = await self._call(self._client.initialize, key, spec, run_seed)
        self.policy_version = result.policy_version
        return from_message(Initialized, result)

    async def attach(self, spec: Mapping[str, Any], run_seed: int = 0) -> Initialized:
        """Takes the run over that it holds, under the epoch of this mesh; loads nothing.

        What older epochs made is dropped, but for the weights.

        Args:
            spec: As initialize gave it.
            run_seed: As initialize gave it.
        """
        key = self._new_key("attach")
        result = await self._call(self._client.attach, key, spec, run_seed)
        self.policy_version = result.policy_version
        return from_message(Initialized, result)

    async def sleep(self) -> int:
        """Moves its weights off the device; returns the bytes that became free."""
        return (await self._call(self._client.sleep, self._new_key("sleep"))).freed_bytes

    async def wake(self) -> int:
        """Brings its weights back; returns the bytes in use again."""
        return (await self._call(self._client.wake, self._new_key("wake"))).restored_bytes

    async def drain(self, *, exit: bool = False) -> None:
        """Lets it finish and forget the run, or end its process with `exit`."""
        await self._call(self._client.drain, self._mesh.run_id, self._mesh.epoch, exit=exit)

    # --- what calls share ---

    def _new_key(self, operation: str) -> operation_pb2.OperationKey:
        """A key that was never used."""
        return self._mesh.new_key(f"{self.name}.{operation}")

    async def _expected_version(self, version: int | None) -> int:
        """The version to expect: what the caller says, or what was last heard."""
        if version is not None:
            return version
        if self.policy_version is None:
            return (await self.status()).policy_version
        return self.policy_version

    def _updated(self, result: Any) -> Update:
        """What changed weights, noted."""
        self.policy_version = result.policy_version
        # A sampler that takes weights has trained nothing, and its answer has no such field.
        loads = LayerLoads.of(getattr(result, "expert_loads", ()))
        return Update(result.policy_version, Report.of(result.report), loads)
