"""Base of scripted servers of another make: plumbing, a life within runs, experience.

It does each of these right, but for the faults that it is told to have.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from rolemesh.coordinator.compliance.held_rows import HeldRows
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    DataLossError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
    to_status,
)
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import ColumnData, Columns, encode
from rolemesh.v1 import (
    experience_pb2,
    operation_pb2,
    worker_pb2,
)

CHUNK_BYTES = 1 << 20
GIANT_BYTES = 3 << 20


class OutsiderCore:
    """One server. `faults` are names that the code looks up."""

    families: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Services that make each role what it is."""

    def __init__(self, role: str, *faults: str, inline: bool = False) -> None:
        self.role = role
        self.faults = set(faults)
        self.inline = inline
        """Whether it is a reward that serves RewardService and nothing else."""
        self.address = ""
        self.run_id = ""
        self.is_asleep = False
        self.version = 0
        self._epochs: dict[str, int] = {}
        self._answers: dict[tuple[Any, ...], tuple[bytes, asyncio.Task[Any]]] = {}
        self._held = HeldRows()
        self._ids = itertools.count()
        self._channels: dict[str, MeshChannel] = {}
        self._server: grpc.aio.Server | None = None

    def has(self, fault: str) -> bool:
        return fault in self.faults

    async def start(self) -> str:
        server = grpc.aio.server()
        services = [f"rolemesh.v1.{name}" for name in self.families[self.role]]
        for name in self.families[self.role]:
            self._add(server, name, getattr(self, f"_{name}"))
        if not self.inline:
            services += ["rolemesh.v1.WorkerService"]
            services += [] if self.has("claims_less") else ["rolemesh.v1.ExperienceService"]
            self._add(server, "WorkerService", self._WorkerService)
            self._add(server, "ExperienceService", self._ExperienceService)
        health = health_aio.HealthServicer()
        if not self.has("no_health"):
            health_pb2_grpc.add_HealthServicer_to_server(health, server)
        shown = [] if self.has("no_reflection") else services
        reflection.enable_server_reflection((*shown, reflection.SERVICE_NAME), server)
        self.services = services
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        status = health_pb2.HealthCheckResponse.SERVING
        if self.has("unhealthy"):
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set("", status)
        self._server, self.address = server, f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        if self._server is not None:
            await self._server.stop(None)

    # --- plumbing --------------------------------------------------------------------------

    def _add(self, server: grpc.aio.Server, name: str, handlers: Any) -> None:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"rolemesh.v1.{name}", handlers()),)
        )

    def _unary(self, request_type: Any, behaviour: Callable[[Any], Awaitable[Any]]) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            try:
                await self._check_deadline(context)
                return await behaviour(request)
            except RolemeshError as error:
                await self._abort(context, error)

        return grpc.unary_unary_rpc_method_handler(
            serve, request_type.FromString, lambda message: message.SerializeToString()
        )

    def _stream(self, request_type: Any, behaviour: Callable[[Any], AsyncIterator[Any]]) -> Any:
        async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                await self._check_deadline(context)
                async for message in behaviour(request):
                    yield message
            except RolemeshError as error:
                await self._abort(context, error)

        return grpc.unary_stream_rpc_method_handler(
            serve, request_type.FromString, lambda message: message.SerializeToString()
        )

    async def _check_deadline(self, context: Any) -> None:
        if context.time_remaining() is None:
            if self.has("waits_for_ever"):
                await asyncio.sleep(3600)
            raise InvalidRequestError("give a deadline", reason="DEADLINE_MISSING")

    async def _abort(self, context: Any, error: RolemeshError) -> None:
        if self.has("plain_errors"):
            await context.abort(error.code, error.message)
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    def _fence(self, run_id: str, epoch: int) -> None:
        if epoch < self._epochs.get(run_id, 0) and not self.has("no_epochs"):
            raise PreconditionError("an older epoch", reason="STALE_EPOCH")
        self._epochs[run_id] = epoch

    async def _keyed(self, request: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        key = request.key
        if not 1 <= len(key.run_id) <= 128 or key.fencing_epoch < 1:
            raise InvalidRequestError("the key is out of range", reason="KEY_INVALID")
        self._fence(key.run_id, key.fencing_epoch)
        if self.has("forgetful"):
            return await work()
        identity = (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)
        digest = request.SerializeToString(deterministic=True)
        if identity not in self._answers:
            self._answers[identity] = digest, asyncio.create_task(_awaited(work()))
        known, task = self._answers[identity]
        if known != digest:
            raise InvalidRequestError("the key was used", reason="KEY_REUSED")
        try:
            return await asyncio.shield(task)
        except RolemeshError:
            self._answers.pop(identity, None)
            raise

    async def _streamed(
        self, request: Any, response: Any, work: Callable[[], Awaitable[Any]], field: str = "result"
    ) -> AsyncIterator[Any]:
        if self.has("hangs"):
            await asyncio.sleep(3600)
        while self.has("floods"):
            yield response(progress=operation_pb2.Progress(stage="still there"))
        if self.has("dies"):
            asyncio.get_running_loop().create_task(self.stop())
            await asyncio.sleep(3600)
        if self.has("raises"):
            raise ZeroDivisionError("a fault of the outsider")
        self._check_ready(request)
        result = await self._keyed(request, work)
        yield response(progress={"stage": "work", "done": 1, "total": 1})
        if self.has("no_result"):
            return
        yield response(**{field: result})
        if self.has("two_results"):
            yield response(**{field: result})
        if self.has("progress_after_result"):
            yield response(progress={"stage": "done"})

    def _check_ready(self, request: Any) -> None:
        if self.inline or not request.key.run_id:
            return
        if not self.run_id:
            raise PreconditionError("call Initialize first", reason="NOT_INITIALIZED")
        if self.run_id != request.key.run_id:
            raise PreconditionError("another run", reason="RUN_MISMATCH")
        if self.is_asleep:
            raise PreconditionError("asleep", reason="ASLEEP")

    # --- WorkerService ---------------------------------------------------------------------

    def _WorkerService(self) -> dict[str, Any]:
        return {
            "GetCapabilities": self._unary(
                worker_pb2.GetCapabilitiesRequest, self._get_capabilities
            ),
            "GetStatus": self._unary(worker_pb2.GetStatusRequest, self._get_status),
            "Initialize": self._stream(worker_pb2.InitializeRequest, self._initialize),
            "Sleep": self._unary(worker_pb2.SleepRequest, self._sleep),
            "Wake": self._unary(worker_pb2.WakeRequest, self._wake),
            "Drain": self._unary(worker_pb2.DrainRequest, self._drain),
        }

    async def _get_capabilities(self, request: Any) -> Any:
        lies = ["rolemesh.v1.DataService"] if self.has("lying_capabilities") else []
        return worker_pb2.GetCapabilitiesResponse(
            role="actor" if self.has("wrong_role") else self.role,
            services=[*self.services, *lies],
            world_size=0 if self.has("no_ranks") else 1,
            chunk_bytes=CHUNK_BYTES,
            experience_capacity_bytes=1 << 30,
            accepts_references=not self.has("pulls_nothing"),
            spec_schema_json=json.dumps({"type": "object", "additionalProperties": False}),
        )

    async def _get_status(self, request: Any) -> Any:
        state = worker_pb2.WORKER_STATE_READY if self.run_id else worker_pb2.WORKER_STATE_IDLE
        if self.has("never_ready"):
            state = worker_pb2.WORKER_STATE_IDLE
        return worker_pb2.GetStatusResponse(
            state=state, run_id=self.run_id, policy_version=self.version
        )

    async def _initialize(self, request: Any) -> AsyncIterator[Any]:
        async def work() -> Any:
            unknown = sorted(json_format.MessageToDict(request.spec))
            if unknown and not self.has("takes_any_spec"):
                raise InvalidRequestError(f"unknown field {unknown[0]}", reason="SPEC_INVALID")
            if self.run_id not in ("", request.key.run_id) and not self.has("takes_any_run"):
                raise PreconditionError("held", reason="ALREADY_INITIALIZED")
            self.run_id = request.key.run_id
            return worker_pb2.InitializeResult(facts={"number": str(next(self._ids))})

        result = await self._keyed(request, work)
        yield worker_pb2.InitializeResponse(progress=operation_pb2.Progress(stage="load"))
        yield worker_pb2.InitializeResponse(result=result)

    async def _sleep(self, request: Any) -> Any:
        self.is_asleep = not self.has("sleepless")
        return worker_pb2.SleepResponse()

    async def _wake(self, request: Any) -> Any:
        self.is_asleep = False
        return worker_pb2.WakeResponse()

    async def _drain(self, request: Any) -> Any:
        if request.run_id and not self.has("drained_by_anybody"):
            self._fence(request.run_id, request.fencing_epoch)
            if self.run_id not in ("", request.run_id):
                raise PreconditionError("another run", reason="RUN_MISMATCH")
        if not self.has("never_forgets_run"):
            self.run_id = ""
        if not self.has("never_forgets"):
            self._held.clear()
        return worker_pb2.DrainResponse()

    # --- ExperienceService -----------------------------------------------------------------

    def _ExperienceService(self) -> dict[str, Any]:
        return {
            "Fetch": self._stream(experience_pb2.FetchRequest, self._fetch),
            "Release": self._unary(experience_pb2.ReleaseRequest, self._release),
        }

    async def _fetch(self, request: Any) -> AsyncIterator[Any]:
        if request.experience_id not in self._held and self.has("makes_up_experience"):
            request.experience_id = next(iter(self._held), "")
        if self.has("sorts_rows"):
            request.rows[:] = sorted(request.rows)
        header, chunks = self._held.fetched(request)
        payload = b"".join(chunks)
        if self.has("giant_chunks"):
            payload = payload.ljust(GIANT_BYTES, b"\0")
            header.num_bytes = len(payload)
        if self.has("shares_memory"):
            header.shared_memory_name = "outsider"
        size = GIANT_BYTES if self.has("giant_chunks") else CHUNK_BYTES
        parts = [experience_pb2.FetchResponse(header=header)]
        parts += [
            experience_pb2.FetchResponse(chunk=payload[at : at + size])
            for at in range(0, len(payload), size)
        ]
        for part in reversed(parts) if self.has("header_last") else parts:
            yield part

    async def _release(self, request: Any) -> Any:
        if request.fencing_epoch:
            self._fence(request.run_id, request.fencing_epoch)
        freed = 0
        for experience_id in request.experience_ids:
            if self.has("keeps_released"):
                continue
            columns = self._held.pop(experience_id, None)
            freed += 0 if columns is None else encode(columns)[0].num_bytes
        return experience_pb2.ReleaseResponse(released_bytes=freed)

    def _publish(
        self, key: Any, columns: Columns, rows: Sequence[int] | None = None
    ) -> experience_pb2.ExperienceRef:
        ref = self._held.refer(
            columns,
            key.run_id,
            key.step,
            role=self.role,
            address=self.address,
            shards=[rows] if rows else (),
        )
        if rows is not None and not rows:
            del ref.groups[:]
        for group in ref.groups:
            group.shards[0].num_rows -= self.has("loses_a_row")
            if rows and self.has("counts_from_zero"):
                group.shards[0].row_start = 0
                group.shards[0].rows[:] = range(len(rows))
        return ref

    async def _pull(self, given: Any, names: Sequence[str]) -> Columns:
        ref = experience_pb2.ExperienceRef()
        ref.CopyFrom(given)
        if self.has("ignores_shard_rows"):
            at = 0
            for shard in ref.groups[0].shards:
                del shard.rows[:]
                shard.row_start, at = at, at + shard.num_rows

        def channel_to(address: str) -> MeshChannel:
            if address not in self._channels:
                self._channels[address] = open_channel(address)
            return self._channels[address]

        try:
            return await fetch_columns(channel_to, ref, names)
        except DataLossError:
            if not self.has("fills_up"):
                raise
            empty = ColumnData.text([""] * ref.num_rows)
            return Columns(dict.fromkeys(names, empty))
        except RolemeshError as error:
            if self.has("hides_its_peer"):
                raise CapacityError("something went wrong", reason="OOPS") from error
            raise


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
