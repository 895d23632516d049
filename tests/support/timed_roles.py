"""Fake roles whose calls take as long as they are told, and whose completions differ in length.

Nothing is computed: what is measured over them is the coordinator's dispatch and what it lets run
together. A service works on one call at a time, as a real one does.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from support.fake_core import Events, Work
from support.fake_models import completion
from support.fake_roles import FakeMesh, FakeRole

from rolemesh.engine.specs.columns import ROLLOUT_COLUMNS
from rolemesh.v1 import rollout_pb2

Call = tuple[str, str]
"""Service and method, e.g. ("critic", "ComputeValues")."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds that calls take. What is not given takes none."""

    seconds: Mapping[Call, float] = field(default_factory=dict)
    """Of a call, whatever it works on."""
    seconds_per_token: Mapping[Call, float] = field(default_factory=dict)
    """Of a call, beside that, for each token of prompts and completions that it works on."""
    prompt_tokens: int = 0
    """Of each row."""
    lengths: tuple[int, ...] = (1,)
    """Tokens of the completions, in the order of rows, over and over."""
    token_seconds: float = 0.0
    """Of one decoding step, which draws a token for every row that is not finished."""

    def of(self, call: Call, num_tokens: int) -> float:
        """Seconds of a call over so many tokens."""
        return self.seconds.get(call, 0.0) + num_tokens * self.seconds_per_token.get(call, 0.0)


def skewed_lengths(num_rows: int, *, seed: int, short: int, long: int, num_long: int) -> list[int]:
    """Lengths of completions of which a few, at random places, are much longer than the others."""
    generator = random.Random(seed)
    late = set(generator.sample(range(num_rows), num_long))
    return [
        long if row in late else generator.randint(short // 2, short) for row in range(num_rows)
    ]


@dataclass(eq=False, repr=False)
class TimedRole(FakeRole):
    """A service whose calls take time."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def timing(self) -> Timing:
        """That of its mesh."""
        assert isinstance(self.mesh, TimedMesh)
        return self.mesh.timing

    async def keyed(
        self,
        method: str,
        request: Any,
        context: Any,
        response_type: Any,
        work: Work | None = None,
        events: Events | None = None,
    ) -> AsyncIterator[Any]:
        """The life of a call, with the time that it takes before its result."""
        async with self._turn:
            started = asyncio.get_running_loop().time()
            answers = super().keyed(method, request, context, response_type, work, events)
            async for answer in answers:
                if answer.WhichOneof("event") == "result":
                    seconds = self.timing.of((self.service, method), self._num_tokens(request))
                    await _until(started + seconds)
                yield answer

    def _num_tokens(self, request: Any) -> int:
        assert isinstance(self.mesh, TimedMesh)
        if not hasattr(request, "experience"):
            return 0
        groups = request.experience.groups
        names = {shard.experience_id for group in groups[:1] for shard in group.shards}
        prompts = request.experience.num_rows * self.timing.prompt_tokens
        return prompts + sum(self.mesh.num_tokens[name] for name in names)

    async def _decode(self, request: Any) -> AsyncIterator[Message]:
        """Blocks in the order in which they finish: each when its longest row does."""
        assert isinstance(self.mesh, TimedMesh)
        timing, prompts = self.timing, request.prompts
        samples = request.sampling.samples_per_prompt
        rows = [
            (prompt, sample)
            for prompt in range(prompts.start, prompts.start + prompts.count)
            for sample in range(samples)
        ]
        lengths = [timing.lengths[row % len(timing.lengths)] for row in range(len(rows))]
        size = request.block_rows or len(rows)
        starts = range(0, len(rows), size)
        started = asyncio.get_running_loop().time()
        for start in sorted(starts, key=lambda first: max(lengths[first : first + size])):
            block = slice(start, start + size)
            await _until(started + timing.token_seconds * max(lengths[block]))
            if request.block_rows:
                columns = _columns(self.weight, rows[block])
                reference = self.publish(request.key, columns, f"/{start // size}")
                self.mesh.note(reference, sum(lengths[block]))
                yield rollout_pb2.GenerateResponse(
                    block=rollout_pb2.GeneratedBlock(index=start // size, experience=reference)
                )
        result = self.experience(request, _columns(self.weight, rows))
        self.mesh.note(result.experience, sum(lengths))
        yield result


def _columns(weight: float, rows: list[tuple[int, int]]) -> dict[str, list[Any]]:
    numbers = [completion(weight, prompt, sample) for prompt, sample in rows]
    columns: dict[str, list[Any]] = dict.fromkeys(ROLLOUT_COLUMNS, numbers)
    columns["prompt_ids"] = [prompt for prompt, _ in rows]
    columns["sample_indexes"] = [sample for _, sample in rows]
    columns["policy_versions"] = [(0,)] * len(rows)
    return columns


async def _until(moment: float) -> None:
    """Returns at a time of the loop's clock, at once where it is past."""
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))


@dataclass
class TimedMesh(FakeMesh):
    """Timed roles, and how many completion tokens each experience has."""

    timing: Timing = field(default_factory=Timing)
    num_tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, role: str, replicas: int = 1) -> None:
        """Makes the service of a role, not yet started."""
        assert replicas == 1
        self.roles[role] = TimedRole(service=role, mesh=self)

    def note(self, reference: Any, num_tokens: int) -> None:
        """Remembers how many tokens the completions of an experience have."""
        for shard in reference.groups[0].shards:
            self.num_tokens[shard.experience_id] = num_tokens


@asynccontextmanager
async def timed_mesh(roles: tuple[str, ...], timing: Timing) -> AsyncIterator[TimedMesh]:
    """Starts timed roles and stops them."""
    mesh = TimedMesh(timing=timing)
    for role in roles:
        mesh.add(role)
    for fake in mesh.roles.values():
        await fake.start()
    try:
        yield mesh
    finally:
        for fake in mesh.roles.values():
            await fake.stop()
