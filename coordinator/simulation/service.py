"""A simulated service: it keeps what a role keeps, computes nothing, and takes as long as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc_health.v1 import health_pb2

from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.simulation.answers import progress, response_class
from rolemesh.coordinator.simulation.channel import broken
from rolemesh.coordinator.simulation.kept import CallRecord, Identity, KeptState
from rolemesh.rpc.errors import PreconditionError, UnsupportedError
from rolemesh.rpc.limits import HIGHEST_EPOCH
from rolemesh.v1 import (
    cuts_pb2,
    experience_pb2,
    operation_pb2,
    rollout_pb2,
    worker_pb2,
)

FAMILIES = (
    "Worker", "Experience", "Rollout", "Trainer", "Logprob", "Value", "Reward", "Data", "Weights",
    "Cut",
)  # fmt: skip

_STARTS = ("Initialize", "Attach")
_BESIDE = ("UpdateWeights", "SaveCheckpoint")
"""Calls that a service answers while it computes another one. New weights come between two tokens
of what is being sampled, which waits for them; a checkpoint is written from a cut."""


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


@dataclass(eq=False)
class SimulatedService(KeptState):
    """One process of a service. Owner: one event loop.

    Invariant: a keyed call has its effect once. Calls in flight break when the process ends.
    """

    _answers: dict[Identity, Any] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waits: set[asyncio.Future[None]] = field(default_factory=set)
    _held_up_s: float = 0.0
    """Seconds for which sampling has waited for new weights, in all."""

    def end(self) -> None:
        """The process is gone: calls in flight break."""
        self.is_alive = False
        for wait in self._waits:
            if not wait.done():
                wait.set_exception(broken(self.address))

    def answer(self, method: str, request: Any) -> Any:
        """The response of a call, or an iterator over its messages."""
        name = method.rpartition("/")[2]
        if hasattr(request, "key") and name not in ("Sleep", "Wake"):
            return self._keyed(method, name, request)
        return self._plain(method, name, request)

    async def _until(self, moment: float) -> None:
        """Returns at that virtual time, or raises when the process ends before."""
        loop = asyncio.get_running_loop()
        if moment <= loop.time():
            return
        wait: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(moment, _end, wait)
        self._waits.add(wait)
        try:
            await wait
        finally:
            timer.cancel()
            self._waits.discard(wait)

    # --- calls without a result that streams ---

    async def _plain(self, method: str, name: str, request: Any) -> Any:
        match name:
            case "Check":
                return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            case "GetCapabilities":
                return worker_pb2.GetCapabilitiesResponse(
                    role=self.role,
                    services=[f"rolemesh.v1.{family}Service" for family in FAMILIES],
                    world_size=1,
                    accepts_references=True,
                    versions={"simulated": "1"},
                )
            case "GetStatus":
                state = worker_pb2.WORKER_STATE_READY
                return worker_pb2.GetStatusResponse(state=state, run_id=self.run_id)
            case "Release":
                through = request.through_step
                self.held = {one: kept for one, kept in self.held.items() if kept[0] > through}
                self._answers = {
                    one: kept for one, kept in self._answers.items() if one[1] > through
                }
            case "Sleep" | "Wake":
                self._check_epoch(request.key)
                async with self._turn:
                    await self._until(now() + self.mesh.settings.timing.state_s.get(self.role, 0.0))
                    self.is_asleep = name == "Sleep"
            case "ListCuts":
                cuts = [cuts_pb2.Cut(step=step) for step in sorted(self.own_cuts)]
                return cuts_pb2.ListCutsResponse(cuts=cuts)
            case "DropCuts":
                self.own_cuts.clear()
            case "Drain":
                self.run_id = ""
            case _:
                raise UnsupportedError(f"{method} is not simulated")
        return response_class(method)()

    # --- keyed calls ---

    async def _keyed(self, method: str, name: str, request: Any) -> AsyncIterator[Any]:
        key = request.key
        identity = key.fencing_epoch, key.step, key.operation, key.sequence
        yield progress(method)
        if name in _BESIDE:
            async for message in self._made(method, name, request, identity):
                yield message
            return
        async with self._turn:
            if not self.is_alive:
                raise broken(self.address)
            async for message in self._made(method, name, request, identity):
                yield message

    async def _made(
        self, method: str, name: str, request: Any, identity: Identity
    ) -> AsyncIterator[Any]:
        self._check(request.key, name)
        response = response_class(method)
        if identity in self._answers and name not in _STARTS:
            yield response(result=self._answers[identity])
            return
        record = CallRecord(self.name, identity, now())
        self.mesh.calls.append(record)
        try:
            async for made in self._events(name, request):
                if isinstance(made, rollout_pb2.GeneratedBlock):
                    yield response(block=made)
                else:
                    self._answers[identity] = made
            record.is_answered = True
        finally:
            record.ended = now()
        yield response(result=self._answers[identity])

    def _check_epoch(self, key: operation_pb2.OperationKey) -> None:
        if key.fencing_epoch < self.highest_epoch:
            raise PreconditionError(
                "a newer coordinator has taken over",
                reason="STALE_EPOCH",
                metadata={HIGHEST_EPOCH: str(self.highest_epoch)},
            )
        self.highest_epoch = key.fencing_epoch

    def _check(self, key: operation_pb2.OperationKey, name: str) -> None:
        """Refuses as a real service does: what is wrong here is the coordinator's fault."""
        self._check_epoch(key)
        if name in _STARTS:
            return
        if key.run_id != self.run_id:
            raise PreconditionError(f"{self.name} holds no run", reason="NOT_INITIALIZED")
        if self.is_asleep and name != "SaveCheckpoint":
            raise PreconditionError(f"{self.name} is asleep: wake it first", reason="ASLEEP")

    async def _events(self, name: str, request: Any) -> AsyncIterator[Any]:
        """What a call makes, in virtual time: blocks where it sends any, and its result last."""
        if name == "Generate":
            async for made in self._generated(request):
                yield made
            return
        key, method = request.key, request.key.operation.rpartition(".")[2]
        tokens = self.tokens_of(request.experience) if hasattr(request, "experience") else 0.0
        await self._until(now() + self._seconds(name, method, key, tokens))
        yield self.effect(name, request, tokens)

    def _seconds(
        self, name: str, method: str, key: operation_pb2.OperationKey, tokens: float
    ) -> float:
        timing = self.mesh.settings.timing
        if name in _STARTS:
            # Loading is a part of the start of a process.
            return 0.0
        if name in ("SaveCut", "RestoreCut", "SaveCheckpoint", "LoadCheckpoint", "Export"):
            return timing.state_s.get(self.role, 0.0)
        seconds = timing.seconds(self.role, method, key.sequence, tokens)
        seconds *= self.mesh.settings.faults.factor(self.name, key.step)
        if name == "UpdateWeights":
            self._held_up_s += seconds
        return seconds

    async def _generated(self, request: Any) -> AsyncIterator[Any]:
        key, settings = request.key, self.mesh.settings
        samples = 1 if request.sampling.greedy else request.sampling.samples_per_prompt
        first = request.prompts.start
        lengths = [
            length
            for prompt in range(first, first + request.prompts.count)
            for length in settings.lengths.of(prompt, samples)
        ]
        started, held_up, oldest = now(), self._held_up_s, self.policy_version
        factor = settings.faults.factor(self.name, key.step)
        before = settings.timing.seconds(self.role, "generate", key.sequence, 0.0)
        ends = [factor * (before + end) for end in settings.timing.decoding[self.role](lengths)]

        async def decoded(end: float) -> None:
            while now() < (moment := started + end + self._held_up_s - held_up):
                await self._until(moment)

        size = request.block_rows or len(lengths)
        starts = range(0, len(lengths), size) if size < len(lengths) else ()
        for start in sorted(starts, key=lambda at: (max(ends[at : at + size]), at)):
            await decoded(max(ends[start : start + size]))
            rows = self._kept(request, lengths[start : start + size], f"/{start}")
            yield rollout_pb2.GeneratedBlock(index=start // size, experience=rows)
        await decoded(max(ends))
        result = experience_pb2.ExperienceResult(experience=self._kept(request, lengths))
        result.report.metrics["policy_version/min"] = oldest
        result.report.num_tokens = round(sum(lengths) + settings.prompt_tokens * len(lengths))
        yield result

    def _kept(
        self, request: Any, lengths: Sequence[float], suffix: str = ""
    ) -> experience_pb2.ExperienceRef:
        """Holds rows that were sampled, and names them."""
        tokens = sum(lengths) + self.mesh.settings.prompt_tokens * len(lengths)
        return self.hold(request, "Generate", tokens, len(lengths), suffix)
