"""One service of a run for programs without an event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.coordinator.sdk.async_role import AsyncRole
from rolemesh.coordinator.sdk.values.experience import (
    Auxiliary,
    Experience,
    Gradient,
    Part,
    Prompt,
    PromptSlice,
    Rewards,
    Selection,
    Trajectory,
    Update,
)
from rolemesh.coordinator.sdk.values.services import Capabilities, Initialized, Status
from rolemesh.coordinator.sdk.values.weights import Checkpoint, Checksums, Cut, Manifest, Weights
from rolemesh.rpc.experience.columns import Array, Columns
from rolemesh.rpc.loop_thread import LoopThread


class Role:
    """AsyncRole without await: the same methods with the same arguments."""

    def __init__(self, role: AsyncRole, loop: LoopThread) -> None:
        """Prepares; made by the mesh."""
        self.name = role.name
        """Name of the service, e.g. "actor" or "rollout-1"."""
        self.address = role.address
        self._role = role
        self._loop = loop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r} at {self.address})"

    @property
    def policy_version(self) -> int | None:
        """Version of its weights as last heard; None before."""
        return self._role.policy_version

    # --- written by `make sdk` from the asynchronous class ---

    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._loop.run(self._role.capabilities())

    def status(self) -> Status:
        """How it is right now; also tells it that the run goes on."""
        return self._loop.run(self._role.status())

    def initialize(self, spec: Mapping[str, Any], run_seed: int = 0) -> Initialized:
        """Gives it its part of the run: models and data.

        Args:
            spec: The role's section of a recipe.
            run_seed: 0 <= run_seed < 2^53.
        """
        return self._loop.run(self._role.initialize(spec, run_seed))

    def attach(self, spec: Mapping[str, Any], run_seed: int = 0) -> Initialized:
        """Takes the run over that it holds, under the epoch of this mesh; loads nothing.

        What older epochs made is dropped, but for the weights.

        Args:
            spec: As initialize gave it.
            run_seed: As initialize gave it.
        """
        return self._loop.run(self._role.attach(spec, run_seed))

    def sleep(self) -> int:
        """Moves its weights off the device; returns the bytes that became free."""
        return self._loop.run(self._role.sleep())

    def wake(self) -> int:
        """Brings its weights back; returns the bytes in use again."""
        return self._loop.run(self._role.wake())

    def drain(self, *, exit: bool = False) -> None:
        """Lets it finish and forget the run, or end its process with `exit`."""
        self._loop.run(self._role.drain(exit=exit))

    def put(self, columns: Columns) -> Experience:
        """Has it hold rows of the caller, for every call that takes experience.

        Args:
            columns: Over the rows of a batch. Those that belong to a batch that services hold
                already, e.g. rewards, may come alone: `batch | actor.put(rewards)`.

        Raises:
            ValueError: A dtype that may not travel.
        """
        return self._loop.run(self._role.put(columns))

    def release(
        self, experience_ids: Sequence[str] | None = None, *, through_step: int | None = None
    ) -> int:
        """Has it drop experience; returns the bytes freed.

        Args:
            experience_ids: Ids of shards; None: all of the run up to `through_step`.
            through_step: The last step that is dropped; None: the current one.
        """
        return self._loop.run(self._role.release(experience_ids, through_step=through_step))

    def sample(
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
        return self._loop.run(
            self._role.sample(
                prompts,
                samples_per_prompt=samples_per_prompt,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                greedy=greedy,
                stop=stop,
                stop_token_ids=stop_token_ids,
            )
        )

    def read(self, rows: PromptSlice, kind: str = "demonstration") -> Experience:
        """Makes experience of rows of the service's data, whose completions are given.

        Args:
            rows: Which rows.
            kind: "demonstration", "preference" or "judgement".

        Raises:
            ValueError: The kind is unknown.
        """
        return self._loop.run(self._role.read(rows, kind))

    def compute_logprobs(
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
        return self._loop.run(
            self._role.compute_logprobs(
                experience,
                column,
                temperature=temperature,
                with_entropy=with_entropy,
                without_adapter=without_adapter,
                top_k=top_k,
                as_teacher=as_teacher,
            )
        )

    def compute_values(self, experience: Experience) -> Experience:
        """The value before every completion token, as the column "values"."""
        return self._loop.run(self._role.compute_values(experience))

    def compute_reward(self, experience: Experience, *, pass_at: Sequence[int] = ()) -> Experience:
        """A reward for every trajectory, as the column "rewards" (of a cost: "costs").

        Args:
            experience: What to judge.
            pass_at: Also reports the metrics "pass@<k>" for these k.
        """
        return self._loop.run(self._role.compute_reward(experience, pass_at=pass_at))

    def judge(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """A reward for every trajectory that is sent along, 4 MiB in all."""
        return self._loop.run(self._role.judge(trajectories))

    def compute_advantages(
        self, experience: Experience, estimator: Part, *, baseline: Experience | None = None
    ) -> Experience:
        """Advantages, and returns where the estimator has a critic.

        Args:
            experience: With rewards, and what the estimator reads.
            estimator: E.g. "gae", or {"type": "grpo", ...}.
            baseline: Trajectories that the estimator compares with, for those that do.
        """
        return self._loop.run(
            self._role.compute_advantages(experience, estimator, baseline=baseline)
        )

    def select_groups(
        self, experience: Experience, rule: Part, *, max_groups: int = 0
    ) -> Selection:
        """Keeps the groups that a rule wants, at most `max_groups` (0: all of them)."""
        return self._loop.run(self._role.select_groups(experience, rule, max_groups=max_groups))

    def forward_backward(
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
        return self._loop.run(
            self._role.forward_backward(
                experience, loss, rows_per_unit=rows_per_unit, without_gradients=without_gradients
            )
        )

    def optim_step(
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
        return self._loop.run(
            self._role.optim_step(
                learning_rate=learning_rate,
                adamw=adamw,
                expected_policy_version=expected_policy_version,
            )
        )

    def update(
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
        return self._loop.run(
            self._role.update(
                experience,
                loss,
                epochs=epochs,
                mini_batch_rows=mini_batch_rows,
                rows_per_unit=rows_per_unit,
                auxiliary=auxiliary,
                expected_policy_version=expected_policy_version,
            )
        )

    def get_manifest(self) -> Manifest:
        """Every parameter of its model."""
        return self._loop.run(self._role.get_manifest())

    def get_checksums(self, holder: str = "trainer") -> Checksums:
        """Hashes of the weights that its "trainer" or its "sampler" holds.

        Raises:
            ValueError: The holder is unknown.
        """
        return self._loop.run(self._role.get_checksums(holder))

    def publish_weights(self, dtype: str) -> Weights:
        """Keeps a copy of the trained weights for others, in a dtype, e.g. "bfloat16".

        Raises:
            ValueError: The dtype may not travel.
        """
        return self._loop.run(self._role.publish_weights(dtype))

    def update_weights(self, weights: Weights) -> Update:
        """Brings published weights to the sampler of a rollout service."""
        return self._loop.run(self._role.update_weights(weights))

    def fetch_weights(self, weights: Weights, names: Sequence[str] = ()) -> dict[str, Array]:
        """Whole parameters that it has published, by name; bfloat16 comes as float32.

        Only from a service of one rank, which alone holds parameters whole: of others use export.

        Args:
            weights: What publish_weights answered.
            names: Parameters wanted; empty: all.
        """
        return self._loop.run(self._role.fetch_weights(weights, names))

    def save_state(self, directory: str) -> Checkpoint:
        """Writes all that training goes on from: weights, optimizer, random state, schedule.

        Args:
            directory: Absolute path on the service's host, which must not exist yet.
        """
        return self._loop.run(self._role.save_state(directory))

    def load_state(self, directory: str) -> Checkpoint:
        """Loads what save_state wrote, after checking its hashes."""
        return self._loop.run(self._role.load_state(directory))

    def save_cut(self) -> Cut:
        """Keeps all that training goes on from in host memory, as the cut of the current step.

        It outlives the process. Two cuts are kept: of an even step and of an odd one.
        """
        return self._loop.run(self._role.save_cut())

    def restore_cut(self, step: int) -> Cut:
        """Puts the cut of a step back, also in a new process; cuts of later steps are dropped."""
        return self._loop.run(self._role.restore_cut(step))

    def list_cuts(self) -> tuple[Cut, ...]:
        """The cuts of the run that it can restore, by ascending step."""
        return self._loop.run(self._role.list_cuts())

    def drop_cuts(self) -> None:
        """Removes the cuts of the run, which outlive it otherwise."""
        self._loop.run(self._role.drop_cuts())

    def export(self, directory: str) -> Checkpoint:
        """Writes a Hugging Face folder, which replaces what stands there.

        Args:
            directory: Absolute path on the service's host.
        """
        return self._loop.run(self._role.export(directory))
