"""Reference or teacher as an outsider writes them: from the protos alone, with his own libraries.

A program of its own: threads instead of asyncio, transformers instead of the engine. Of rolemesh
it imports the code generated from the protos and nothing else.

    python outside_reference.py ANNOUNCE_FILE reference
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from transformers import AutoModelForCausalLM

from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2,
    logprob_pb2_grpc,
    operation_pb2,
    tensor_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

CHUNK_BYTES = 1 << 20
MAX_TOP_K = 1024
FETCH_TIMEOUT_S = 60.0
SERVICES = tuple(f"rolemesh.v1.{name}Service" for name in ("Worker", "Experience", "Logprob"))
SCHEMA = {"type": "object", "properties": {"model": {"type": "object"}, "layout": {}}}

DTYPES = {
    torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
    torch.int32: tensor_pb2.DATA_TYPE_INT32,
}
READ = {tensor_pb2.DATA_TYPE_INT64: torch.int64, tensor_pb2.DATA_TYPE_UINT8: torch.uint8}
Rows = list[torch.Tensor]
"""Of a column: one number a token, [T], or k of them, [T, k]; one a row, []."""


class Refusal(Exception):
    """A status with the reason that the contract names."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def refuse(context: grpc.ServicerContext, refusal: Refusal) -> None:
    info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain="rolemesh")
    status = status_pb2.Status(code=refusal.code.value[0], message=str(refusal))
    status.details.add().Pack(info)
    context.abort_with_status(rpc_status.to_status(status))


class State:
    """What all threads share."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.lock = threading.RLock()
        self.run_id = ""
        self.model: Any = None
        self.is_asleep = False
        self.address = ""
        self._epochs: dict[str, int] = {}
        self._answers: dict[tuple[Any, ...], tuple[bytes, Any]] = {}
        self.held: dict[str, dict[str, Rows]] = {}
        self._number = itertools.count()

    def fence(self, run_id: str, epoch: int) -> None:
        if epoch < self._epochs.get(run_id, 0):
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", f"epoch {epoch} is stale"
            )
        self._epochs[run_id] = epoch

    def once(self, request: Any, work: Callable[[], Any]) -> Any:
        """The first answer of a key. One at a time: a repeat waits for the call it repeats."""
        key = request.key
        with self.lock:
            if not 1 <= len(key.run_id) <= 128 or key.fencing_epoch < 1:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "KEY_INVALID", "key is invalid")
            self.fence(key.run_id, key.fencing_epoch)
            identity = (key.run_id, key.fencing_epoch, key.step, key.operation, key.sequence)
            digest = request.SerializeToString(deterministic=True)
            if identity in self._answers:
                known, answer = self._answers[identity]
                if known != digest:
                    message = "the key was used for another request"
                    raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "KEY_REUSED", message)
                return answer
            answer = work()
            self._answers[identity] = digest, answer
            return answer

    def check_holds(self, run_id: str) -> None:
        failed = grpc.StatusCode.FAILED_PRECONDITION
        if self.model is None:
            raise Refusal(failed, "NOT_INITIALIZED", "call Initialize first")
        if run_id and run_id != self.run_id:
            raise Refusal(failed, "RUN_MISMATCH", f"run {self.run_id!r} holds this server")
        if self.is_asleep:
            raise Refusal(failed, "ASLEEP", "call Wake first")

    def publish(
        self, key: Any, columns: dict[str, Rows], rows: Sequence[int], num_rows: int
    ) -> experience_pb2.ExperienceRef:
        """Holds columns over some rows of a batch of num_rows."""
        ref = experience_pb2.ExperienceRef(run_id=key.run_id, step=key.step, num_rows=num_rows)
        if not rows:
            return ref
        experience_id = f"outside-{next(self._number)}"
        self.held[experience_id] = columns
        shard = experience_pb2.Shard(
            experience_id=experience_id,
            row_start=rows[0],
            num_rows=len(rows),
            rows=rows,
            address=self.address,
            role=self.role,
            num_bytes=num_bytes(columns),
        )
        ref.groups.add(columns=[schema(name, of) for name, of in columns.items()], shards=[shard])
        return ref


def num_bytes(columns: dict[str, Rows]) -> int:
    return sum(row.nbytes for rows in columns.values() for row in rows)


def schema(name: str, rows: Rows) -> experience_pb2.ColumnSchema:
    is_row = rows[0].dim() == 0
    return experience_pb2.ColumnSchema(
        name=name,
        kind=experience_pb2.COLUMN_KIND_ROW if is_row else experience_pb2.COLUMN_KIND_COMPLETION,
        dtype=DTYPES[rows[0].dtype],
        width=rows[0].shape[1] if rows[0].dim() > 1 else 0,
    )


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, state: State) -> None:
        self._state = state

    def GetCapabilities(self, request: Any, context: Any) -> Any:
        return worker_pb2.GetCapabilitiesResponse(
            role=self._state.role,
            services=SERVICES,
            world_size=1,
            chunk_bytes=CHUNK_BYTES,
            experience_capacity_bytes=1 << 30,
            dtypes=list(DTYPES.values()),
            accepts_references=True,
            spec_schema_json=json.dumps(SCHEMA),
            pid=os.getpid(),
            devices=["cpu"],
        )

    def Initialize(self, request: Any, context: Any) -> Iterator[Any]:
        state = self._state

        def work() -> Any:
            if state.run_id not in ("", request.key.run_id):
                raise Refusal(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "ALREADY_INITIALIZED",
                    f"run {state.run_id!r} holds this server",
                )
            spec = json_format.MessageToDict(request.spec)
            unknown = sorted(set(spec) - set(SCHEMA["properties"]))
            if unknown or not isinstance(spec.get("model"), dict):
                message = f"unknown field {unknown[0]!r}" if unknown else "model is missing"
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "SPEC_INVALID", message)
            state.model = AutoModelForCausalLM.from_pretrained(
                spec["model"]["path"], dtype=torch.float32, local_files_only=True
            ).eval()
            state.run_id = request.key.run_id
            return worker_pb2.InitializeResult(num_parameters=state.model.num_parameters())

        try:
            yield worker_pb2.InitializeResponse(progress=operation_pb2.Progress(stage="load"))
            yield worker_pb2.InitializeResponse(result=state.once(request, work))
        except Refusal as refusal:
            refuse(context, refusal)

    def GetStatus(self, request: Any, context: Any) -> Any:
        state = self._state
        ready = worker_pb2.WORKER_STATE_READY if state.run_id else worker_pb2.WORKER_STATE_IDLE
        asleep = worker_pb2.WORKER_STATE_ASLEEP
        return worker_pb2.GetStatusResponse(
            state=asleep if state.is_asleep else ready, run_id=state.run_id
        )

    def Sleep(self, request: Any, context: Any) -> Any:
        self._state.is_asleep = True
        return worker_pb2.SleepResponse()

    def Wake(self, request: Any, context: Any) -> Any:
        self._state.is_asleep = False
        return worker_pb2.WakeResponse()

    def Drain(self, request: Any, context: Any) -> Any:
        state = self._state
        try:
            with state.lock:
                if request.run_id:
                    state.fence(request.run_id, request.fencing_epoch)
                    if state.run_id not in ("", request.run_id):
                        raise Refusal(
                            grpc.StatusCode.FAILED_PRECONDITION, "RUN_MISMATCH", "another run"
                        )
                state.run_id, state.model, state.is_asleep = "", None, False
                state.held.clear()
        except Refusal as refusal:
            refuse(context, refusal)
        return worker_pb2.DrainResponse()


class Experience(experience_pb2_grpc.ExperienceServiceServicer):
    def __init__(self, state: State) -> None:
        self._state = state

    def Fetch(self, request: Any, context: Any) -> Iterator[Any]:
        try:
            header, payload = self._payload(request)
        except Refusal as refusal:
            refuse(context, refusal)
            return
        yield experience_pb2.FetchResponse(header=header)
        for at in range(0, len(payload), CHUNK_BYTES):
            yield experience_pb2.FetchResponse(chunk=payload[at : at + CHUNK_BYTES])

    def _payload(self, request: Any) -> tuple[Any, bytes]:
        missing = grpc.StatusCode.NOT_FOUND
        held = self._state.held.get(request.experience_id)
        if held is None:
            raise Refusal(missing, "EXPERIENCE_NOT_FOUND", "released, or never here")
        names = list(request.columns) or list(held)
        for name in names:
            if name not in held:
                raise Refusal(missing, "COLUMN_NOT_FOUND", f"no column {name!r}")
        if request.rows and (request.row_start or request.row_stop):
            message = "give a range or single rows"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "ROWS_AMBIGUOUS", message)
        rows = list(request.rows) or list(range(request.row_start, request.row_stop))
        num_rows = len(held[names[0]])
        if any(not 0 <= row < num_rows for row in rows):
            message = f"rows 0 to {num_rows} are held"
            raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "ROWS_OUT_OF_RANGE", message)
        header = experience_pb2.PayloadHeader(num_rows=len(rows), row_stop=len(rows))
        payload = b""

        def place(data: bytes) -> int:
            nonlocal payload
            at = len(payload)
            payload += data + bytes(-len(data) % 64)
            return at

        for name in names:
            chosen = [torch.atleast_1d(held[name][row]) for row in rows]
            offsets = [0, *itertools.accumulate(len(row) for row in chosen)]
            column = header.columns.add(
                schema=schema(name, held[name]),
                values_at=place(torch.cat(chosen).numpy().tobytes()),
                num_values=offsets[-1],
            )
            if column.schema.kind != experience_pb2.COLUMN_KIND_ROW:
                column.offsets_at = place(torch.tensor(offsets).numpy().tobytes())
        header.num_bytes = len(payload)
        return header, payload

    def Release(self, request: Any, context: Any) -> Any:
        state = self._state
        try:
            with state.lock:
                if request.fencing_epoch:
                    state.fence(request.run_id, request.fencing_epoch)
                # Each id of an experience that lasts for one step: all of it may go.
                ids = list(request.experience_ids) or list(state.held)
                gone = [state.held.pop(one) for one in ids if one in state.held]
        except Refusal as refusal:
            refuse(context, refusal)
        return experience_pb2.ReleaseResponse(released_bytes=sum(map(num_bytes, gone)))


class Logprobs(logprob_pb2_grpc.LogprobServiceServicer):
    def __init__(self, state: State) -> None:
        self._state = state

    def ComputeLogprobs(self, request: Any, context: Any) -> Iterator[Any]:
        def work() -> Any:
            self._state.check_holds(request.key.run_id)
            if request.temperature <= 0:
                message = "temperature must be above 0"
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "SPEC_INVALID", message)
            most = min(MAX_TOP_K, self._state.model.config.vocab_size)
            if not 0 <= request.top_k <= most or (request.top_k and request.with_entropy):
                message = f"top_k must be 0 to {most}, and 0 with an entropy"
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "SPEC_INVALID", message)
            weights = weights_of(request)
            columns = self._score(request, weights)
            return experience_pb2.ExperienceResult(
                experience=self._state.publish(
                    request.key, columns, [*weights], request.experience.num_rows
                ),
                is_part=request.HasField("route"),
            )

        try:
            yield logprob_pb2.ComputeLogprobsResponse(
                progress=operation_pb2.Progress(stage="score")
            )
            yield logprob_pb2.ComputeLogprobsResponse(result=self._state.once(request, work))
        except Refusal as refusal:
            refuse(context, refusal)

    @torch.inference_mode()
    def _score(self, request: Any, weights: dict[int, float]) -> dict[str, Rows]:
        columns: dict[str, Rows] = {request.column: []}
        entropies = columns.setdefault(f"{request.column}_entropy", [])
        ids = columns.setdefault(f"{request.column}_top_ids", [])
        top = columns.setdefault(f"{request.column}_top", [])
        said = columns.setdefault(f"{request.column}_weights", [])
        batch = pull(request.experience)
        for row, weight in weights.items():
            tokens, cut = batch[row]
            said.append(torch.tensor(weight))
            scores = torch.zeros(len(tokens) - cut, self._state.model.config.vocab_size)
            if weight:
                logits = self._state.model(tokens[None]).logits[0, cut - 1 : -1].float()
                scores = torch.log_softmax(logits / request.temperature, dim=-1)
            columns[request.column].append(scores.gather(1, tokens[cut:, None])[:, 0])
            entropies.append(-(scores.exp() * scores).sum(-1))
            likeliest = scores.topk(request.top_k, dim=1)
            top.append(likeliest.values)
            ids.append(likeliest.indices.int() * bool(weight))
        wanted = {
            request.column: True,
            f"{request.column}_entropy": request.with_entropy,
            f"{request.column}_weights": request.route.with_weights,
        }
        return {name: rows for name, rows in columns.items() if wanted.get(name, request.top_k)}


def weights_of(request: Any) -> dict[int, float]:
    """The rows that the route does not leave to others, with what the teacher counts for there."""
    route, rows = request.route, range(request.experience.num_rows)
    if not request.HasField("route"):
        return dict.fromkeys(rows, 1.0)
    others = route.WhichOneof("others")
    said = {**dict.fromkeys(route.left), **route.weights}
    texts = pull_column(request.experience, "metadata") if route.field else {}
    weights = {}
    for row in rows:
        value = value_of(bytes(texts[row].tolist()), route.field) if route.field else None
        if value not in said and others is None:
            message = f"row {row} has {value!r} as its {route.field!r}, which no teacher takes"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "DATA_INVALID", message)
        weight = said.get(value, route.others_weight if others == "others_weight" else None)
        if weight is not None:
            weights[row] = weight
    return weights


def value_of(metadata: bytes, field: str) -> str | None:
    """What stands in a row's metadata; dots lead into objects."""
    value = json.loads(metadata or b"{}")
    for name in [field] if field in value else field.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pull(ref: Any) -> list[tuple[torch.Tensor, int]]:
    """Tokens of each row of the batch, and where its completion begins."""
    tokens, cuts = (pull_column(ref, name) for name in ("tokens", "prompt_lengths"))
    return [(tokens[row], int(cuts[row])) for row in range(ref.num_rows)]


def pull_column(ref: Any, name: str) -> dict[int, torch.Tensor]:
    """The values of each row of a column."""
    groups = [group for group in ref.groups if any(one.name == name for one in group.columns)]
    if not groups:
        message = f"the experience lacks the column {name!r}"
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "COLUMN_MISSING", message)
    rows: dict[int, torch.Tensor] = {}
    for shard in groups[-1].shards:  # of two columns of one name the last one counts
        header, payload = fetch(shard, name)
        column = header.columns[0]
        dtype = READ[column.schema.dtype]
        values = torch.frombuffer(payload, dtype=dtype)[column.values_at // dtype.itemsize :]
        offsets = list(range(header.num_rows + 1))
        if column.HasField("offsets_at"):
            offsets = torch.frombuffer(
                payload, dtype=torch.int64, count=len(offsets), offset=column.offsets_at
            ).tolist()
        numbers = shard.rows or range(shard.row_start, shard.row_start + shard.num_rows)
        for row, (first, last) in zip(numbers, itertools.pairwise(offsets), strict=True):
            rows[row] = values[first:last].clone()
    return rows


def fetch(shard: Any, name: str) -> tuple[Any, bytearray]:
    request = experience_pb2.FetchRequest(
        experience_id=shard.experience_id, columns=[name], row_stop=shard.num_rows
    )
    payload = bytearray()
    try:
        with grpc.insecure_channel(shard.address) as channel:
            stub = experience_pb2_grpc.ExperienceServiceStub(channel)
            parts = stub.Fetch(request, timeout=FETCH_TIMEOUT_S)
            header = next(parts).header
            for part in parts:
                payload += part.chunk
    except grpc.RpcError as error:
        known = {
            grpc.StatusCode.NOT_FOUND: "EXPERIENCE_NOT_FOUND",
            grpc.StatusCode.UNAVAILABLE: "PEER_UNREACHABLE",
        }
        message = f"{shard.role} at {shard.address}: {error.details()}"
        raise Refusal(error.code(), known.get(error.code(), "FETCH_FAILED"), message) from error
    if len(payload) != header.num_bytes:
        message = f"{len(payload)} of {header.num_bytes} bytes came from {shard.address}"
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "TENSOR_MALFORMED", message)
    return header, payload


def main(announce: Path, role: str) -> None:
    torch.set_num_threads(1)
    state = State(role)
    server = grpc.server(ThreadPoolExecutor(8))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(state), server)
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(Experience(state), server)
    logprob_pb2_grpc.add_LogprobServiceServicer_to_server(Logprobs(state), server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    state.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    waiting = announce.with_suffix(".part")
    waiting.write_text(json.dumps({"address": state.address, "pid": os.getpid()}))
    waiting.rename(announce)
    server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
