"""A server of another make, right in every respect but those that it is told to get wrong.

Its language model is a table of bigrams, so that it can reward, score, value and sample without
torch, and an oracle knows what it should say.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.column_fetch import fetch_columns
from rolemesh.rpc.columns import ColumnData, Columns, encode
from rolemesh.rpc.errors import (
    CapacityError,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
    RolemeshError,
    to_status,
)
from rolemesh.v1 import (
    experience_pb2,
    logprob_pb2,
    operation_pb2,
    reward_pb2,
    rollout_pb2,
    tensor_pb2,
    trainer_pb2,
    value_pb2,
    weights_pb2,
    worker_pb2,
)

VOCABULARY = 256
CHUNK_BYTES = 1 << 20
GIANT_BYTES = 3 << 20

_FAMILIES = {
    "reward": ("RewardService",),
    "reference": ("LogprobService",),
    "critic": ("ValueService", "TrainerService", "WeightsService"),
    "actor": ("RolloutService", "LogprobService"),
}


class ScriptedOutsider:
    """One server. `faults` are names that the code below looks up."""

    def __init__(self, role: str, *faults: str, inline: bool = False) -> None:
        self.role = role
        self.faults = set(faults)
        self.inline = inline
        """Whether it is a reward that serves RewardService and nothing else."""
        self.address = ""
        self.run_id = ""
        self.is_asleep = False
        self.version = 0
        self._weight = 0.0
        self._gradient: float | None = None
        self._epochs: dict[str, int] = {}
        self._answers: dict[tuple[Any, ...], tuple[bytes, asyncio.Task[Any]]] = {}
        self._held: dict[str, Columns] = {}
        self._ids = itertools.count()
        self._channels: dict[str, MeshChannel] = {}
        self._server: grpc.aio.Server | None = None
        generator = np.random.default_rng(0)
        self._logits = generator.standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)

    def has(self, fault: str) -> bool:
        return fault in self.faults

    async def start(self) -> str:
        server = grpc.aio.server()
        services = [f"rolemesh.v1.{name}" for name in _FAMILIES[self.role]]
        for name in _FAMILIES[self.role]:
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
        held = self._held.get(request.experience_id)
        if held is None and self.has("makes_up_experience") and self._held:
            held = next(iter(self._held.values()))
        if held is None:
            raise NotFoundError("unknown id", reason="EXPERIENCE_NOT_FOUND")
        names = list(request.columns) or list(held)
        if any(name not in held for name in names):
            raise NotFoundError("unknown column", reason="COLUMN_NOT_FOUND")
        if request.rows and (request.row_start or request.row_stop):
            raise InvalidRequestError("both", reason="ROWS_AMBIGUOUS")
        rows = list(request.rows) or list(range(request.row_start, request.row_stop))
        if any(not 0 <= row < held.num_rows for row in rows):
            raise OutOfRangeError("rows", reason="ROWS_OUT_OF_RANGE")
        if self.has("sorts_rows"):
            rows = sorted(rows)
        header, chunks = encode(Columns({name: held[name] for name in names}).select(rows))
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

    def _publish(self, key: Any, columns: Columns) -> experience_pb2.ExperienceRef:
        experience_id = f"outside-{next(self._ids)}"
        self._held[experience_id] = columns
        shard = experience_pb2.Shard(
            experience_id=experience_id,
            num_rows=columns.num_rows - self.has("loses_a_row"),
            address=self.address,
            role=self.role,
        )
        if "tokens" in columns:
            shard.row_tokens.extend(columns["tokens"].lengths().tolist())
        schemas = [column.schema for column in encode(columns)[0].columns]
        return experience_pb2.ExperienceRef(
            run_id=key.run_id,
            step=key.step,
            num_rows=columns.num_rows,
            groups=[experience_pb2.ColumnGroup(columns=schemas, shards=[shard])],
        )

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

    # --- rewards ---------------------------------------------------------------------------

    def _RewardService(self) -> dict[str, Any]:
        if self.has("unimplemented"):
            return {}
        return {"ComputeReward": self._stream(reward_pb2.ComputeRewardRequest, self._reward)}

    async def _reward(self, request: Any) -> AsyncIterator[Any]:
        kind = request.WhichOneof("input")
        is_empty = kind is None or (
            kind == "trajectories" and not request.trajectories.trajectories
        )
        if is_empty and not self.has("judges_nothing"):
            raise InvalidRequestError("nothing to judge", reason="INPUT_MISSING")
        if request.pass_at and kind == "trajectories":
            raise InvalidRequestError("pass_at", reason="PASS_AT_INVALID")
        if kind == "experience" and self.inline:
            raise InvalidRequestError("send trajectories", reason="INPUT_UNSUPPORTED")

        async def inline() -> Any:
            rows = request.trajectories.trajectories
            rewards = self._judge([one.completion for one in rows])
            metrics = {"length": float("nan") if self.has("nan_metric") else 1.0}
            return reward_pb2.Rewards(rewards=rewards, metrics=metrics)

        async def by_reference() -> Any:
            texts = (await self._pull(request.experience, ["completion_text"]))["completion_text"]
            rewards = self._judge(texts.strings())
            dtype = np.float64 if self.has("doubles") else np.float32
            column = Columns({"rewards": ColumnData.row(rewards, dtype)})
            metric = float("inf") if self.has("nan_metric") else 1.0
            report = experience_pb2.CallReport(metrics={"x": metric})
            return experience_pb2.ExperienceResult(
                experience=self._publish(request.key, column), report=report
            )

        by_ref = kind == "experience"
        events = self._streamed(
            request,
            reward_pb2.ComputeRewardResponse,
            by_reference if by_ref else inline,
            "result" if by_ref else "rewards",
        )
        async for event in events:
            yield event

    def _judge(self, completions: Sequence[str]) -> list[float]:
        if self.has("ascii_only") and not all(text.isascii() for text in completions):
            raise InvalidRequestError("ASCII only")
        if self.has("small_batches") and len(completions) > 64:
            raise CapacityError("at most 64")
        rewards = [("12" in text) + len(text) % 97 / 97 for text in completions]
        if self.has("forgetful"):
            rewards = [value + random.random() for value in rewards]
        if self.has("divides_by_length"):
            rewards = [
                value if text else float("nan")
                for value, text in zip(rewards, completions, strict=True)
            ]
        if self.has("nan") and len(rewards) > 2:
            rewards[2] = float("nan")
        if self.has("reversed"):
            rewards = rewards[::-1]
        if self.has("sorted"):
            rewards = sorted(rewards)
        if self.has("one_short"):
            rewards = rewards[:-1]
        return rewards

    # --- scores ----------------------------------------------------------------------------

    def _LogprobService(self) -> dict[str, Any]:
        return {"ComputeLogprobs": self._stream(logprob_pb2.ComputeLogprobsRequest, self._logprobs)}

    def _ValueService(self) -> dict[str, Any]:
        return {"ComputeValues": self._stream(value_pb2.ComputeValuesRequest, self._values)}

    async def _logprobs(self, request: Any) -> AsyncIterator[Any]:
        if request.temperature <= 0 and not self.has("any_temperature"):
            raise InvalidRequestError("temperature", reason="SPEC_INVALID")

        async def work() -> Any:
            temperature = request.temperature or 1.0
            if self.has("ignores_temperature"):
                temperature = 1.0
            logits = self._logits / temperature
            scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            entropy = -(np.exp(scores) * scores).sum(-1)
            if self.has("logits"):
                scores = logits
            rows = await self._completions(request.experience, lambda last, now: scores[last, now])
            columns = {request.column: rows}
            if request.with_entropy:
                columns[f"{request.column}_entropy"] = await self._completions(
                    request.experience, lambda last, now: entropy[last]
                )
            return experience_pb2.ExperienceResult(
                experience=self._publish(request.key, Columns(columns))
            )

        events = self._streamed(request, logprob_pb2.ComputeLogprobsResponse, work)
        async for event in events:
            yield event

    async def _values(self, request: Any) -> AsyncIterator[Any]:
        async def work() -> Any:
            table = self._logits[:, 0]
            rows = await self._completions(
                request.experience,
                lambda last, now: table[now if self.has("late_values") else last],
            )
            return experience_pb2.ExperienceResult(
                experience=self._publish(request.key, Columns({"values": rows}))
            )

        events = self._streamed(request, value_pb2.ComputeValuesResponse, work)
        async for event in events:
            yield event

    async def _completions(self, ref: Any, number: Callable[[int, int], Any]) -> ColumnData:
        batch = await self._pull(ref, ["tokens", "prompt_lengths"])
        longest = int(batch["tokens"].lengths().max())
        rows = []
        for tokens, cut in zip(batch["tokens"].rows(), batch["prompt_lengths"].values, strict=True):
            first = 1 if self.has("scores_prompts") else int(cut)
            if self.has("ignores_cut"):
                first = 2
            row = [number(int(tokens[t - 1]), int(tokens[t])) for t in range(first, len(tokens))]
            if self.has("off_by_one"):
                row = [number(int(tokens[t]), int(tokens[t])) for t in range(first, len(tokens))]
            if self.has("sees_padding"):
                row = [value * (1 + longest - len(tokens)) for value in row]
            if self.has("dropout"):
                row = [value * random.choice((0.0, 2.0)) for value in row]
            rows.append(row)
        dtype = np.float64 if self.has("doubles") else np.float32
        return ColumnData.completion(rows, dtype)

    # --- training --------------------------------------------------------------------------

    def _TrainerService(self) -> dict[str, Any]:
        return {
            "ForwardBackward": self._stream(
                trainer_pb2.ForwardBackwardRequest, self._forward_backward
            ),
            "OptimStep": self._unary(trainer_pb2.OptimStepRequest, self._optim_step),
        }

    async def _forward_backward(self, request: Any) -> AsyncIterator[Any]:
        if request.loss.type != "ppo_value" and not self.has("any_loss"):
            raise InvalidRequestError("loss.type is unknown", reason="SPEC_INVALID")

        async def work() -> Any:
            batch = await self._pull(request.experience, ["returns"])
            self._gradient = float(batch["returns"].values.mean())
            self._weight += self.has("moves_early")
            loss = float("nan") if self.has("nan_metric") else self._gradient
            report = experience_pb2.CallReport(metrics={"loss": loss})
            return trainer_pb2.ForwardBackwardResult(report=report)

        async for event in self._streamed(request, trainer_pb2.ForwardBackwardResponse, work):
            yield event

    async def _optim_step(self, request: Any) -> Any:
        async def work() -> Any:
            if request.expected_policy_version != self.version and not self.has("any_version"):
                raise PreconditionError("another version", reason="VERSION_MISMATCH")
            if self._gradient is None and not self.has("steps_on_nothing"):
                raise PreconditionError("no gradient", reason="NO_GRADIENT")
            self._weight += 0.0 if self.has("never_moves") else self._gradient or 0.0
            self._gradient = None
            self.version += 1 + self.has("counts_double")
            return trainer_pb2.OptimStepResponse(policy_version=self.version)

        return await self._keyed(request, work)

    def _WeightsService(self) -> dict[str, Any]:
        async def manifest(request: Any) -> Any:
            parameter = weights_pb2.ParameterSpec(
                name="weight", shape=[1], dtype=tensor_pb2.DATA_TYPE_FLOAT32
            )
            number = 2 if self.has("twin_parameters") else 1
            return weights_pb2.GetManifestResponse(parameters=[parameter] * number)

        async def checksums(request: Any) -> Any:
            return weights_pb2.GetChecksumsResponse(checksums={"weight": str(self._weight)})

        return {
            "GetManifest": self._unary(weights_pb2.GetManifestRequest, manifest),
            "GetChecksums": self._unary(weights_pb2.GetChecksumsRequest, checksums),
        }

    # --- samples ---------------------------------------------------------------------------

    def _RolloutService(self) -> dict[str, Any]:
        return {"Generate": self._stream(rollout_pb2.GenerateRequest, self._generate)}

    async def _generate(self, request: Any) -> AsyncIterator[Any]:
        sampling, prompts = request.sampling, request.prompts
        if not self.has("any_sampling") and not (
            sampling.temperature > 0
            and 0 < sampling.top_p <= 1
            and sampling.max_new_tokens >= 1
            and sampling.samples_per_prompt >= 1
        ):
            raise InvalidRequestError("sampling is out of range", reason="SAMPLING_INVALID")
        if prompts.split == rollout_pb2.SPLIT_UNSPECIFIED:
            raise InvalidRequestError("no split", reason="SPLIT_INVALID")
        if prompts.count < 1:
            raise InvalidRequestError("no prompts", reason="SLICE_INVALID")
        size = request.block_rows

        async def work() -> Any:
            batch = self._sample(request)
            whole = experience_pb2.ExperienceResult(experience=self._publish(request.key, batch))
            return whole, [
                rollout_pb2.GeneratedBlock(
                    index=at // size,
                    experience=self._publish(
                        request.key, batch.select(range(at, min(at + size, batch.num_rows)))
                    ),
                )
                for at in (range(0, batch.num_rows, size) if size else ())
            ]

        self._check_ready(request)
        result, blocks = await self._keyed(request, work)
        for block in () if self.has("no_blocks") else blocks:
            yield rollout_pb2.GenerateResponse(block=block)
        yield rollout_pb2.GenerateResponse(progress=operation_pb2.Progress(stage="decode"))
        yield rollout_pb2.GenerateResponse(result=result)

    def _sample(self, request: Any) -> Columns:
        sampling, prompts = request.sampling, request.prompts
        rows = [
            (prompt, index)
            for prompt in range(prompts.start, prompts.start + prompts.count)
            for index in range(sampling.samples_per_prompt)
        ]
        if self.has("as_they_finish"):
            rows = rows[1:] + rows[:1]
        scores = self._logits - np.log(np.exp(self._logits).sum(-1, keepdims=True))
        tokens, logprobs = [], []
        for prompt, index in rows:
            seed: tuple[int, ...] = (request.key.step, prompt, index)
            if self.has("unseeded"):
                seed = (random.randrange(1 << 30),)
            if self.has("same_each_step"):
                seed = (prompt, index)
            generator = np.random.default_rng(seed)
            row, chances = [1 + prompt % 100], []
            for _ in range(sampling.max_new_tokens + self.has("too_long")):
                spread = scores[row[-1]]
                is_greedy = sampling.greedy and not self.has("never_greedy")
                token = int(
                    spread.argmax()
                    if is_greedy
                    else generator.choice(VOCABULARY, p=_normal(np.exp(spread)))
                )
                row.append(token)
                chances.append(
                    self._logits[row[-2], token] if self.has("logits") else spread[token]
                )
            tokens.append(row)
            logprobs.append(chances)
        texts = ["x" for _ in rows]
        text = ColumnData.text(texts)
        return Columns(
            {
                "tokens": ColumnData.sequence(tokens),
                "prompt_lengths": ColumnData.row([1] * len(rows), np.int64),
                "logprobs": ColumnData.completion(logprobs),
                "loss_mask": ColumnData.completion([[1] * (len(r) - 1) for r in tokens], np.bool_),
                "policy_versions": ColumnData.completion(
                    [[0] * (len(r) - 1) for r in tokens], np.int64
                ),
                "prompt_ids": ColumnData.row([prompt for prompt, _ in rows], np.int64),
                "sample_indexes": ColumnData.row([index for _, index in rows], np.int64),
                "finished": ColumnData.row([False] * len(rows), np.bool_),
                "prompt_text": text,
                "completion_text": text,
                "answer": text,
                **({} if self.has("no_metadata") else {"metadata": text}),
            }
        )


def _normal(chances: Any) -> Any:
    chances = chances.astype(np.float64)
    return chances / chances.sum()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


@asynccontextmanager
async def outsider(
    role: str, *faults: str, inline: bool = False
) -> AsyncIterator[ScriptedOutsider]:
    """A server on the test's own loop."""
    server = ScriptedOutsider(role, *faults, inline=inline)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
