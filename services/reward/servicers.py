"""The reward: judges trajectories, pulled by reference or sent inline, and may learn to."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import grpc
import torch
from google.protobuf.message import Message

from rolemesh.engine.algorithms.judged import LOSS_MASK
from rolemesh.engine.data.prompts import Split
from rolemesh.engine.data.trajectories import Kind, read_trajectories
from rolemesh.engine.experience import Experience
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.sources import ClassifierReward, RewardInvalidError, reward_metrics
from rolemesh.engine.specs import (
    ClassifierRewardSpec,
    PythonRewardSpec,
    RewardSpec,
    named_sources,
)
from rolemesh.engine.specs.columns import IS_JUDGED
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.rpc.experience.references import names_of, row_tokens
from rolemesh.rpc.notes import bounded
from rolemesh.services.reward.answer_book import AnswerBook
from rolemesh.services.reward.judging import Judged, OwnSource, RewardSources
from rolemesh.services.reward.outcome import (
    judged_columns,
    judgement_metrics,
    make_sources,
)
from rolemesh.services.reward.outside.answers import Answers, current_answers
from rolemesh.services.reward.outside.base import OutsideRewardError, current_step
from rolemesh.services.reward.outside.counts import RequestObserver
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, add_servicers
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer, Runtime, Share
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.data import DataServicer
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.models import TrainerServicer
from rolemesh.services.runtime.servicers.rollout import PromptSource
from rolemesh.services.runtime.servicers.weights.cut_checkpoints import owner_of_cuts
from rolemesh.services.runtime.servicers.weights.cuts import CutServicer
from rolemesh.services.runtime.servicers.weights.weights import WeightsServicer
from rolemesh.v1 import experience_pb2, operation_pb2, reward_pb2, reward_pb2_grpc

if TYPE_CHECKING:
    from rolemesh.engine.train.trainer import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RewardRole(ModelRole):
    """Holds one reward source, and its trainer if the recipe gives it optimizer and data.

    Invariant: a trained source scores with the current weights of its trainer.
    """

    name = "reward"
    spec_class = RewardSpec
    column: ClassVar[str] = "rewards"
    """The column that it produces."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: RewardSources | None = None
        self._observer: RequestObserver | None = None
        self._learner: ClassifierReward | None = None
        self._data: PromptSource | None = None
        self._answers: AnswerBook | None = None

    @property
    def sources(self) -> RewardSources:
        """The sources of the reward; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._sources)

    @property
    def trainer(self) -> Trainer:
        """The trainer; raises NOT_INITIALIZED, or NOT_TRAINABLE if there is none."""
        return self._trained(self._trainer)

    def initialize(
        self, spec: RewardSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Builds the source, and loads its model if it has one."""
        progress("load reward", 0, 1)
        facts: dict[str, str] = {f"{self.name}.source": spec.source.type}
        if any(isinstance(one.source, PythonRewardSpec) for one in named_sources(spec.source)):
            facts[f"{self.name}.sandbox"] = str(self.sandbox)
            if self.sandbox.lacks:
                logger.warning("functions of users run in the sandbox %s", self.sandbox)
        if (
            spec.optimizer is None
            or spec.data is None
            or not isinstance(spec.source, ClassifierRewardSpec)
        ):
            sources = make_sources(spec.source, rank_device(), mesh, self.sandbox, self._observer)
            sources.open()
            self._sources = sources
            progress("load reward", 1, 1)
            return InitializeResult(facts=facts)
        # Here: most rewards are no model, and theirs start in half the time without.
        from rolemesh.engine.models.scoring_model import ScoreHead, ScoringModel

        self._data = PromptSource(spec.source.model, spec.data, run_seed)
        head = ScoreHead.of_reward(spec.source)
        model = ScoringModel(spec.source.model, head, device=rank_device(), mesh=mesh)
        result = self.train_with(model, spec.optimizer, run_seed)
        self._learner = ClassifierReward(
            spec.source, rank_device(), mesh, trained=super().trainer.rank_model
        )
        self._sources = RewardSources(
            [OwnSource(name=spec.source.type, weight=1.0, reward=self._learner)]
        )
        progress("load reward", 1, 1)
        return replace(result, facts={**facts, **self._data.facts})

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves rewards, training, weights and data; without a trainer only rewards are served."""
        self._observer = runtime.process.metrics
        return add_servicers(
            server,
            RewardServicer(self, runtime),
            TrainerServicer(self, runtime),
            WeightsServicer(self, runtime),
            DataServicer(self, runtime),
            CutServicer(self, runtime),
        )

    def read(self, split: Split, start: int, count: int, kind: Kind) -> Experience:
        """Trajectories to train on, in the tokens that this reward judges."""
        learner, data = self._trained(self._learner), self._trained(self._data)
        batch = read_trajectories(
            data.prompts, split, start, count, kind, max_tokens=learner.max_tokens
        )
        return learner.as_scored(batch)

    def sleep(self) -> int:
        """Moves a trained model to host memory. Others stay, since their weights are small."""
        return 0 if self._trainer is None else super().sleep()

    def wake(self) -> int:
        """Brings back the model that sleep has moved."""
        return 0 if self._trainer is None else super().wake()

    def answers_of(self, owner: SlotOwner, key: operation_pb2.OperationKey) -> Answers | None:
        """What is known of a call's answers from outside. On the compute thread.

        Args:
            owner: This rank in the run.
            key: Of the call.
        """
        if self._answers is None or self._answers.owner != owner:
            self.take_place_of_earlier_run(owner.run_id)
            self._answers = AnswerBook(owner)
        return self._answers.of_call(key)

    def close_cut_slots(self) -> None:
        """Lets slots and answers go; their files stay."""
        super().close_cut_slots()
        if self._answers is not None:
            self._answers.close()
            self._answers = None

    def close(self) -> None:
        """Drops sources, trainer and data."""
        if self._sources is not None:
            self._sources.close()
        self._sources = self._learner = self._data = None
        super().close()

    def _trained(self, part: T | None) -> T:
        """The part; NOT_INITIALIZED before Initialize, NOT_TRAINABLE where nothing is trained."""
        self.initialized(self._sources)
        if part is None:
            raise PreconditionError(
                f"the {self.name} of this run is not trained: give {self.name} a source of type "
                "'classifier', an optimizer and data",
                reason="NOT_TRAINABLE",
            )
        return part


class RewardServicer(RoleServicer[RewardRole], reward_pb2_grpc.RewardServiceServicer):
    """RewardService over a reward source."""

    def ComputeReward(
        self,
        request: reward_pb2.ComputeRewardRequest,
        context: Context,
    ) -> AsyncIterator[reward_pb2.ComputeRewardResponse]:
        """See reward.proto."""

        async def by_reference(call: Call) -> Message:
            current_step.set(request.key.step)
            sources = self._role.sources
            if request.pass_at and sources.full_score is None:
                raise InvalidRequestError(
                    f"pass_at is {list(request.pass_at)}, but this {self._role.name} has no full "
                    "score that a row could reach: leave pass_at out, or take a source that has",
                    reason="PASS_AT_INVALID",
                )
            share, columns = await self._share(request.experience, call)
            if sources.asks_outside and share.counts:
                key = request.key
                owner = owner_of_cuts(self._role, self._runtime, key.run_id)
                current_answers.set(await call.compute(self._role.answers_of, owner, key))
            batch = await self._runtime.pull(request.experience, columns, call, rows=share.rows)
            ids = batch["prompt_ids"].values if sources.may_drop else None
            judged = await self._judged(batch, ids, call, counts=share.counts)
            if judged is None:
                return experience_pb2.ExperienceResult(
                    experience=self._runtime.publish(request.key, batch, share=share),
                    report=call.report({}, 0),
                )
            report = call.report(
                {f"{self._role.name}/{name}": v for name, v in judged.metrics.items()}, 0
            )
            report.notes.extend(bounded(judged.notes))
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(
                    request.key, judged_columns(self._role.column, batch, judged, sources), share
                ),
                report=report,
            )

        async def summarise(result: experience_pb2.ExperienceResult, call: Call) -> None:
            names = names_of(result.experience)
            columns = await self._runtime.pull(
                result.experience, [name for name in names if name != LOSS_MASK], call
            )
            prompt_ids = None
            if request.pass_at:
                prompts = await self._runtime.pull(request.experience, ["prompt_ids"], call)
                prompt_ids = prompts["prompt_ids"].values
            found = judgement_metrics(
                columns,
                self._role.column,
                self._role.name,
                self._role.sources.full_score,
                prompt_ids,
                request.pass_at,
            )
            result.report.metrics.update(call.finite(found))

        async def inline(call: Call) -> Message:
            current_step.set(request.key.step)
            mesh, sources = self._runtime.mesh, self._role.sources
            batch = _experience_of(request.trajectories)
            # One rank answers: ranks agree, and a classifier's scores come from its last stage.
            speaks = mesh.pp.is_last and mesh.tp.index == 0 and mesh.dp.index == 0
            judged = await self._judged(batch, None, call, counts=speaks)
            if judged is None:
                return reward_pb2.Rewards()
            rewards = judged.rewards_B
            return reward_pb2.Rewards(
                rewards=rewards.tolist(),
                metrics=reward_metrics(rewards, sources.full_score, self._role.name),
            )

        kind = request.WhichOneof("input")
        if kind is None or (kind == "trajectories" and not request.trajectories.trajectories):
            raise InvalidRequestError(
                "the request holds no trajectories: set experience or trajectories",
                reason="INPUT_MISSING",
            )
        is_reference = kind == "experience"
        if request.pass_at and not is_reference:
            raise InvalidRequestError(
                "pass_at is set with trajectories, which do not say which are of one prompt: send "
                "an experience, or leave it out",
                reason="PASS_AT_INVALID",
            )
        return self._runtime.keyed(
            request,
            reward_pb2.ComputeRewardResponse,
            by_reference if is_reference else inline,
            finish=summarise if is_reference else None,
        )

    async def _judged(
        self, batch: Experience, prompt_ids: torch.Tensor | None, call: Call, *, counts: bool
    ) -> Judged | None:
        """Judges this rank's rows; returns None if another rank's judgement of them counts.

        Raises:
            OutsideRewardError: A reward from outside failed; on other ranks RewardInvalidError.
        """
        sources, world = self._role.sources, self._runtime.mesh.world
        judged, failure = None, None
        try:
            if counts:
                judged = await sources.judge(batch, call, prompt_ids)
            else:
                await sources.take_part(batch, call)
        except (OutsideRewardError, RewardInvalidError) as error:
            failure = error
        if sources.asks_outside and world.size > 1:
            # If only one rank failed, the ranks would count as diverged, and the service would end.
            told = None if failure is None else str(failure)
            found = await call.compute(gather_facts, told, world, rank_device())
            others = [text for text in found if text is not None]
            if others and failure is None:
                failure = RewardInvalidError(others[0])
        if failure is not None:
            raise failure
        return judged

    async def _share(
        self, ref: experience_pb2.ExperienceRef, call: Call
    ) -> tuple[Share, tuple[str, ...]]:
        """This rank's rows and the columns to read: whole groups if groups may be dropped."""
        sources, lengths, names = self._role.sources, row_tokens(ref), names_of(ref)
        columns = sources.columns_of(names)
        if not sources.may_drop:
            return self._runtime.share("3D_PROTO", lengths), columns
        ids = (await self._runtime.pull(ref, ["prompt_ids"], call))["prompt_ids"].values
        _, group_of_row = torch.unique(ids, return_inverse=True)
        tokens = torch.zeros(int(group_of_row.max()) + 1, dtype=torch.int64)
        tokens.index_add_(0, group_of_row, torch.tensor(lengths))
        groups = self._runtime.share("3D_PROTO", tokens.tolist())
        held = torch.isin(group_of_row, torch.tensor(groups.rows, dtype=torch.int64))
        share = Share(
            rows=held.nonzero().flatten().tolist(), num_rows=len(ids), counts=groups.counts
        )
        before = (IS_JUDGED,) if IS_JUDGED in names else ()
        return share, tuple(dict.fromkeys((*columns, "prompt_ids", LOSS_MASK, *before)))


def _experience_of(batch: reward_pb2.TrajectoryBatch) -> Experience:
    rows = batch.trajectories
    return Experience.of_rows(
        {
            "tokens": [[*row.prompt_tokens, *row.completion_tokens] for row in rows],
            "prompt_lengths": [len(row.prompt_tokens) for row in rows],
            "prompt_text": [row.prompt for row in rows],
            "completion_text": [row.completion for row in rows],
            "answer": [row.answer for row in rows],
            "metadata": [row.metadata_json for row in rows],
        }
    )
