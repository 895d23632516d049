"""Base of all calls to a service, and the calls of its life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from google.protobuf import json_format, struct_pb2

from rolemesh.coordinator.sdk.experience import (
    Report,
    Update,
)
from rolemesh.coordinator.sdk.services import Capabilities, Initialized, Status
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import InternalError
from rolemesh.v1 import (
    operation_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

Answer = TypeVar("Answer")


class CallingMesh(Protocol):
    """What a service needs of its mesh: the run that it speaks for, keys, and calls."""

    run_id: str
    epoch: int
    step: int

    def new_key(self, operation: str) -> operation_pb2.OperationKey:
        """A key that was never used, for an operation of the current step."""
        ...

    async def call(self, method: Callable[..., Awaitable[Answer]], request: Any) -> Answer:
        """The answer of a call, repeated with the same request while its peer does not answer."""
        ...


class ServiceCalls:
    """The life of a service, and what its calls share; see AsyncRole."""

    def __init__(
        self, mesh: CallingMesh, name: str, channel: MeshChannel, policy_version: int | None
    ) -> None:
        """Prepares; made by the mesh."""
        self.name = name
        """Name of the service, e.g. "actor" or "rollout-1"."""
        self.address = channel.address
        self.policy_version = policy_version
        """Version of its weights as last heard; None before."""
        self._mesh = mesh
        self._channel = channel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r} at {self.address})"

    # --- life ---

    async def capabilities(self) -> Capabilities:
        """What it can do."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        return Capabilities.of(
            await self._mesh.call(stub.GetCapabilities, worker_pb2.GetCapabilitiesRequest())
        )

    async def status(self) -> Status:
        """How it is right now; also tells it that the run goes on."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        request = worker_pb2.GetStatusRequest(run_id=self._mesh.run_id)
        status = Status.of(await self._mesh.call(stub.GetStatus, request))
        if status.run_id == self._mesh.run_id:
            self.policy_version = status.policy_version
        return status

    async def initialize(self, spec: Mapping[str, Any], run_seed: int = 0) -> Initialized:
        """Gives it its part of the run: models and data.

        Args:
            spec: The role's section of a recipe.
            run_seed: 0 <= run_seed < 2^53.
        """
        request = worker_pb2.InitializeRequest(
            key=self._new_key("initialize"), spec=to_struct(spec), run_seed=run_seed
        )
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        result = await self._streamed(stub.Initialize, request)
        self.policy_version = result.policy_version
        facts = MappingProxyType(dict(result.facts))
        return Initialized(result.policy_version, result.num_parameters, facts)

    async def sleep(self) -> int:
        """Moves its weights off the device; returns the bytes that became free."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        request = worker_pb2.SleepRequest(key=self._new_key("sleep"))
        freed: int = (await self._mesh.call(stub.Sleep, request)).freed_bytes
        return freed

    async def wake(self) -> int:
        """Brings its weights back; returns the bytes in use again."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        request = worker_pb2.WakeRequest(key=self._new_key("wake"))
        restored: int = (await self._mesh.call(stub.Wake, request)).restored_bytes
        return restored

    async def drain(self, *, exit: bool = False) -> None:
        """Lets it finish and forget the run, or end its process with `exit`."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        request = worker_pb2.DrainRequest(
            exit=exit, run_id=self._mesh.run_id, fencing_epoch=self._mesh.epoch
        )
        await self._mesh.call(stub.Drain, request)

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
        return Update(result.policy_version, Report.of(result.report))

    async def _streamed(self, method: Callable[..., Any], request: Any) -> Any:
        """The last message of a call that tells its progress before."""

        async def follow(asked: Any, **how: Any) -> Any:
            result = None
            async with aclosing(aiter(method(asked, **how))) as messages:
                async for message in messages:
                    event = message.WhichOneof("event")
                    if event not in (None, "progress"):
                        result = getattr(message, event)
            if result is None:
                raise InternalError(f"{self.name} at {self.address} gave no result")
            return result

        return await self._mesh.call(follow, request)


def to_struct(fields: Mapping[str, Any]) -> struct_pb2.Struct:
    """Fields as they travel.

    Raises:
        ValueError: A value is nothing that JSON has.
    """
    try:
        return json_format.ParseDict(dict(fields), struct_pb2.Struct())
    except json_format.ParseError as error:
        raise ValueError(f"the fields {dict(fields)!r} cannot travel: {error}") from error
