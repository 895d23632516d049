"""One service of a run, called directly: the primitives from which a loop is written."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rolemesh.coordinator.sdk.experience import (
    Auxiliary,
    Experience,
    Gradient,
    Part,
    Prompt,
    PromptSlice,
    Report,
    Rewards,
    Selection,
    Trajectory,
    Update,
)
from rolemesh.coordinator.sdk.service_calls import to_struct
from rolemesh.coordinator.sdk.weight_calls import WeightCalls
from rolemesh.rpc.columns import Columns, encode
from rolemesh.rpc.errors import DataLossError
from rolemesh.v1 import (
    data_pb2,
    data_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2,
    logprob_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
)


class AsyncRole(WeightCalls):
    """A service of a mesh. Made by AsyncMesh; owner: the mesh's loop.

    Every call raises a RolemeshError. One that changes something carries a key of its own, made
    here: it is repeated under the same key while the service does not answer, and the service does
    it once. A call that the service does not serve raises UnsupportedError.
    """

    async def put(self, columns: Columns) -> Experience:
        """Has it hold rows of the caller, for every call that takes experience.

        Args:
            columns: Over the rows of a batch. Those that belong to a batch that services hold
                already, e.g. rewards, may come alone: `batch | await actor.put(rewards)`.

        Raises:
            ValueError: A dtype that may not travel.
        """
        header, _ = encode(columns)
        opening = experience_pb2.PutOpening(key=self._new_key("put"), header=header)

        async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
            yield experience_pb2.PutRequest(opening=opening)
            for chunk in encode(columns)[1]:
                yield experience_pb2.PutRequest(chunk=chunk)

        stub: Any = experience_pb2_grpc.ExperienceServiceStub(self._channel)
        answer = await self._mesh.call(lambda _, **how: stub.Put(requests(), **how), None)
        return Experience(answer.experience)

    async def release(
        self, experience_ids: Sequence[str] | None = None, *, through_step: int | None = None
    ) -> int:
        """Has it drop experience; returns the bytes freed.

        Args:
            experience_ids: Ids of shards; None: all of the run up to `through_step`.
            through_step: The last step that is dropped; None: the current one.
        """
        if experience_ids is not None and not experience_ids:
            return 0  # on the wire no ids are all of them
        stub = experience_pb2_grpc.ExperienceServiceStub(self._channel)
        request = experience_pb2.ReleaseRequest(
            run_id=self._mesh.run_id,
            experience_ids=experience_ids,
            through_step=self._mesh.step if through_step is None else through_step,
            fencing_epoch=self._mesh.epoch,
        )
        released: int = (await self._mesh.call(stub.Release, request)).released_bytes
        return released

    async def sample(
        self,
        prompts: PromptSlice | Sequence[Prompt | str | Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_new_tokens: int = 256,
        greedy: bool = False,
    ) -> Experience:
        """Samples completions, with the newest weights. Columns: see RolloutService.Generate.

        Draws follow from the run's seed, the step, the prompt's id and the sample's number: the
        same prompts in another step give other completions, in the same step the same ones.

        Args:
            prompts: Positions in the data of the service; or prompts of the caller: texts of a
                user, or tokens, 4 MiB in all.
            samples_per_prompt: Completions of each prompt, neighbours in the result.
            temperature: > 0.
            top_p: Nucleus, 0 < top_p <= 1.
            top_k: Tokens kept, or -1 for all.
            max_new_tokens: Longest completion.
            greedy: Takes the likeliest token each time.
        """
        request = rollout_pb2.GenerateRequest(
            key=self._new_key("generate"),
            sampling=rollout_pb2.Sampling(
                samples_per_prompt=samples_per_prompt,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                greedy=greedy,
            ),
        )
        if isinstance(prompts, PromptSlice):
            request.prompts.CopyFrom(prompts.to_proto())
        else:
            request.given.prompts.extend(
                _given_prompt(place, prompt) for place, prompt in enumerate(prompts)
            )
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        return _experience(await self._streamed(stub.Generate, request))

    async def read(self, rows: PromptSlice, kind: str = "demonstration") -> Experience:
        """Makes experience of rows of the service's data, whose completions are given.

        Args:
            rows: Which rows.
            kind: "demonstration", "preference" or "judgement".

        Raises:
            ValueError: The kind is unknown.
        """
        name = f"READ_KIND_{kind.upper()}"
        if name not in data_pb2.ReadKind.keys()[1:]:
            raise ValueError(f"kind is {kind!r}: give demonstration, preference or judgement")
        request = data_pb2.ReadBatchRequest(
            key=self._new_key("read"), rows=rows.to_proto(), kind=data_pb2.ReadKind.Value(name)
        )
        stub = data_pb2_grpc.DataServiceStub(self._channel)
        return _experience(await self._streamed(stub.ReadBatch, request))

    # --- scores ---

    async def compute_logprobs(
        self,
        experience: Experience,
        column: str,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Experience:
        """Log-prob of every completion token under its policy, as the column of that name."""
        request = logprob_pb2.ComputeLogprobsRequest(
            key=self._new_key("compute_logprobs"),
            experience=experience.reference,
            column=column,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        stub = logprob_pb2_grpc.LogprobServiceStub(self._channel)
        return _experience(await self._streamed(stub.ComputeLogprobs, request))

    async def compute_values(self, experience: Experience) -> Experience:
        """The value before every completion token, as the column "values"."""
        request = value_pb2.ComputeValuesRequest(
            key=self._new_key("compute_values"), experience=experience.reference
        )
        stub = value_pb2_grpc.ValueServiceStub(self._channel)
        return _experience(await self._streamed(stub.ComputeValues, request))

    async def compute_reward(
        self, experience: Experience, *, pass_at: Sequence[int] = ()
    ) -> Experience:
        """A reward for every trajectory, as the column "rewards" (of a cost: "costs").

        Args:
            experience: What to judge.
            pass_at: Also reports the metrics "pass@<k>" for these k.
        """
        request = reward_pb2.ComputeRewardRequest(
            key=self._new_key("compute_reward"), experience=experience.reference, pass_at=pass_at
        )
        stub = reward_pb2_grpc.RewardServiceStub(self._channel)
        return _experience(await self._streamed(stub.ComputeReward, request))

    async def judge(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """A reward for every trajectory that is sent along, 4 MiB in all."""
        request = reward_pb2.ComputeRewardRequest(
            key=self._new_key("judge"),
            trajectories=reward_pb2.TrajectoryBatch(
                trajectories=[one.to_proto() for one in trajectories]
            ),
        )
        stub = reward_pb2_grpc.RewardServiceStub(self._channel)
        result = await self._streamed(stub.ComputeReward, request)
        if len(result.rewards) != len(trajectories):
            raise DataLossError(
                f"{self.name} gave {len(result.rewards)} rewards for {len(trajectories)} "
                "trajectories",
                reason="REWARD_INVALID",
            )
        return Rewards(
            np.array(result.rewards, dtype=np.float32), MappingProxyType(dict(result.metrics))
        )

    # --- training ---

    async def compute_advantages(
        self, experience: Experience, estimator: Part, *, baseline: Experience | None = None
    ) -> Experience:
        """Advantages, and returns where the estimator has a critic.

        Args:
            experience: With rewards, and what the estimator reads.
            estimator: E.g. "gae", or {"type": "grpo", ...}.
            baseline: Trajectories that the estimator compares with, for those that do.
        """
        request = trainer_pb2.ComputeAdvantagesRequest(
            key=self._new_key("compute_advantages"),
            experience=experience.reference,
            estimator=_part(estimator),
            baseline=None if baseline is None else baseline.reference,
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        return _experience(await self._streamed(stub.ComputeAdvantages, request))

    async def select_groups(
        self, experience: Experience, rule: Part, *, max_groups: int = 0
    ) -> Selection:
        """Keeps the groups that a rule wants, at most `max_groups` (0: all of them)."""
        request = trainer_pb2.SelectGroupsRequest(
            key=self._new_key("select_groups"),
            experience=experience.reference,
            rule=_part(rule),
            max_groups=max_groups,
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        result = await self._streamed(stub.SelectGroups, request)
        kept = Experience(result.experience) if result.HasField("experience") else None
        return Selection(kept, result.num_groups, Report.of(result.report))

    async def forward_backward(
        self, experience: Experience, loss: Part, *, rows_per_unit: int = 0
    ) -> Gradient:
        """Adds gradients of a loss over a batch; changes no weight.

        Args:
            experience: The batch, with what the loss reads.
            loss: E.g. "sft", or {"type": "ppo_policy", "clip_low": 0.1}.
            rows_per_unit: Neighbouring rows that go through the model together, e.g. pairs: 2.
        """
        request = trainer_pb2.ForwardBackwardRequest(
            key=self._new_key("forward_backward"),
            experience=experience.reference,
            loss=_part(loss),
            rows_per_unit=rows_per_unit,
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        result = await self._streamed(stub.ForwardBackward, request)
        return Gradient(Experience(result.outputs), Report.of(result.report))

    async def optim_step(
        self, *, learning_rate: float | None = None, expected_policy_version: int | None = None
    ) -> Update:
        """Applies the gradients: clips, steps, raises the version by one.

        Args:
            learning_rate: Of this step; None: the schedule of the spec.
            expected_policy_version: What the weights must be at; None: what was last heard.
        """
        request = trainer_pb2.OptimStepRequest(
            key=self._new_key("optim_step"),
            expected_policy_version=await self._expected_version(expected_policy_version),
            learning_rate=learning_rate,
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        return self._updated(await self._mesh.call(stub.OptimStep, request))

    async def update(
        self,
        experience: Experience,
        loss: Part,
        *,
        epochs: int = 1,
        mini_batch_rows: int | None = None,
        rows_per_unit: int = 0,
        auxiliary: Sequence[Auxiliary] = (),
        expected_policy_version: int | None = None,
    ) -> Update:
        """The fused update: forward_backward and optim_step for each epoch and mini-batch.

        Args:
            experience: The batch, with what the loss reads.
            loss: As of forward_backward.
            epochs: Passes over the batch.
            mini_batch_rows: Rows of one optimizer step; None: all of them.
            rows_per_unit: As of forward_backward.
            auxiliary: Further losses over other rows.
            expected_policy_version: As of optim_step.
        """
        request = trainer_pb2.UpdateRequest(
            key=self._new_key("update"),
            experience=experience.reference,
            loss=_part(loss),
            epochs=epochs,
            mini_batch_rows=experience.num_rows if mini_batch_rows is None else mini_batch_rows,
            expected_policy_version=await self._expected_version(expected_policy_version),
            rows_per_unit=rows_per_unit,
            auxiliary=[
                trainer_pb2.AuxiliaryLoss(
                    experience=one.experience.reference, loss=_part(one.loss), weight=one.weight
                )
                for one in auxiliary
            ],
        )
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        return self._updated(await self._streamed(stub.Update, request))


def _experience(result: experience_pb2.ExperienceResult) -> Experience:
    return Experience(result.experience, Report.of(result.report))


def _given_prompt(place: int, prompt: Prompt | str | Sequence[int]) -> rollout_pb2.GivenPrompt:
    if isinstance(prompt, str):
        prompt = Prompt(text=prompt)
    elif not isinstance(prompt, Prompt):
        prompt = Prompt(tokens=prompt)
    return rollout_pb2.GivenPrompt(
        prompt_id=place if prompt.prompt_id is None else prompt.prompt_id,
        tokens=prompt.tokens,
        text=prompt.text,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
    )


def _part(part: Part) -> trainer_pb2.AlgorithmPart:
    if isinstance(part, str):
        return trainer_pb2.AlgorithmPart(type=part)
    if "type" not in part:
        raise ValueError(f'a part is {dict(part)!r}: give its name as "type"')
    parameters = {name: value for name, value in part.items() if name != "type"}
    return trainer_pb2.AlgorithmPart(type=part["type"], parameters=to_struct(parameters))
