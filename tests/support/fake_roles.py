"""Four roles as real gRPC servers on loopback, with one-number models and no torch.

The policy is one weight w, the critic one bias b. A completion of the policy is a number,
w plus a small offset that depends on prompt and sample; its reward is 1 - |1 - number|. Training
moves w towards 1 by a fixed stride and b by half the mean advantage. `expected_weight` says what w
has to be, as an oracle. Rows lie in one dictionary that the roles of a mesh share: how rows travel
is the runtime's matter and is tested there.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2, json_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_status import rpc_status

from rolemesh.coordinator.recipe import Recipe
from rolemesh.coordinator.samplers import ROLLOUT_COLUMNS
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import PreconditionError, RolemeshError, to_status
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2,
    logprob_pb2_grpc,
    operation_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tensor_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

STRIDE = 0.125
"""How far one update moves the policy; a power of two, so that sums are exact."""
PROMPT_TOKENS = 4
FAMILIES = ("Worker", "Experience", "Rollout", "Trainer", "Logprob", "Value", "Reward", "Weights")


def completion(weight: float, prompt: int, sample: int) -> float:
    """The number that the fake policy answers with; offsets are multiples of 1/64."""
    return weight + ((prompt * 3 + sample) % 5) / 64


def reward_of(number: float) -> float:
    """1 for the number 1, less the farther away."""
    return 1 - abs(1 - number)


def expected_weight(steps: int) -> float:
    """The policy's weight after so many updates, while every completion lies below 1."""
    return steps * STRIDE


@dataclass(frozen=True)
class CallRecord:
    """One keyed call as a fake saw it."""

    role: str
    method: str
    key: tuple[str, int, int, str, int]
    """(run_id, fencing_epoch, step, operation, sequence)."""
    request: Message


@dataclass(eq=False, repr=False)
class FakeRole(
    worker_pb2_grpc.WorkerServiceServicer,
    experience_pb2_grpc.ExperienceServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    logprob_pb2_grpc.LogprobServiceServicer,
    value_pb2_grpc.ValueServiceServicer,
    reward_pb2_grpc.RewardServiceServicer,
    weights_pb2_grpc.WeightsServiceServicer,
):
    """One role's server. Faults are set from the test: `failures`, `gates`."""

    role: str
    mesh: FakeMesh
    weight: float = 0.0
    policy_version: int = 0
    address: str = ""
    run_id: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    operation: str = ""
    failures: dict[str, RolemeshError] = field(default_factory=dict)
    """By method: raised instead of an answer."""
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """By method: the call waits until the event is set."""
    cancelled: list[str] = field(default_factory=list)
    """Methods whose call was cancelled by the client."""
    released_through: int = -1
    highest_epoch: int = 0
    _answers: dict[tuple[Any, ...], Message] = field(default_factory=dict)
    _server: grpc.aio.Server | None = None

    async def start(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health = health_aio.HealthServicer()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        experience_pb2_grpc.add_ExperienceServiceServicer_to_server(self, server)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        logprob_pb2_grpc.add_LogprobServiceServicer_to_server(self, server)
        value_pb2_grpc.add_ValueServiceServicer_to_server(self, server)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Ends at once: calls in flight break off, as when the process is killed."""
        if self._server is not None:
            await self._server.stop(None)

    async def _keyed(
        self,
        method: str,
        request: Any,
        context: grpc.aio.ServicerContext,
        response_type: Any,
        work: Callable[[], Message],
    ) -> AsyncIterator[Any]:
        key = request.key
        identity = (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)
        self.mesh.calls.append(CallRecord(self.role, method, identity, request))
        self.operation = key.operation
        try:
            yield response_type(progress=operation_pb2.Progress(stage="count", done=1, total=2))
            self.mesh.running.add(f"{self.role}.{method}")
            self.mesh.most_together = max(self.mesh.most_together, len(self.mesh.running))
            try:
                if method in self.gates:
                    await self.gates[method].wait()
            finally:
                self.mesh.running.discard(f"{self.role}.{method}")
            if method in self.failures:
                raise self.failures[method]
            if key.fencing_epoch < self.highest_epoch:
                raise PreconditionError("a newer coordinator has taken over", reason="STALE_EPOCH")
            self.highest_epoch = key.fencing_epoch
            if identity not in self._answers:
                self._answers[identity] = work()
            yield response_type(result=self._answers[identity])
        except asyncio.CancelledError:
            self.cancelled.append(method)
            raise
        except RolemeshError as error:
            status = to_status(error, metadata={"role": self.role, "rank": "0"})
            await context.abort_with_status(rpc_status.to_status(status))
        finally:
            self.operation = ""

    def _publish(
        self, key: operation_pb2.OperationKey, rows: list[float], columns: tuple[str, ...]
    ) -> experience_pb2.ExperienceRef:
        experience_id = f"{self.role}/{key.step}/{key.operation}/{key.sequence}"
        self.mesh.rows[experience_id] = rows
        schemas = [
            experience_pb2.ColumnSchema(
                name=name,
                kind=experience_pb2.COLUMN_KIND_COMPLETION,
                dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            )
            for name in columns
        ]
        shard = experience_pb2.Shard(
            experience_id=experience_id,
            num_rows=len(rows),
            address=self.address,
            role=self.role,
            num_bytes=8 * len(rows),
        )
        return experience_pb2.ExperienceRef(
            run_id=key.run_id,
            step=key.step,
            num_rows=len(rows),
            groups=[experience_pb2.ColumnGroup(columns=schemas, shards=[shard])],
        )

    def _rows(self, reference: experience_pb2.ExperienceRef, column: str) -> list[float]:
        for group in reference.groups:
            if any(schema.name == column for schema in group.columns):
                return self.mesh.rows[group.shards[0].experience_id]
        raise AssertionError(f"{self.role} was sent no column {column!r}")

    def _report(self, num_rows: int, **metrics: float) -> experience_pb2.CallReport:
        half = duration_pb2.Duration(nanos=1_000_000)
        return experience_pb2.CallReport(
            metrics={name.replace("__", "/"): value for name, value in metrics.items()},
            phases=[experience_pb2.PhaseTime(phase="compute", duration=half)],
            num_tokens=num_rows * (PROMPT_TOKENS + self.mesh.tokens_per_completion),
            fetched_bytes={"grpc": 8 * num_rows},
        )

    def _experience(
        self, request: Any, rows: list[float], columns: tuple[str, ...], **metrics: float
    ) -> experience_pb2.ExperienceResult:
        return experience_pb2.ExperienceResult(
            experience=self._publish(request.key, rows, columns),
            report=self._report(len(rows), **metrics),
        )

    # --- WorkerService, ExperienceService ---

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        return worker_pb2.GetCapabilitiesResponse(
            role=self.role,
            services=[f"rolemesh.v1.{family}Service" for family in FAMILIES],
            world_size=1,
            accepts_references=True,
            versions={"fake": "1"},
        )

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if "GetStatus" in self.gates:
            await self.gates["GetStatus"].wait()
        state = worker_pb2.WORKER_STATE_BUSY if self.operation else worker_pb2.WORKER_STATE_READY
        return worker_pb2.GetStatusResponse(state=state, operation=self.operation)

    async def Drain(self, request: Any, context: Any) -> Any:
        assert request.run_id == self.run_id
        assert request.fencing_epoch == self.highest_epoch
        self.run_id = ""
        return worker_pb2.DrainResponse()

    async def Initialize(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            self.run_id = request.key.run_id
            self.spec = json_format.MessageToDict(request.spec)
            return worker_pb2.InitializeResult(
                num_parameters=1, facts={"data.held_out_prompts": str(self.mesh.num_held_out)}
            )

        async for response in self._keyed(
            "Initialize", request, context, worker_pb2.InitializeResponse, work
        ):
            yield response

    async def Release(self, request: Any, context: Any) -> Any:
        if "Release" in self.failures:
            status = to_status(self.failures["Release"], metadata={"role": self.role, "rank": "0"})
            await context.abort_with_status(rpc_status.to_status(status))
        assert request.fencing_epoch == self.highest_epoch
        self.released_through = request.through_step
        return experience_pb2.ReleaseResponse()

    # --- sampling and judging ---

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            prompts = request.prompts
            rows = [
                completion(self.weight, prompt, sample)
                for prompt in range(prompts.start, prompts.start + prompts.count)
                for sample in range(request.sampling.samples_per_prompt)
            ]
            length = float(self.mesh.tokens_per_completion)
            result = self._experience(
                request, rows, ROLLOUT_COLUMNS, completion_length__mean=length
            )
            sync = duration_pb2.Duration(nanos=2_000)
            result.report.phases.append(
                experience_pb2.PhaseTime(phase="weight_sync", duration=sync)
            )
            return result

        async for response in self._keyed(
            "Generate", request, context, rollout_pb2.GenerateResponse, work
        ):
            yield response

    async def ComputeValues(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rows = [self.weight for _ in self._rows(request.experience, "tokens")]
            return self._experience(request, rows, ("values",))

        async for response in self._keyed(
            "ComputeValues", request, context, value_pb2.ComputeValuesResponse, work
        ):
            yield response

    async def ComputeLogprobs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rows = [-0.5 for _ in self._rows(request.experience, "tokens")]
            return self._experience(request, rows, (request.column,))

        async for response in self._keyed(
            "ComputeLogprobs", request, context, logprob_pb2.ComputeLogprobsResponse, work
        ):
            yield response

    async def ComputeReward(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rows = [reward_of(number) for number in self._rows(request.experience, "tokens")]
            error = statistics.stdev(rows) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
            return self._experience(
                request,
                rows,
                ("rewards",),
                reward__mean=statistics.fmean(rows),
                reward__standard_error=error,
            )

        async for response in self._keyed(
            "ComputeReward", request, context, reward_pb2.ComputeRewardResponse, work
        ):
            yield response

    # --- training ---

    async def ComputeAdvantages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rewards = self._rows(request.experience, "rewards")
            values = self._rows(request.experience, "values")
            rows = [reward - value for reward, value in zip(rewards, values, strict=True)]
            return self._experience(
                request, rows, ("advantages", "returns", "token_rewards"), kl__mean=0.25
            )

        async for response in self._keyed(
            "ComputeAdvantages", request, context, trainer_pb2.ComputeAdvantagesResponse, work
        ):
            yield response

    async def Update(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            if request.expected_policy_version != self.policy_version:
                raise PreconditionError(
                    f"the weights are at {self.policy_version}", reason="VERSION_MISMATCH"
                )
            if self.role == "actor":
                numbers = self._rows(request.experience, "tokens")
                self._rows(request.experience, "advantages")
                self.weight += STRIDE * statistics.fmean(
                    math.copysign(1, 1 - number) for number in numbers
                )
            else:
                advantages = self._rows(request.experience, "returns")
                self.weight += 0.5 * statistics.fmean(advantages)
                numbers = advantages
            self.policy_version += request.epochs * math.ceil(
                len(numbers) / request.mini_batch_rows
            )
            only_actor = {"entropy": 1.5} if self.role == "actor" else {}
            return trainer_pb2.UpdateResult(
                policy_version=self.policy_version,
                report=self._report(len(numbers), grad_norm=0.5, **only_actor),
            )

        async for response in self._keyed(
            "Update", request, context, trainer_pb2.UpdateResponse, work
        ):
            yield response

    def _written(self, directory: str) -> weights_pb2.CheckpointResult:
        folder = Path(directory)
        folder.mkdir(parents=True)
        (folder / "weight.json").write_text(json.dumps({"weight": self.weight}))
        return weights_pb2.CheckpointResult(
            policy_version=self.policy_version, num_bytes=1, manifest_sha256="ab" * 32
        )

    async def SaveCheckpoint(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._keyed(
            "SaveCheckpoint",
            request,
            context,
            weights_pb2.SaveCheckpointResponse,
            lambda: self._written(request.directory),
        ):
            yield response

    async def Export(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._keyed(
            "Export",
            request,
            context,
            weights_pb2.ExportResponse,
            lambda: self._written(request.directory),
        ):
            yield response


@dataclass
class FakeMesh:
    """The four fakes, and what they saw."""

    tokens_per_completion: int = 8
    num_held_out: int = 16
    roles: dict[str, FakeRole] = field(default_factory=dict)
    rows: dict[str, list[float]] = field(default_factory=dict)
    calls: list[CallRecord] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    """Calls in flight, as "role.Method"."""
    most_together: int = 0

    @property
    def addresses(self) -> dict[str, str]:
        return {role: fake.address for role, fake in self.roles.items()}

    def methods(self, step: int) -> list[str]:
        """Calls of a step in the order in which they arrived, as "role.Method"."""
        return [f"{call.role}.{call.method}" for call in self.calls if call.key[2] == step]


@asynccontextmanager
async def fake_mesh(**settings: Any) -> AsyncIterator[FakeMesh]:
    """Starts the fakes and stops them."""
    mesh = FakeMesh(**settings)
    for role in ("actor", "critic", "reference", "reward"):
        mesh.roles[role] = FakeRole(role=role, mesh=mesh)
        await mesh.roles[role].start()
    try:
        yield mesh
    finally:
        for fake in mesh.roles.values():
            await fake.stop()


def fake_recipe(**run: Any) -> Recipe:
    """A recipe that the fakes can run.

    Args:
        **run: Fields of the run section; `pools` and `services` are sections of their own.
    """
    sections = {name: run.pop(name) for name in ("pools", "services") if name in run}
    model = {"path": "/models/none"}
    values: dict[str, Any] = {
        "run": {
            "name": "fake",
            "steps": 4,
            "prompts_per_step": 3,
            "evaluation": {"num_prompts": 8},
            **run,
        },
        "algorithm": {
            "type": "ppo",
            "sampling": {"samples_per_prompt": 2},
            "advantages": {"kl_in_reward": {"type": "fixed"}},
            "mini_batch_rows": 4,
        },
        "actor": {
            "model": model,
            "rollout": {"type": "hf"},
            "data": {"type": "jsonl", "path": "/data/none.jsonl"},
        },
        "critic": {"model": model},
        "reference": {"model": model},
        "reward": {"source": {"type": "arithmetic"}},
        "store": {"type": "memory"},
        **sections,
    }
    return Recipe.model_validate(values)


async def until(claim: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Returns once the claim holds; the test's own timeout bounds the wait."""
    while True:
        holds = claim()
        if isinstance(holds, Awaitable):
            holds = await holds
        if holds:
            return
        await asyncio.sleep(0.005)
