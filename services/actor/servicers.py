"""The actor: one policy that samples, scores and trains on the same ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from pydantic import ValidationError
from transformers import AutoTokenizer

from rolemesh.engine.data.prompts import PromptSet, Split, load_rows
from rolemesh.engine.experience import Experience
from rolemesh.engine.layout import LayoutError
from rolemesh.engine.mesh import RankMesh
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.folder import check_model_folder
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.sampling import (
    SAMPLING_COLUMNS,
    sample_experience,
    sampling_metrics,
)
from rolemesh.engine.specs import ActorSpec, SamplingSpec
from rolemesh.engine.weights.resharding import Resharder
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.device import rank_device
from rolemesh.services.runtime.errors import describe
from rolemesh.services.runtime.model_role import ModelRole
from rolemesh.services.runtime.model_servicers import (
    LogprobServicer,
    TrainerServicer,
)
from rolemesh.services.runtime.role import InitializeResult, ProgressCallback
from rolemesh.services.runtime.runtime import Call, Context, Runtime
from rolemesh.services.runtime.weights_servicer import WeightsServicer
from rolemesh.v1 import (
    experience_pb2,
    logprob_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

_SPLITS: dict[int, Split] = {
    rollout_pb2.SPLIT_TRAIN: "train",
    rollout_pb2.SPLIT_HELD_OUT: "held_out",
}


class ActorRole(ModelRole):
    """Holds the policy's trainer, its sampler and the prompts.

    Invariant: before a completion is sampled, the sampler holds the trainer's policy_version.
    """

    name = "actor"
    spec_class = ActorSpec

    def __init__(self) -> None:
        super().__init__()
        self._backend: RolloutBackend | None = None
        self._resharder: Resharder | None = None
        self._prompts: PromptSet | None = None
        self._tokenizer: Any = None
        self._is_sampler_stale = False

    def initialize(
        self, spec: ActorSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Loads prompts, policy and sampler, in that order: what is wrong shows soonest."""
        progress("load prompts", 0, 3)
        check_model_folder(spec.model.path)
        self._tokenizer = AutoTokenizer.from_pretrained(
            spec.model.path, local_files_only=True, trust_remote_code=False
        )
        train, held_out = load_rows(spec.data)
        self._prompts = PromptSet(train, held_out, tokenizer=self._tokenizer, seed=run_seed)
        progress("load policy", 1, 3)
        model = CausalLm(spec.model, device=rank_device(), mesh=mesh)
        result = self.train_with(model, spec.optimizer, run_seed)
        progress(f"load {spec.rollout.type}", 2, 3)
        self._backend = make_backend(spec.rollout, spec.model.path, mesh=mesh)
        if mesh.world.size > 1:
            if not self._backend.takes_shards:
                raise LayoutError(
                    f"rollout.type is {spec.rollout.type!r} with {mesh.world.size} ranks: it takes "
                    "whole weights only; set it to 'vllm', or give train one rank"
                )
            self._resharder = Resharder(model, spec.rollout.dtype)
        progress("ready", 3, 3)
        return InitializeResult(
            policy_version=result.policy_version,
            num_parameters=result.num_parameters,
            facts={
                "data.train_prompts": str(len(train)),
                "data.held_out_prompts": str(len(held_out)),
                "rollout": spec.rollout.type,
            },
        )

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves rollout, training, log-probs and weights."""
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
            RolloutServicer(self, runtime), server
        )
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
            TrainerServicer(self, runtime), server
        )
        logprob_pb2_grpc.add_LogprobServiceServicer_to_server(
            LogprobServicer(self, runtime), server
        )
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(
            ActorWeightsServicer(self, runtime), server
        )
        return [
            f"rolemesh.v1.{family}Service"
            for family in ("Rollout", "Trainer", "Logprob", "Weights")
        ]

    @property
    def policy(self) -> RankModel:
        """The policy; raises NOT_INITIALIZED before Initialize."""
        return self.trainer.rank_model

    @property
    def backend(self) -> RolloutBackend:
        """The sampler; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._backend)

    def bring_weights(self) -> int:
        """Brings the trainer's weights to the sampler, unless it has them already.

        Returns:
            Bytes that this rank received from others for it.
        """
        is_current = self.backend.policy_version == self.trainer.policy_version
        if is_current and not self._is_sampler_stale:
            return 0
        trainer, version = self.trainer, self.trainer.policy_version
        if self._resharder is None:
            self.backend.update_weights(trainer.named_weights(), version)
        else:
            shards = self._resharder.run(dict(trainer.named_weights()), policy_version=version)
            self.backend.update_shard(shards, version)
        self._is_sampler_stale = False
        return 0 if self._resharder is None else self._resharder.received_bytes

    def weights_replaced(self) -> None:
        """The sampler must take the loaded weights even when their version is the one it has."""
        self._is_sampler_stale = True

    def generate(
        self,
        split: Split,
        start: int,
        count: int,
        sampling: SamplingSpec,
        step: int,
        progress: ProgressCallback,
        *,
        only: Sequence[int],
    ) -> Experience:
        """Samples completions for the prompts at start..start+count-1.

        Of these the ones numbered in `only`: another generation replica samples the others.
        """
        prompts = self.initialized(self._prompts).slice(split, start, count)
        return sample_experience(
            self.backend,
            prompts,
            sampling,
            run_seed=self.run_seed,
            step=step,
            tokenizer=self._tokenizer,
            progress=progress,
            only=only,
        )

    def sleep(self) -> int:
        """Moves trainer and sampler to host memory."""
        return super().sleep() + self.backend.sleep()

    def wake(self) -> int:
        """Brings trainer and sampler back."""
        return super().wake() + self.backend.wake()

    def close(self) -> None:
        """Ends the sampler and drops the weights."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        if self._resharder is not None:
            self._resharder.close()
            self._resharder = None
        super().close()


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """RolloutService over the actor's sampler."""

    def __init__(self, role: ActorRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """See rollout.proto."""

        async def work(call: Call) -> Message:
            sampling = _sampling(request.sampling)
            if request.prompts.split not in _SPLITS:
                raise InvalidRequestError(
                    "prompts.split is not set: give SPLIT_TRAIN or SPLIT_HELD_OUT",
                    reason="SPLIT_INVALID",
                )
            with call.phase("weight_sync"):
                received = await call.compute(self._role.bring_weights)
            prompts = self._runtime.share("3D_ALL_MICRO_DP", [1] * request.prompts.count)
            batch = await call.compute(
                self._role.generate,
                _SPLITS[request.prompts.split],
                request.prompts.start,
                request.prompts.count,
                sampling,
                request.key.step,
                call.progress,
                only=prompts.rows,
            )
            share = prompts.times(sampling.samples_per_prompt)
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, batch, share=share),
                report=call.report(
                    {"weight_sync_bytes": received}, batch.num_tokens if share.counts else 0
                ),
            )

        async def summarise(result: experience_pb2.ExperienceResult, call: Call) -> None:
            sampled = await self._runtime.pull(result.experience, SAMPLING_COLUMNS, call)
            result.report.metrics.update(sampling_metrics(sampled))

        async for response in self._runtime.keyed(
            request, context, rollout_pb2.GenerateResponse, work, finish=summarise
        ):
            yield response


class ActorWeightsServicer(WeightsServicer):
    """WeightsService that also knows the sampler's weights."""

    def __init__(self, role: ActorRole, runtime: Runtime) -> None:
        super().__init__(role, runtime)
        self._actor = role

    async def _checksums(
        self, holder: weights_pb2.WeightsHolder.ValueType
    ) -> weights_pb2.GetChecksumsResponse:
        if holder != weights_pb2.WEIGHTS_HOLDER_SAMPLER:
            return await super()._checksums(holder)
        backend = self._actor.backend
        checksums = await self._runtime.compute.run(backend.weight_checksums)
        return weights_pb2.GetChecksumsResponse(
            checksums=checksums, policy_version=backend.policy_version
        )


def _sampling(sampling: rollout_pb2.Sampling) -> SamplingSpec:
    try:
        return SamplingSpec(
            samples_per_prompt=sampling.samples_per_prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            greedy=sampling.greedy,
        )
    except ValidationError as error:
        raise InvalidRequestError(describe(error).message, reason="SAMPLING_INVALID") from error
