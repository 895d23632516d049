"""One service of a run, called directly: the primitives from which a loop is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rolemesh.coordinator.sdk.values.experience import (
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
from rolemesh.coordinator.sdk.weight_calls import WeightCalls
from rolemesh.rpc.calls.service_client import to_algorithm_part
from rolemesh.rpc.errors import DataLossError
from rolemesh.rpc.experience.columns import Columns
from rolemesh.v1 import data_pb2, experience_pb2, rollout_pb2, trainer_pb2


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
        return Experience(await self._call(self._client.put, self._new_key("put"), columns))

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
        return await self._call(
            self._client.release,
            self._mesh.run_id,
            self._mesh.epoch,
            experience_ids=experience_ids or (),
            through_step=self._mesh.step if through_step is None else through_step,
        )

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
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
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
            stop: Texts that end a completion, and stay in it.
            stop_token_ids: Tokens that do.
        """
        sampling = rollout_pb2.Sampling(
            samples_per_prompt=samples_per_prompt,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            greedy=greedy,
            stop=stop,
            stop_token_ids=stop_token_ids,
        )
        asked = (
            prompts.to_proto()
            if isinstance(prompts, PromptSlice)
            else rollout_pb2.GivenPrompts(
                prompts=[_given_prompt(place, prompt) for place, prompt in enumerate(prompts)]
            )
        )
        key = self._new_key("generate")
        return _experience(await self._call(self._client.generate, key, asked, sampling))

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
        key, number = self._new_key("read"), data_pb2.ReadKind.Value(name)
        return _experience(await self._call(self._client.read_batch, key, rows.to_proto(), number))

    # --- scores ---

    async def compute_logprobs(
        self,
        experience: Experience,
        column: str,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        without_adapter: bool = False,
        top_k: int = 0,
        as_teacher: bool = False,
    ) -> Experience:
        """Log-prob of every completion token under its policy, as the column of that name.

        Without its adapter the base alone scores: the reference of a policy that trains one. With
        top_k also the likeliest tokens at each place, int32 of that width, as the column
        `<column>_top_ids`, and their log-probs as `<column>_top`. An actor scores as its own
        teacher with as_teacher, as `teacher` of its section says.
        """
        result = await self._call(
            self._client.compute_logprobs,
            self._new_key("compute_logprobs"),
            experience.reference,
            column,
            temperature=temperature,
            with_entropy=with_entropy,
            without_adapter=without_adapter,
            top_k=top_k,
            as_teacher=as_teacher,
        )
        return _experience(result)

    async def compute_values(self, experience: Experience) -> Experience:
        """The value before every completion token, as the column "values"."""
        key = self._new_key("compute_values")
        return _experience(await self._call(self._client.compute_values, key, experience.reference))

    async def compute_reward(
        self, experience: Experience, *, pass_at: Sequence[int] = ()
    ) -> Experience:
        """A reward for every trajectory, as the column "rewards" (of a cost: "costs").

        Args:
            experience: What to judge.
            pass_at: Also reports the metrics "pass@<k>" for these k.
        """
        result = await self._call(
            self._client.compute_reward,
            self._new_key("compute_reward"),
            experience.reference,
            pass_at=pass_at,
        )
        return _experience(result)

    async def judge(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """A reward for every trajectory that is sent along, 4 MiB in all."""
        key, sent = self._new_key("judge"), [one.to_proto() for one in trajectories]
        result = await self._call(self._client.judge, key, sent)
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
        result = await self._call(
            self._client.compute_advantages,
            self._new_key("compute_advantages"),
            experience.reference,
            _part(estimator),
            None if baseline is None else baseline.reference,
        )
        return _experience(result)

    async def select_groups(
        self, experience: Experience, rule: Part, *, max_groups: int = 0
    ) -> Selection:
        """Keeps the groups that a rule wants, at most `max_groups` (0: all of them)."""
        result = await self._call(
            self._client.select_groups,
            self._new_key("select_groups"),
            experience.reference,
            _part(rule),
            max_groups,
        )
        kept = Experience(result.experience) if result.HasField("experience") else None
        return Selection(kept, result.num_groups, Report.of(result.report))

    async def forward_backward(
        self,
        experience: Experience,
        loss: Part,
        *,
        rows_per_unit: int = 0,
        without_gradients: bool = False,
    ) -> Gradient:
        """Adds gradients of a loss over a batch, or computes it alone; changes no weight.

        Args:
            experience: The batch, with what the loss reads.
            loss: E.g. "sft", or {"type": "ppo_policy", "clip_low": 0.1}.
            rows_per_unit: Neighbouring rows that go through the model together, e.g. pairs: 2.
            without_gradients: Adds no gradient: for the loss of held-out rows.
        """
        result = await self._call(
            self._client.forward_backward,
            self._new_key("forward_backward"),
            experience.reference,
            _part(loss),
            rows_per_unit=rows_per_unit,
            without_gradients=without_gradients,
        )
        return Gradient(Experience(result.outputs), Report.of(result.report))

    async def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        adamw: Mapping[str, float] | None = None,
        expected_policy_version: int | None = None,
    ) -> Update:
        """Applies the gradients: clips, steps, raises the version by one.

        Args:
            learning_rate: Of this step; None: the schedule of the spec.
            adamw: beta1, beta2, eps, weight_decay and max_grad_norm (0: not clipped) of this step,
                all of them; None: those of the spec.
            expected_policy_version: What the weights must be at; None: what was last heard.
        """
        version = await self._expected_version(expected_policy_version)
        key = self._new_key("optim_step")
        step = None if adamw is None else trainer_pb2.AdamwStep(**adamw)
        return self._updated(
            await self._call(self._client.optim_step, key, version, learning_rate, step)
        )

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
        version = await self._expected_version(expected_policy_version)
        result = await self._call(
            self._client.update,
            self._new_key("update"),
            experience.reference,
            _part(loss),
            epochs=epochs,
            mini_batch_rows=experience.num_rows if mini_batch_rows is None else mini_batch_rows,
            expected_policy_version=version,
            rows_per_unit=rows_per_unit,
            auxiliary=[
                trainer_pb2.AuxiliaryLoss(
                    experience=one.experience.reference, loss=_part(one.loss), weight=one.weight
                )
                for one in auxiliary
            ],
        )
        return self._updated(result)


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
    return (
        trainer_pb2.AlgorithmPart(type=part) if isinstance(part, str) else to_algorithm_part(part)
    )
