"""The server under test: how checks call it, and what they know of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from rolemesh.coordinator.compliance.contract import (
    LOGPROB_ROLES,
    REWARD_ROLES,
    BrokenContractError,
    NotApplicableError,
)
from rolemesh.coordinator.compliance.producer import Producer
from rolemesh.coordinator.compliance.samples import Sample, ordinary_samples
from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import Columns
from rolemesh.v1 import experience_pb2, logprob_pb2, operation_pb2, rollout_pb2, worker_pb2

EPOCH = 2
"""Epoch of the suite's run. It is not the first one, so that an older one can be refused."""

RUN_SEED = 7

SAMPLING = rollout_pb2.Sampling(
    samples_per_prompt=2, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8
)
NUM_PROMPTS = 3

MAX_MESSAGES = 2_000
"""Most messages of one stream. A stream with more counts as endless."""

INITIALIZE_PATIENCE = 10
"""Factor on the deadline of Initialize, which loads models."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal that the contract names, and the one that the server gave."""

    sent: str
    reason: str
    error: RolemeshError


class Subject:
    """One server, called under a run of the suite's own. Owner: the loop.

    Every call has a deadline of timeout_s seconds, so that a server that hangs ends in a finding.
    """

    def __init__(
        self,
        address: str,
        role: str,
        run_id: str,
        spec: Mapping[str, Any],
        producer: Producer,
        timeout_s: float,
    ) -> None:
        self.address = address
        self.role = role
        self.run_id = run_id
        self.spec = spec
        """Spec for Initialize."""
        self.producer = producer
        self.timeout_s = timeout_s
        self.capabilities: worker_pb2.GetCapabilitiesResponse | None = None
        """None where the server has no WorkerService."""
        self.capabilities_error: RolemeshError | None = None
        """Why there are none, if the server has WorkerService but failed."""
        self.is_held = False
        """Whether the suite's run may hold the server."""
        self.refusals: list[Refusal] = []
        """Requests that were refused as they should be; their reasons are judged at the end."""
        self._sequence = 0
        self._usual: list[Any] = []
        self._ordinary: experience_pb2.ExperienceRef | None = None
        self.initialize_key = self.key("compliance.initialize", step=0)
        self.initialized: worker_pb2.InitializeResult | None = None
        identity = producer.identity
        self.channel = open_channel(address, identity=identity)
        # A plain channel without our rules: calls may have no deadline, and payloads are raw bytes.
        options = [("grpc.enable_http_proxy", 0)]
        self.bare = (
            grpc.aio.insecure_channel(address, options)
            if identity is None
            else grpc.aio.secure_channel(
                address, identity.channel_credentials(), [*options, *identity.channel_options]
            )
        )
        self.client = ServiceClient(self.channel, timeout_s)

    async def close(self) -> None:
        """Closes the channels."""
        await self.channel.close()
        await self.bare.close()

    async def is_there(self) -> bool:
        """Whether its process takes connections."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.channel.channel_ready()
        except TimeoutError:
            return False
        return True

    @property
    def takes_part_in_runs(self) -> bool:
        """Whether it has WorkerService and pulls by reference, as every role but a reward must."""
        known = self.capabilities
        return known is not None and (self.role not in REWARD_ROLES or known.accepts_references)

    @property
    def column(self) -> str:
        """The column that a reward makes."""
        return "costs" if self.role == "cost" else "rewards"

    def serves(self, service: str) -> bool:
        """Whether the server says that it serves this, e.g. "LogprobService"."""
        known = self.capabilities
        return known is not None and f"rolemesh.v1.{service}" in known.services

    def key(
        self, operation: str = "compliance.call", *, step: int = 1, epoch: int = EPOCH
    ) -> operation_pb2.OperationKey:
        """Makes a key that was not used before."""
        self._sequence += 1
        return operation_pb2.OperationKey(
            run_id=self.run_id,
            fencing_epoch=epoch,
            step=step,
            operation=operation,
            sequence=self._sequence,
        )

    def initialize(
        self,
        *,
        key: operation_pb2.OperationKey | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> ResultCall[worker_pb2.InitializeResult]:
        """Calls Initialize with the spec and further fields."""
        self.is_held = True
        return self.client.within(INITIALIZE_PATIENCE * self.timeout_s).initialize(
            self.initialize_key if key is None else key,
            {**self.spec, **(more or {})},
            RUN_SEED,
        )

    # --- the call that makes the role what it is ---------------------------------------------

    def work(
        self,
        key: operation_pb2.OperationKey,
        samples: Sequence[Sample] | None = None,
        experience: experience_pb2.ExperienceRef | None = None,
    ) -> ResultCall[Any]:
        """ComputeReward, ComputeLogprobs, ComputeValues or Generate.

        Args:
            key: Key of the operation.
            samples: Trajectories to judge; None: the ordinary ones.
            experience: The same by reference, for a service that pulls; None: the suite serves the
                samples.
        """
        if self.role in ("rollout", "actor"):
            return self.generate(key)
        chosen = ordinary_samples() if samples is None else samples
        if self.role in REWARD_ROLES and not self.takes_part_in_runs:
            return self.client.judge(key, [one.inline() for one in chosen])
        ref = self._reference(samples) if experience is None else experience
        if self.role in REWARD_ROLES:
            return self.client.compute_reward(key, ref)
        if self.role == "critic":
            return self.client.compute_values(key, ref)
        return self.logprobs(key, ref)

    def _reference(self, samples: Sequence[Sample] | None) -> experience_pb2.ExperienceRef:
        """Samples by reference. The ordinary ones keep one reference, since a repeat needs it."""
        if samples is not None:
            return self.producer.serve(samples, self.run_id)
        if self._ordinary is None:
            self._ordinary = self.producer.serve(ordinary_samples(), self.run_id)
        return self._ordinary

    def logprobs(
        self,
        key: operation_pb2.OperationKey,
        ref: experience_pb2.ExperienceRef,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        top_k: int = 0,
        route: logprob_pb2.RowRoute | None = None,
    ) -> ResultCall[experience_pb2.ExperienceResult]:
        """Calls ComputeLogprobs with "scores" as the name of the column."""
        return self.client.compute_logprobs(
            key,
            ref,
            "scores",
            temperature=temperature,
            with_entropy=with_entropy,
            top_k=top_k,
            route=route,
        )

    def consume(self, ref: experience_pb2.ExperienceRef, **options: Any) -> ResultCall[Any]:
        """The call of the role that pulls a given experience, under a new key.

        Args:
            ref: What to judge or score.
            **options: Of `logprobs`, for roles that compute them.
        """
        if self.role == "actor":
            need("LogprobService", self)
        if self.role in LOGPROB_ROLES:
            return self.logprobs(self.key(), ref, **options)
        return self.work(self.key(), experience=ref)

    def generate(
        self,
        key: operation_pb2.OperationKey,
        *,
        start: int = 0,
        count: int = NUM_PROMPTS,
        split: rollout_pb2.Split.ValueType = rollout_pb2.SPLIT_TRAIN,
        block_rows: int = 0,
        **sampling: Any,
    ) -> ResultCall[experience_pb2.ExperienceResult]:
        """Calls Generate with some fields of the sampling changed."""
        chosen = rollout_pb2.Sampling()
        chosen.CopyFrom(SAMPLING)
        for name, value in sampling.items():
            setattr(chosen, name, value)
        prompts = rollout_pb2.PromptSlice(split=split, start=start, count=count)
        return self.client.generate(key, prompts, chosen, block_rows=block_rows)

    async def usual_answer(self) -> list[Any]:
        """All messages of one ordinary call, which is made once."""
        if not self._usual:
            self._usual = await events_of(self.work(self.key("compliance.usual")))
        return self._usual

    async def usual_result(self) -> Message:
        """The result of that call."""
        return result_in(await self.usual_answer(), "an ordinary call")

    # --- what came ---------------------------------------------------------------------------

    async def refused(
        self, answer: Awaitable[Any], sent: str, refusal: str, why: str
    ) -> RolemeshError:
        """Returns the refusal that a call has to get.

        Args:
            answer: Answer of the call; events_of for a stream.
            sent: The request, described for people.
            refusal: As the protos write it, "STATUS (REASON)". One check judges all reasons at the
                end.
            why: What the server has to do, for people.

        Raises:
            BrokenContractError: The server answered, or refused with another code.
        """
        code, _, reason = refusal.removesuffix(")").partition(" (")
        try:
            came = f"an answer: {shorten(await answer)}"
        except RolemeshError as error:
            if error.code.name == code:
                self.refusals.append(Refusal(sent, reason, error))
                return error
            came = describe_error(error)
        raise BrokenContractError(sent=sent, came=came, remedy=f"{why}: {refusal}")

    async def rows(
        self,
        ref: experience_pb2.ExperienceRef,
        columns: Sequence[str] = (),
        rows: Iterable[int] | None = None,
    ) -> Columns:
        """Fetches columns of a reference from their holders; without names all, of all rows."""
        async with asyncio.timeout(self.timeout_s):
            return await fetch_columns(self.producer.channel, ref, columns, rows)

    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the spec; empty when it takes none."""
        text = "" if self.capabilities is None else self.capabilities.spec_schema_json
        known = json.loads(text) if text else {}
        return known if isinstance(known, dict) else {}


async def events_of(call: Any) -> list[Any]:
    """All messages of a stream.

    Raises:
        BrokenContractError: It sends more than MAX_MESSAGES.
    """
    events = []
    async for message in call:
        events.append(message)
        expect(
            len(events) <= MAX_MESSAGES,
            sent="a call",
            came=f"more than {MAX_MESSAGES} messages",
            remedy="send progress at most once a second, and end the stream with the result",
        )
    return events


def result_in(events: Sequence[Any], sent: str) -> Message:
    """Returns the result among the messages of a stream, at any place.

    Raises:
        BrokenContractError: There is none.
    """
    for event in events:
        field = event.WhichOneof("event")
        if field in ("result", "rewards"):
            found: Message = getattr(event, field)
            return found
    raise BrokenContractError(
        sent=sent,
        came=f"{len(events)} messages, none of them a result",
        remedy="end the stream with one message whose result is set",
    )


def experience_in(result: Message, sent: str) -> experience_pb2.ExperienceRef:
    """The reference in a result.

    Raises:
        BrokenContractError: The result is of another kind.
    """
    if isinstance(result, experience_pb2.ExperienceResult):
        return result.experience
    raise BrokenContractError(
        sent=sent,
        came=f"a {type(result).__name__}",
        remedy="answer an experience with an ExperienceResult in the field result",
    )


def need(service: str, subject: Subject) -> None:
    """Skips the check if the server has no such service."""
    if not subject.serves(service):
        raise NotApplicableError(f"the server has no {service}")


def expect(holds: bool, *, sent: str, came: str, remedy: str) -> None:
    """Raises BrokenContractError unless it holds."""
    if not holds:
        raise BrokenContractError(sent=sent, came=came, remedy=remedy)


def expect_progress_then_one_result(
    events: Sequence[Any], sent: str, between: tuple[str, ...] = ("progress",)
) -> None:
    """Raises BrokenContractError unless the result is one message, the last one."""
    kinds = [str(event.WhichOneof("event")) for event in events]
    results = [place for place, kind in enumerate(kinds) if kind not in between]
    expect(
        results == [len(kinds) - 1],
        sent=sent,
        came=f"the messages {shorten(kinds)}",
        remedy="send progress as often as once a second, then one result, and end the stream",
    )


def describe_error(error: RolemeshError) -> str:
    """Code, reason and message of an error."""
    return f"{error.code.name} ({error.reason}): {shorten(error.message)}"


def shorten(value: object, most: int = 300) -> str:
    """One line of at most so many characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."
