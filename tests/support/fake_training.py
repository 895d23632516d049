"""Judging and training of a fake role."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from support.fake_core import FakeCore, manifest_digest
from support.fake_models import STRIDE, reward_of

from rolemesh.rpc.errors import NotFoundError, PreconditionError
from rolemesh.v1 import (
    logprob_pb2,
    reward_pb2,
    trainer_pb2,
    value_pb2,
    weights_pb2,
)

MADE_BY: dict[str, tuple[str, ...]] = {
    "gae": ("advantages", "returns", "token_rewards"),
    "safe_rlhf": ("advantages", "returns", "token_rewards"),
    "online_dpo": ("pair_ids", "preference"),
    "kto": ("kl_reference_point",),
    "reverse_kl": ("advantages",),
}
"""Columns that estimators make; others make advantages and token_rewards."""


class FakeTraining(FakeCore):
    """Scores, rewards, advantages, updates and folders."""

    async def ComputeValues(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rows = [self.weight for _ in self.mesh.values(request.experience, "tokens")]
            return self.experience(request, {"values": rows})

        async for response in self.keyed(
            "ComputeValues", request, context, value_pb2.ComputeValuesResponse, work
        ):
            yield response

    async def ComputeLogprobs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            rows = [-0.5 for _ in self.mesh.values(request.experience, "tokens")]
            # What a teacher finds likeliest has several elements a token, which no fake reads.
            top = ("_top_ids", "_top") if request.top_k else ()
            names = (request.column, *(f"{request.column}{name}" for name in top))
            return self.experience(request, dict.fromkeys(names, rows))

        async for response in self.keyed(
            "ComputeLogprobs", request, context, logprob_pb2.ComputeLogprobsResponse, work
        ):
            yield response

    async def ComputeReward(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            numbers = self.mesh.values(request.experience, "tokens")
            rows = [reward_of(number) for number in numbers][: len(numbers) - self.rows_dropped]
            error = statistics.stdev(rows) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
            passed = {f"pass__{k}": 0.5 for k in request.pass_at}
            column = "costs" if self.role == "cost" else "rewards"
            sources = self.spec.get("source", {}).get("rewards", ())
            parts = [one["name"] for one in sources]
            return self.experience(
                request,
                {column: rows, **{f"reward/{name}": rows for name in parts}},
                reward__mean=statistics.fmean(rows),
                reward__standard_error=error,
                **passed,
            )

        async for response in self.keyed(
            "ComputeReward", request, context, reward_pb2.ComputeRewardResponse, work
        ):
            yield response

    async def ComputeAdvantages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            columns, estimator = request.experience, request.estimator.type
            rows = [0.5] * columns.num_rows
            if estimator in ("gae", "safe_rlhf"):
                rewards = self.mesh.values(columns, "rewards")
                values = self.mesh.values(columns, "values")
                rows = [reward - value for reward, value in zip(rewards, values, strict=True)]
            made = MADE_BY.get(estimator, ("advantages", "token_rewards"))
            return self.experience(request, dict.fromkeys(made, rows), kl__mean=0.25)

        async for response in self.keyed(
            "ComputeAdvantages", request, context, trainer_pb2.ComputeAdvantagesResponse, work
        ):
            yield response

    async def SelectGroups(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            given = request.experience
            prompts = self.mesh.values(given, "prompt_ids")
            wanted = [p for p in dict.fromkeys(prompts) if self.mesh.is_wanted(p)]
            wanted = wanted[: request.max_groups or None]
            result = trainer_pb2.SelectGroupsResult(
                num_groups=len(wanted), report=self.report(len(prompts))
            )
            if wanted:
                names = [column.name for group in given.groups for column in group.columns]
                kept = [row for row, prompt in enumerate(prompts) if prompt in wanted]
                columns = {
                    name: [self.mesh.values(given, name)[row] for row in kept] for name in names
                }
                result.experience.CopyFrom(self.publish(request.key, columns))
            return result

        async for response in self.keyed(
            "SelectGroups", request, context, trainer_pb2.SelectGroupsResponse, work
        ):
            yield response

    async def Update(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            if request.expected_policy_version != self.policy_version:
                raise PreconditionError(
                    f"the weights are at {self.policy_version}", reason="VERSION_MISMATCH"
                )
            if self.role == "critic":
                self.weight += 0.5 * statistics.fmean(
                    self.mesh.values(request.experience, "returns")
                )
            else:
                self.weight += STRIDE * statistics.fmean(
                    math.copysign(1, 1 - number)
                    for number in self.mesh.values(request.experience, "tokens")
                )
            num_rows = request.experience.num_rows
            self.policy_version += request.epochs * math.ceil(num_rows / request.mini_batch_rows)
            only_actor = {"entropy": 1.5} if self.role == "actor" else {}
            return trainer_pb2.UpdateResult(
                policy_version=self.policy_version,
                report=self.report(num_rows, grad_norm=0.5, **only_actor),
                expert_loads=self.mesh.loads(self.role, self.policy_version),
            )

        async for response in self.keyed(
            "Update", request, context, trainer_pb2.UpdateResponse, work
        ):
            yield response

    async def ForwardBackward(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            # A run asks for gradients with its updates alone.
            assert request.without_gradients
            loss = 1.0 - self.weight
            return trainer_pb2.ForwardBackwardResult(
                report=self.report(request.experience.num_rows, loss=loss, preference_accuracy=0.5)
            )

        async for response in self.keyed(
            "ForwardBackward", request, context, trainer_pb2.ForwardBackwardResponse, work
        ):
            yield response

    def _written(
        self, directory: str, *, replaces: bool, cut: int | None = None
    ) -> weights_pb2.CheckpointResult:
        """Writes what is held, or the cut of a step."""
        weight, version = self.weight, self.policy_version
        if cut is not None:
            if cut not in self.mesh.cuts[self.service]:
                raise NotFoundError(f"no cut of step {cut}", reason="CUT_NOT_FOUND")
            weight, version = self.mesh.cuts[self.service][cut]
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=replaces)
        state = {"weight": weight, "policy_version": version}
        text = json.dumps(state)
        (folder / "weight.json").write_text(text)
        manifest = {"files": {"weight.json": {"sha256": hashlib.sha256(text.encode()).hexdigest()}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return weights_pb2.CheckpointResult(
            policy_version=version,
            num_bytes=1,
            manifest_sha256=manifest_digest(folder),
            from_cut=cut is not None,
        )

    async def SaveCheckpoint(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self.keyed(
            "SaveCheckpoint",
            request,
            context,
            weights_pb2.SaveCheckpointResponse,
            lambda: self._written(
                request.directory,
                replaces=False,
                cut=request.key.step if request.from_cut else None,
            ),
        ):
            yield response

    async def Export(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self.keyed(
            "Export",
            request,
            context,
            weights_pb2.ExportResponse,
            # A run that was stopped and goes on exports once more.
            lambda: self._written(request.directory, replaces=True),
        ):
            yield response
