"""RolloutService over any role that samples: the actor, or a rollout role of its own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import Message

from rolemesh.engine.data.prompts import PromptSet, load_prompts
from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.experience import Experience
from rolemesh.engine.model_folders.model_files import check_model_files
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.agreement.probe import LONG_PROBE_TOKENS
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.sampling import (
    SAMPLING_COLUMNS,
    OnBlock,
    check_block_rows,
    sample_experience,
    sampling_metrics,
)
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.runner import SessionRunner
from rolemesh.engine.specs import (
    AgentSpec,
    DataSpec,
    EnvironmentSpec,
    ModelSpec,
    PythonEnvironmentSpec,
    SamplingSpec,
)
from rolemesh.engine.specs.roles import ModelFolderSpec
from rolemesh.rpc.errors import InvalidRequestError, UnsupportedError
from rolemesh.rpc.experience.references import merge_parts, shards_of
from rolemesh.rpc.notes import bounded
from rolemesh.services.runtime.calls.role import ProgressCallback
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer, Runtime, Share
from rolemesh.services.runtime.experience.blocks import BlockParts, block_of
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.server.errors import describe
from rolemesh.services.runtime.servicers.asked_prompts import AskedPrompts, asked_prompts
from rolemesh.v1 import experience_pb2, rollout_pb2, rollout_pb2_grpc

logger = logging.getLogger(__name__)


class PromptSource:
    """Prompts of a run, and the tokenizer of its policy. Owned by the compute thread."""

    def __init__(
        self,
        model: ModelSpec | ModelFolderSpec,
        data: DataSpec,
        run_seed: int,
        pretraining: DataSpec | None = None,
        *,
        max_model_len: int | None = None,
    ) -> None:
        """Loads both, and the rows of pretraining where there are some.

        Args:
            model: Folder of the policy.
            data: Training and held-out rows.
            run_seed: Seed of the run.
            pretraining: Rows of bare text.
            max_model_len: Longest sequence of the role's sampler, in tokens; None: it has none.

        Raises:
            PromptTooLongError: A prompt leaves the sampler no room.
            ModelFolderError: The folder is not a model's.
            NoTokenizerError: Its tokenizer cannot be read.
            EmptyDataError: There is no prompt.
            DataInvalidError: Data cannot be read, or is not what it should be.
        """
        check_model_files(model.path, has_weights=isinstance(model, ModelSpec), has_tokenizer=True)
        self.tokenizer: Any = load_tokenizer(model.path)
        self.prompts: PromptSet = load_prompts(
            data,
            tokenizer=self.tokenizer,
            seed=run_seed,
            pretraining=pretraining,
            max_model_len=max_model_len,
            model=model.path,
        )
        self.run_seed = run_seed
        self.facts = self.prompts.facts()
        """Facts of Initialize."""
        self.episodes: EpisodeRunner | None = None
        """Plays a row with the environment; None: a completion is one turn."""
        self.agents: SessionRunner | None = None
        """Plays rows by programs that own their loop; None: none does."""

    def probe_tokens(self) -> list[int]:
        """A row by which samplers are checked: the first prompts, one behind the other."""
        row: list[int] = []
        for number in range(LONG_PROBE_TOKENS):
            # Behind the last prompt come those of the next epoch.
            row += self.prompts.without_images(self.prompts.slice("train", number, 1)[0].tokens)
            if len(row) >= LONG_PROBE_TOKENS:
                break
        return row[:LONG_PROBE_TOKENS]

    def play(
        self,
        environment: EnvironmentSpec | None,
        max_model_len: int,
        mesh: RankMesh,
        sandbox: Sandbox,
    ) -> None:
        """From now on rows are episodes with this environment, where there is one.

        Args:
            environment: What the policy talks to.
            max_model_len: Longest sequence of the sampler, in tokens.
            mesh: The service's ranks.
            sandbox: Where a user's class runs.

        Raises:
            UserCodeError: The class of the environment cannot be loaded.
            DataInvalidError: The data has images, and the environment is no agent.
        """
        if environment is not None and not isinstance(environment, AgentSpec):
            if self.prompts.has_images:
                raise DataInvalidError(
                    f"data.images is given, but the policy talks to an environment of type "
                    f"{environment.type!r}, and turns with environments show no images: take one "
                    "of both out"
                )
            self.episodes = EpisodeRunner(
                environment,
                self.tokenizer,
                max_model_len,
                sandbox=sandbox,
                group=mesh.generate_tp,
                device=rank_device(),
            )
        if isinstance(environment, PythonEnvironmentSpec):
            self.facts["environment.sandbox"] = str(sandbox)
            if sandbox.lacks:
                logger.warning("an environment of a user runs in the sandbox %s", sandbox)


class SamplingRole(ABC):
    """What RolloutService needs of a role. All but the servicer runs on the compute thread.

    Invariant: before a completion is sampled, `bring_weights` has seen to its weights.
    """

    has_agents = False
    """Whether rows are played by agents, on rank 0."""

    @property
    @abstractmethod
    def backend(self) -> RolloutBackend:
        """The sampler; raises NOT_INITIALIZED before Initialize."""

    @property
    @abstractmethod
    def source(self) -> PromptSource:
        """Prompts and tokenizer; raises NOT_INITIALIZED before Initialize."""

    @abstractmethod
    def bring_weights(self) -> int:
        """Sees to it that the sampler holds the weights to sample with.

        Returns:
            Bytes that this rank received from others for it.

        Raises:
            WeightsStaleError: It cannot.
        """

    def generate(
        self,
        asked: AskedPrompts,
        sampling: SamplingSpec,
        step: int,
        progress: ProgressCallback,
        *,
        lineage: int,
        only: Sequence[int],
        block_rows: int = 0,
        on_block: OnBlock | None = None,
    ) -> Experience:
        """Samples completions for prompts.

        Of these the ones numbered in `only`: another generation replica samples the others.
        `on_block` is handed rows as soon as a block of `block_rows` is finished.
        """
        # Again: between the two turns on the compute thread an update may have had its own. Where
        # there are several ranks nothing comes between, and none of them has anything to bring.
        self.bring_weights()
        source = self.source
        prompts, earlier = asked.of(source.prompts, source.tokenizer)
        return sample_experience(
            self.backend,
            prompts,
            sampling,
            run_seed=source.run_seed,
            step=step,
            lineage=lineage,
            tokenizer=source.tokenizer,
            progress=progress,
            only=only,
            earlier=earlier,
            block_rows=block_rows,
            on_block=on_block,
            episodes=source.episodes,
            agents=source.agents,
            has_images=source.prompts.has_images,
        )


class RolloutServicer(RoleServicer[SamplingRole], rollout_pb2_grpc.RolloutServiceServicer):
    """RolloutService over a role's sampler."""

    def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """See rollout.proto."""

        async def work(call: Call) -> Message:
            sampling = _sampling(request)
            asked = asked_prompts(request, sampling.samples_per_prompt)
            with call.phase("weight_sync"):
                received = await call.compute(self._role.bring_weights)
            prompts = self._runtime.share("3D_ALL_MICRO_DP", [1] * asked.count)
            agents = self._role.source.agents
            if self._role.has_agents:
                prompts = self._runtime.share_of_face(asked.count)
            if self._role.has_agents and request.block_rows:
                raise InvalidRequestError(
                    f"block_rows is {request.block_rows}, but rows are played by agents, which "
                    "make any number of them: leave schedule.sampler.block_rows out",
                    reason="SAMPLING_INVALID",
                )
            share = prompts.times(sampling.samples_per_prompt)
            published = _PublishedBlocks(
                self._runtime, request, share, call, is_whole=agents is not None
            )
            try:
                batch = await call.compute(
                    self._role.generate,
                    asked,
                    sampling,
                    request.key.step,
                    call.progress,
                    lineage=request.key.lineage,
                    only=prompts.rows,
                    block_rows=request.block_rows if published.share.counts else 0,
                    on_block=published.add,
                )
                report = call.report(
                    {
                        "weight_sync_bytes": received,
                        **({} if agents is None else agents.metrics),
                    },
                    batch.num_tokens if published.share.counts else 0,
                )
                report.notes.extend(bounded(() if agents is None else agents.notes))
                return experience_pb2.ExperienceResult(
                    experience=published.whole(batch), report=report
                )
            except BaseException:
                # A repeat samples anew, and no call would ever release these.
                published.drop()
                raise

        async def summarise(result: experience_pb2.ExperienceResult, call: Call) -> None:
            sampled = await self._runtime.pull(result.experience, SAMPLING_COLUMNS, call)
            result.report.metrics.update(call.finite(sampling_metrics(sampled)))

        return self._runtime.keyed(
            request,
            rollout_pb2.GenerateResponse,
            work,
            finish=summarise,
            join_events=BlockParts,
        )

    def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.UpdateWeightsResponse]:
        """See rollout.proto."""
        raise UnsupportedError(
            f"the {self._runtime.role.name} brings its own trainer's weights to its sampler: only "
            "a rollout service takes published ones"
        )


class _PublishedBlocks:
    """The rows of one generation that this rank has published: block by block, or all at once.

    Invariant: each row is in the store once, whether it left with a block or not.
    """

    def __init__(
        self,
        runtime: Runtime,
        request: rollout_pb2.GenerateRequest,
        share: Share,
        call: Call,
        *,
        is_whole: bool = False,
    ) -> None:
        """Begins.

        Args:
            runtime: Of the service.
            request: Of the generation.
            share: Which rows of the batch are this rank's.
            call: Of the request.
            is_whole: Whether all rows are this rank's, however many there come to be.
        """
        self.share = share
        self._is_whole = is_whole
        self._runtime = runtime
        self._request = request
        self._call = call
        self._parts: list[experience_pb2.ExperienceRef] = []

    def add(self, index: int, experience: Experience) -> None:
        """Publishes this rank's rows of a block, and sends them. On the compute thread."""
        block_rows = self._request.block_rows
        rows = [row for row in self.share.rows if row // block_rows == index]
        share = Share(rows=rows, num_rows=self.share.num_rows, counts=True)
        part = self._runtime.publish(self._request.key, experience, share=share)
        self._parts.append(part)
        self._call.tell(block_of(part, index, block_rows))

    def whole(self, batch: Experience) -> experience_pb2.ExperienceRef:
        """This rank's rows, all of them; published here unless blocks have brought them."""
        if self._parts:
            return merge_parts(self._parts)
        share = None if self._is_whole else self.share
        return self._runtime.publish(self._request.key, batch, share=share)

    def drop(self) -> None:
        """Forgets what was published."""
        ids = [shard.experience_id for part in self._parts for shard in shards_of(part)]
        self._runtime.store.release_ids(self._request.key.run_id, ids)


def _sampling(request: rollout_pb2.GenerateRequest) -> SamplingSpec:
    sampling = request.sampling
    try:
        spec = SamplingSpec(
            samples_per_prompt=sampling.samples_per_prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            greedy=sampling.greedy,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
        )
        check_block_rows(request.block_rows, spec)
    except ValueError as error:  # also of pydantic
        raise InvalidRequestError(describe(error).message, reason="SAMPLING_INVALID") from error
    return spec
