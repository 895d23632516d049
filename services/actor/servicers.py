"""The actor: one policy that samples, scores and trains on the same ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import grpc
from torch.utils.hooks import RemovableHandle

from rolemesh.engine.data.prompts import Split
from rolemesh.engine.data.trajectories import Kind, read_trajectories
from rolemesh.engine.experience import Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.model_folders.model_files import check_sampled
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.agreement.probe import ProbeScores, SamplerCheck, check_sampler
from rolemesh.engine.rollout.agreement.trainer_probe import TrainerProbe
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.specs import ActorSpec, Numerics, RolloutSpec, SelfTeacherSpec
from rolemesh.engine.weights.exchanges.exchange import exchange_plan
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.resharding import Resharder
from rolemesh.engine.weights.reuse import LentWeights, before_each_pass
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.endpoint.role import EndpointRole
from rolemesh.services.endpoint.servicer import EndpointServicer
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, add_servicers
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.data import DataServicer
from rolemesh.services.runtime.servicers.logprobs import (
    STUDENT,
    LogprobServicer,
    Teaching,
    load_teacher_prompts,
)
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.models import TrainerServicer
from rolemesh.services.runtime.servicers.rollout import PromptSource, RolloutServicer
from rolemesh.services.runtime.servicers.weights.cuts import CutServicer
from rolemesh.services.runtime.servicers.weights.exchange import GivingExchangeServicer
from rolemesh.services.runtime.servicers.weights.exchange_ends import Exchanges
from rolemesh.services.runtime.servicers.weights.weights import (
    WeightsServicer,
    checksums_of_sampler,
)
from rolemesh.v1 import weights_pb2


class ActorRole(ModelRole, EndpointRole):
    """Holds the policy's trainer, its sampler and the prompts.

    Invariant: before a completion is sampled, the sampler holds the trainer's policy_version. A
    sampler that can free device memory sleeps while the trainer computes, from its first pass after
    a generation until the next generation brings weights: the two never hold their most at once.
    """

    name = "actor"
    spec_class = ActorSpec
    replays_routes = True

    def __init__(self) -> None:
        super().__init__()
        self._backend: RolloutBackend | None = None
        self._resharder: Resharder | None = None
        self._lent: LentWeights | None = None
        self._rest: RemovableHandle | None = None
        self._source: PromptSource | None = None
        self._teaching: Teaching | None = None
        self._is_sampler_stale = False
        self._probe: TrainerProbe | None = None
        self._check = SamplerCheck()
        self.exchanges = Exchanges()
        """Of this rank, with rollout services."""

    def initialize(
        self, spec: ActorSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Loads code, prompts, policy and sampler, in that order: what is wrong shows soonest."""
        self.own_functions = OwnFunctions(spec.own_functions)
        progress("load prompts", 0, 3)
        self._source = PromptSource(
            spec.model,
            spec.data,
            run_seed,
            pretraining=spec.pretraining_data,
            max_model_len=None if spec.rollout is None else spec.rollout.max_model_len,
        )
        if spec.rollout is not None:
            check_sampled(spec.model.path, spec.rollout.type)
            self._source.play(spec.environment, spec.rollout.max_model_len, mesh, self.sandbox)
        progress("load policy", 1, 3)
        numerics = spec.chosen_numerics
        model = CausalLm(spec.model, device=rank_device(), mesh=mesh, numerics=numerics)
        average = None if spec.teacher is None else spec.teacher.average
        result = self.train_with(model, spec.optimizer, run_seed, average=average)
        self.trainer.own_functions = self.own_functions
        self._teaching = self._as_teacher(spec.teacher, model)
        if spec.rollout is not None:
            progress(f"load {spec.rollout.type}", 2, 3)
            has_endpoint = spec.endpoint is not None
            self._load_sampler(spec.rollout, model, mesh, numerics, has_endpoint=has_endpoint)
        door = self.open_endpoint(spec.endpoint, spec.environment, self.sandbox, spec.data)
        progress("ready", 3, 3)
        sampler = "none" if spec.rollout is None else spec.rollout.type
        return replace(result, facts={**self._source.facts, **door, "rollout": sampler})

    def _as_teacher(self, spec: SelfTeacherSpec | None, model: CausalLm) -> Teaching | None:
        """How the policy scores as its own teacher; None where nothing asks for it."""
        if spec is None:
            return None
        prompts = None
        if spec.prompt is not None:
            prompts = load_teacher_prompts(spec.prompt, self.source.tokenizer, model)
        return Teaching(prompts, nullcontext if spec.average is None else self.trainer.averaged)

    def teaching(self, as_teacher: bool) -> Teaching:
        """As its own teacher or as the student; see `PolicyHolder`."""
        if not as_teacher:
            return STUDENT
        if self._teaching is None:
            raise InvalidRequestError(
                "as_teacher is true, but the actor was initialised without teacher: give it "
                "teacher.average or teacher.prompt, or leave as_teacher out",
                reason="SPEC_INVALID",
            )
        return self._teaching

    def _load_sampler(
        self,
        spec: RolloutSpec,
        model: CausalLm,
        mesh: RankMesh,
        numerics: Numerics,
        *,
        has_endpoint: bool,
    ) -> None:
        adapter = model.spec.adapter
        self._backend = make_backend(
            spec,
            model.spec.path,
            mesh=mesh,
            device=rank_device(),
            numerics=numerics,
            adapter=adapter,
            shares_engine=self.is_shared,
            has_endpoint=has_endpoint,
        )
        keeper = self._backend if isinstance(self._backend, HfBackend) else None
        if self._backend.yields_to_training:
            self._rest = before_each_pass(model, self._put_sampler_to_sleep)
        if mesh.world.size > 1:
            dtype = spec.dtype if adapter is None else "float32"
            is_whole = self._backend.takes_whole
            self._resharder = Resharder(model, dtype, keeper=keeper, is_whole=is_whole)
        elif keeper is not None:
            self._lent = LentWeights(model, keeper)

    def _put_sampler_to_sleep(self) -> None:
        """Before a pass of the trainer; nothing where the sampler sleeps already."""
        self.backend.sleep()

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves rollout, training, log-probs, weights and data."""
        self.serve_run(runtime)
        return add_servicers(
            server,
            RolloutServicer(self, runtime),
            EndpointServicer(self, runtime),
            TrainerServicer(self, runtime),
            LogprobServicer(self, runtime),
            ActorWeightsServicer(self, runtime),
            GivingExchangeServicer(self, runtime),
            DataServicer(self, runtime),
            CutServicer(self, runtime),
        )

    @property
    def policy(self) -> RankModel:
        """The policy; raises NOT_INITIALIZED before Initialize."""
        return self.trainer.rank_model

    @property
    def backend(self) -> RolloutBackend:
        """The sampler; raises NOT_INITIALIZED before Initialize, and NO_SAMPLER without one."""
        if self._backend is None and self._trainer is not None:
            raise PreconditionError(
                "the actor holds no sampler: give actor.rollout, or let a rollout role sample",
                reason="NO_SAMPLER",
            )
        return self.initialized(self._backend)

    @property
    def source(self) -> PromptSource:
        """Prompts and tokenizer; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._source)

    def read(self, split: Split, start: int, count: int, kind: Kind) -> Experience:
        """Trajectories that are given and not sampled; see `read_trajectories`."""
        config = self.trainer.model.config.get_text_config()
        return read_trajectories(
            self.source.prompts,
            split,
            start,
            count,
            kind,
            max_tokens=getattr(config, "max_position_embeddings", None),
        )

    def bring_weights(self) -> int:
        """Brings the trainer's weights to the sampler, unless it has them already.

        Returns:
            Bytes that this rank received from others for it.
        """
        is_current = self.backend.policy_version == self.trainer.policy_version
        if is_current and not self._is_sampler_stale:
            self.backend.wake()
            return 0
        # Before the sampler wakes: a pass of the trainer puts it to sleep.
        scores = self.probe_scores()
        # Whatever fails from here on: a repeat brings and checks them again.
        self._is_sampler_stale = True
        # The memory of its weights alone: that of keys and values follows when those have come.
        self.backend.wake()
        trainer, version = self.trainer, self.trainer.policy_version
        if self._resharder is not None:
            shards = self._resharder.run(dict(trainer.named_weights()), policy_version=version)
            self.backend.update_shard(shards, version)
        elif self._lent is not None:
            self._lent.lend(dict(trainer.named_weights()), policy_version=version)
        else:
            self.backend.update_weights(trainer.named_weights(), version)
        check_sampler(
            self.backend,
            self._check,
            scores,
            trainer.mesh.world,
            trainer.model.device,
            # Of several ranks each has parts alone.
            weights=trainer.named_weights if trainer.mesh.world.size == 1 else None,
        )
        self._is_sampler_stale = False
        return 0 if self._resharder is None else self._resharder.received_bytes

    def probe_scores(self) -> ProbeScores:
        """What the trainer's weights give the beginning of the first prompts."""
        if self._probe is None:
            self._probe = TrainerProbe(self.source.probe_tokens())
        return self._probe.scores(self.policy, version=self.trainer.policy_version)

    def weights_replaced(self) -> None:
        """The sampler must take the loaded weights even when their version is the one it has."""
        self._is_sampler_stale = True
        if self._probe is not None:
            self._probe.start_over()

    def plan_exchange(self, peer: TrainLayout, dtype: DtypeName) -> Plan:
        """What travels to a rollout service of a layout."""
        trainer = self.trainer
        train = trainer.mesh.layout.train
        return exchange_plan(self.manifest, trainer.model.shape, train, peer, dtype)

    def start_over(self) -> None:
        """Drops gradients, published weights and exchanges."""
        self.exchanges.close()
        super().start_over()

    def sleep(self) -> int:
        """Moves trainer and sampler to host memory. The sampler wakes with its next weights."""
        self.exchanges.close()
        return super().sleep() + (0 if self._backend is None else self._backend.sleep())

    def close(self) -> None:
        """Ends the sampler and drops the weights."""
        self.close_endpoint()
        self.exchanges.close()
        if self._rest is not None:
            self._rest.remove()
            self._rest = None
        for part in (self._backend, self._resharder, self._lent):
            if part is not None:
                part.close()
        self._backend = self._resharder = self._lent = self._source = self._probe = None
        self._teaching = None
        self._check = SamplerCheck()
        super().close()


class ActorWeightsServicer(WeightsServicer):
    """WeightsService that also knows the sampler's weights."""

    _role: ActorRole

    async def _checksums(
        self, holder: weights_pb2.WeightsHolder.ValueType
    ) -> weights_pb2.GetChecksumsResponse:
        if holder != weights_pb2.WEIGHTS_HOLDER_SAMPLER:
            return await super()._checksums(holder)
        return await checksums_of_sampler(self._role.backend, self._runtime)
