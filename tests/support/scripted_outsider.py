"""A server of another make, right in every respect but those that it is told to get wrong.

Its language model is a table of bigrams, so that it can reward, score, value and sample without
torch.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
from support.scripted_core import OutsiderCore
from support.scripted_routes import routed, weights_of

from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    PreconditionError,
)
from rolemesh.rpc.experience.columns import ColumnData, ColumnKind, Columns
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
)

VOCABULARY = 256


class ScriptedOutsider(OutsiderCore):
    """Every role. `faults` are names that the code looks up."""

    families: ClassVar = {
        "reward": ("RewardService",),
        "reference": ("LogprobService",),
        "teacher": ("LogprobService",),
        "critic": ("ValueService", "TrainerService", "WeightsService"),
        "actor": ("RolloutService", "LogprobService"),
        "rollout": ("RolloutService", "WeightsService"),
    }

    def __init__(self, role: str, *faults: str, inline: bool = False) -> None:
        super().__init__(role, *faults, inline=inline)
        generator = np.random.default_rng(0)
        self._logits = generator.standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)
        self._weight = 0.0
        self._gradient: float | None = None

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
        is_known = 0 <= request.top_k <= min(MAX_WIDTH, VOCABULARY)
        if not self.has("any_top_k") and (not is_known or (request.top_k and request.with_entropy)):
            raise InvalidRequestError("top_k", reason="SPEC_INVALID")

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
            if request.top_k > 0:
                columns |= await self._likeliest(request, scores)
            made, rows = Columns(columns), None
            has_route = request.HasField("route") and not self.has("ignores_route")
            if has_route:
                metadata = (await self._pull(request.experience, ["metadata"]))["metadata"]
                weights = weights_of(request.route, metadata.strings(), self.has)
                made = routed(request, made, weights, self.has)
                rows = range(made.num_rows) if self.has("scores_all_rows") else [*weights]
            return experience_pb2.ExperienceResult(
                experience=self._publish(request.key, made, rows),
                is_part=has_route and not self.has("forgets_it_is_part"),
            )

        events = self._streamed(request, logprob_pb2.ComputeLogprobsResponse, work)
        async for event in events:
            yield event

    async def _likeliest(self, request: Any, scores: Any) -> dict[str, ColumnData]:
        ids = np.argsort(-scores, axis=1, kind="stable")[:, : request.top_k].astype(np.int32)
        if self.has("least_likely_first"):
            ids = ids[:, ::-1]
        top = np.take_along_axis(scores, ids, 1)
        if self.has("among_themselves"):
            top = top - np.log(np.exp(top).sum(1, keepdims=True)) + 0.1
        if self.has("one_id"):
            ids = np.repeat(ids[:, :1], request.top_k, 1)
        if self.has("ids_from_one"):
            ids = ids + 1
        if self.has("narrow"):
            ids, top = ids[:, :-1], top[:, :-1]
        batch = await self._pull(request.experience, ["tokens", "prompt_lengths"])
        shift = 0 if self.has("of_the_next") else 1
        places = [
            tokens[int(cut) - shift : len(tokens) - shift]
            for tokens, cut in zip(
                batch["tokens"].rows(), batch["prompt_lengths"].values, strict=True
            )
        ]
        offsets = np.cumsum([0, *map(len, places)])
        before = np.concatenate(places)
        kind = ColumnKind.COMPLETION
        return {
            f"{request.column}_top_ids": ColumnData(kind, ids[before], offsets),
            f"{request.column}_top": ColumnData(kind, top[before], offsets),
        }

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
            mean = float(batch["returns"].values.mean())
            if not request.without_gradients or self.has("learns_from_looking"):
                self._gradient = mean
            self._weight += self.has("moves_early")
            loss = float("nan") if self.has("nan_metric") else mean
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
        return {
            "Generate": self._stream(rollout_pb2.GenerateRequest, self._generate),
            "UpdateWeights": self._stream(rollout_pb2.UpdateWeightsRequest, self._update_weights),
        }

    async def _update_weights(self, request: Any) -> AsyncIterator[Any]:
        async def work() -> Any:
            weights = request.weights
            box = weights_pb2.WeightsBox(parameter="weight", start=[0], stop=[1])
            async with open_channel(weights.addresses[0]) as channel:
                payload = await ServiceClient(channel).fetch_weights(
                    weights.run_id, weights.policy_version, [box], 4
                )
            self._weight = float(np.frombuffer(payload, "<f4")[0])
            self.version = weights.policy_version
            return rollout_pb2.UpdateWeightsResult(
                policy_version=0 if self.has("old_version") else self.version
            )

        async for event in self._streamed(request, rollout_pb2.UpdateWeightsResponse, work):
            yield event

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
        if self.role == "rollout" and not self.version and not self.has("samples_anyway"):
            raise PreconditionError("no weights came yet", reason="WEIGHTS_STALE")
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
