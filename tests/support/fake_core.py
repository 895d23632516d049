"""Base of every fake role: it notes a call, holds it, fails it, and answers it once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from grpc_status import rpc_status
from support.fake_models import PROMPT_TOKENS

from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.rpc.errors import PreconditionError, RolemeshError, to_status
from rolemesh.rpc.limits import HIGHEST_EPOCH
from rolemesh.v1 import (
    cuts_pb2_grpc,
    data_pb2_grpc,
    exchange_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2_grpc,
    operation_pb2,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    tensor_pb2,
    trainer_pb2_grpc,
    value_pb2_grpc,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

if TYPE_CHECKING:
    from support.fake_roles import FakeMesh

Work = Callable[[], Message]
"""Makes the result."""
Events = Callable[[], AsyncIterator[Message]]
"""Makes messages of the stream before the result, and the result last."""


def manifest_digest(folder: Path) -> str:
    """Hash of a checkpoint's manifest, as a role tells it."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


@dataclass(eq=False, repr=False)
class FakeCore(
    worker_pb2_grpc.WorkerServiceServicer,
    experience_pb2_grpc.ExperienceServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    logprob_pb2_grpc.LogprobServiceServicer,
    value_pb2_grpc.ValueServiceServicer,
    reward_pb2_grpc.RewardServiceServicer,
    data_pb2_grpc.DataServiceServicer,
    exchange_pb2_grpc.ExchangeServiceServicer,
    weights_pb2_grpc.WeightsServiceServicer,
    cuts_pb2_grpc.CutServiceServicer,
):
    """A service's state, and the life of a keyed call."""

    service: str
    mesh: FakeMesh
    weight: float = 0.0
    policy_version: int = 0
    address: str = ""
    run_id: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    operation: str = ""
    is_asleep: bool = False
    failures: dict[str, RolemeshError] = field(default_factory=dict)
    """By method: raised instead of an answer."""
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """By method, or by method and step ("Update 2"): the call waits until the event is set."""
    block_gates: dict[int, asyncio.Event] = field(default_factory=dict)
    """By number of a block: Generate waits before it sends it."""
    rows_dropped: int = 0
    """Rows that ComputeReward and Generate leave out."""
    cancelled: list[str] = field(default_factory=list)
    """Methods whose call was cancelled by the client."""
    released_through: int = -1
    highest_epoch: int = 0
    drained_epoch: int = 0
    """Of the coordinator that gave the service back."""
    sees: Sequence[str] = ("cpu",)
    """Devices that its capabilities name."""
    device_type: str = ""
    """What the last initialisation asked for; so the next."""
    deterministic: bool = False
    devices: list[worker_pb2.DeviceUse] = field(default_factory=list)
    """What it says of its devices."""
    _answers: dict[tuple[Any, ...], Message] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The role that the service is one of."""
        return role_of(self.service)

    async def refuse(self, context: Any, error: RolemeshError) -> NoReturn:
        """Answers with an error, as the runtime of a service does."""
        if context is None:
            # Called within the process: see fake_in_process.
            error.metadata |= {"role": self.role, "rank": "0"}
            raise error
        status = to_status(error, metadata={"role": self.role, "rank": "0"})
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("an aborted call does not go on")

    async def keyed(
        self,
        method: str,
        request: Any,
        context: Any,
        response_type: Any,
        work: Work | None = None,
        events: Events | None = None,
    ) -> AsyncIterator[Any]:
        """The life of a keyed call, whose result `work` makes, or `events` with what precedes."""
        from support.fake_roles import CallRecord

        key, mesh, name = request.key, self.mesh, f"{self.service}.{method}"
        identity = (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)
        record = CallRecord(self.service, method, identity, request)
        mesh.calls.append(record)
        mesh.log.append(f"{name} begins")
        self.operation = key.operation
        try:
            yield response_type(progress=operation_pb2.Progress(stage="count", done=1, total=2))
            mesh.running.add(name)
            mesh.most_together = max(mesh.most_together, len(mesh.running))
            try:
                for gate in (method, f"{method} {key.step}"):
                    if gate in self.gates:
                        await self.gates[gate].wait()
                seconds = mesh.delay(self.service, method)
                if seconds and events is None:
                    await asyncio.sleep(seconds)
                if method in self.failures:
                    raise self.failures[method]
                self._check(key, method, needs_awake=not getattr(request, "from_cut", False))
                reported = mesh.reported(name, key)
                if identity not in self._answers:
                    if work is not None:
                        self._answers[identity] = work()
                    else:
                        assert events is not None
                        async for event in events():
                            if isinstance(event, response_type):
                                yield event
                            else:
                                self._answers[identity] = event
                    if reported:
                        self._answers[identity].report.metrics.update(reported)
            finally:
                mesh.running.discard(name)
            record.state = "done"
            mesh.log.append(f"{name} ends")
            yield response_type(result=self._answers[identity])
        except RolemeshError as error:
            record.state = "failed"
            await self.refuse(context, error)
        finally:
            self.operation = ""
            if record.state == "running":
                # Cancelled within the call, or closed while a message of it was being sent.
                record.state = "cancelled"
                self.cancelled.append(method)

    def _check(self, key: operation_pb2.OperationKey, method: str, *, needs_awake: bool) -> None:
        if key.fencing_epoch < self.highest_epoch:
            raise PreconditionError(
                "a newer coordinator has taken over",
                reason="STALE_EPOCH",
                metadata={HIGHEST_EPOCH: str(self.highest_epoch)},
            )
        if self.is_asleep and needs_awake and method not in ("Initialize", "Attach"):
            raise PreconditionError(f"the {self.role} is asleep: wake it first", reason="ASLEEP")
        self.highest_epoch = key.fencing_epoch

    def publish(
        self, key: operation_pb2.OperationKey, columns: dict[str, list[Any]], suffix: str = ""
    ) -> experience_pb2.ExperienceRef:
        """Keeps columns and names them."""
        experience_id = f"{self.service}/{key.step}/{key.operation}/{key.sequence}{suffix}"
        self.mesh.columns[self.address, experience_id] = columns
        num_rows = len(next(iter(columns.values())))
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
            num_rows=num_rows,
            address=self.address,
            role=self.role,
            num_bytes=8 * num_rows,
        )
        return experience_pb2.ExperienceRef(
            run_id=key.run_id,
            step=key.step,
            num_rows=num_rows,
            groups=[experience_pb2.ColumnGroup(columns=schemas, shards=[shard])],
        )

    def report(self, num_rows: int, **metrics: float) -> experience_pb2.CallReport:
        """A call over so many rows; "a__b" is the metric "a/b"."""
        half = duration_pb2.Duration(nanos=1_000_000)
        return experience_pb2.CallReport(
            metrics={name.replace("__", "/"): value for name, value in metrics.items()},
            phases=[experience_pb2.PhaseTime(phase="compute", duration=half)],
            num_tokens=num_rows * (PROMPT_TOKENS + self.mesh.tokens_per_completion),
            fetched_bytes={"grpc": 8 * num_rows},
        )

    def experience(
        self, request: Any, columns: dict[str, list[Any]], **metrics: float
    ) -> experience_pb2.ExperienceResult:
        """A result that holds columns."""
        reference = self.publish(request.key, columns)
        return experience_pb2.ExperienceResult(
            experience=reference, report=self.report(reference.num_rows, **metrics)
        )
