"""Sampling of a fake role: completions in blocks, and weights that come between two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from support.fake_exchanges import FakeExchanges
from support.fake_models import completion

from rolemesh.engine.specs.columns import DATA_COLUMNS, PAIR_COLUMNS, ROLLOUT_COLUMNS
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import data_pb2, experience_pb2, rollout_pb2, weights_pb2


class FakeSampling(FakeExchanges):
    """RolloutService, publication of weights, and DataService."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def events() -> AsyncIterator[Message]:
            return self._decode(request)

        async for response in self.keyed(
            "Generate", request, context, rollout_pb2.GenerateResponse, events=events
        ):
            yield response

    async def _decode(self, request: Any) -> AsyncIterator[Message]:
        mesh, prompts = self.mesh, request.prompts
        samples = request.sampling.samples_per_prompt
        pairs = [
            (prompt, sample)
            for prompt in range(prompts.start, prompts.start + prompts.count)
            for sample in range(samples)
        ]
        pairs = pairs[: len(pairs) - self.rows_dropped]
        size = request.block_rows or len(pairs)
        blocks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        whole: dict[int, dict[str, list[Any]]] = {}
        versions: list[int] = []
        for index in mesh.block_order(len(blocks)):
            if index in self.block_gates:
                await self.block_gates[index].wait()
            seen, weight = [], self.weight
            for _ in range(mesh.decode_turns):
                seconds = mesh.delay(self.service, "Generate")
                if seconds:
                    await asyncio.sleep(seconds)
                seen.append(self.policy_version)
            versions += seen
            whole[index] = columns = _sampled(
                blocks[index], weight, tuple(seen), request.key.lineage
            )
            if request.block_rows and index not in mesh.withheld_blocks:
                reference = self.publish(request.key, columns, f"/{index}")
                mesh.log.append(f"{self.service}.Generate sends block {index}")
                yield rollout_pb2.GenerateResponse(
                    block=rollout_pb2.GeneratedBlock(index=index, experience=reference)
                )
        joined = {
            name: [value for index in range(len(blocks)) for value in whole[index][name]]
            for name in ROLLOUT_COLUMNS
        }
        result = self.experience(
            request,
            joined,
            completion_length__mean=float(mesh.tokens_per_completion),
            policy_version__min=float(min(versions)),
        )
        sync = duration_pb2.Duration(nanos=2_000)
        result.report.phases.append(experience_pb2.PhaseTime(phase="weight_sync", duration=sync))
        yield result

    async def UpdateWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async def events() -> AsyncIterator[Message]:
            wanted, name = request.weights.policy_version, request.exchange
            if name and await self.taken(name, wanted):
                report = self.report(0)
                report.fetched_bytes["NCCL"] = 1
                yield rollout_pb2.UpdateWeightsResult(policy_version=wanted, report=report)
                return
            if self.mesh.published is None or self.mesh.published[0] != wanted:
                raise PreconditionError(
                    f"version {wanted} is not published any more", reason="WEIGHTS_GONE"
                )
            self.policy_version, self.weight = self.mesh.published
            yield rollout_pb2.UpdateWeightsResult(
                policy_version=self.policy_version,
                report=self.report(0),
                exchange_failure="rank 1 vanished" if name in self.mesh.breaking else "",
            )

        async for response in self.keyed(
            "UpdateWeights", request, context, rollout_pb2.UpdateWeightsResponse, events=events
        ):
            yield response

    async def PublishWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            self.mesh.published = (self.policy_version, self.weight)
            weights = weights_pb2.WeightsRef(
                run_id=request.key.run_id, policy_version=self.policy_version, dtype=request.dtype
            )
            return weights_pb2.PublishWeightsResult(weights=weights, report=self.report(0))

        async for response in self.keyed(
            "PublishWeights", request, context, weights_pb2.PublishWeightsResponse, work
        ):
            yield response

    async def ReadBatch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            prompts, kind = request.rows, request.kind
            rows_a_prompt = 1 if kind == data_pb2.READ_KIND_DEMONSTRATION else 2
            second = -1.0 if kind == data_pb2.READ_KIND_PREFERENCE else 0.0
            numbers = range(prompts.start, prompts.start + prompts.count)
            ids = [prompt for prompt in numbers for _ in range(rows_a_prompt)]
            columns: dict[str, list[Any]] = dict.fromkeys(DATA_COLUMNS, [0.5] * len(ids))
            columns["prompt_ids"] = ids
            if rows_a_prompt == 2:
                columns |= dict(
                    zip(PAIR_COLUMNS, (ids, [1.0, second] * prompts.count), strict=True)
                )
            return self.experience(request, columns)

        async for response in self.keyed(
            "ReadBatch", request, context, data_pb2.ReadBatchResponse, work
        ):
            yield response


def _sampled(
    pairs: list[tuple[int, int]], weight: float, versions: tuple[int, ...], lineage: int
) -> dict[str, list[Any]]:
    numbers = [completion(weight, prompt, sample + lineage) for prompt, sample in pairs]
    columns: dict[str, list[Any]] = dict.fromkeys(ROLLOUT_COLUMNS, numbers)
    columns["prompt_ids"] = [prompt for prompt, _ in pairs]
    columns["sample_indexes"] = [sample for _, sample in pairs]
    columns["policy_versions"] = [versions] * len(pairs)
    return columns
