"""The rollout role: a sampler without a trainer, which takes weights that an actor publishes."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeVar

import grpc

from rolemesh.engine.layout.families import DecoderShape, UnsupportedFamilyError
from rolemesh.engine.layout.manifest import DtypeName, Manifest, Parameter
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.adapters.adapters import with_adapter
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import (
    expected_factors,
    expected_weights,
    read_model_folder,
)
from rolemesh.engine.specs import RolloutRoleSpec
from rolemesh.engine.weights.exchanges.exchange import exchange_plan
from rolemesh.engine.weights.exchanges.published import (
    Taking,
    check_manifest,
    plan_taking,
    source_layout,
    target_layout,
)
from rolemesh.engine.weights.plan import Plan
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError, UnsupportedError
from rolemesh.services.endpoint.role import EndpointRole
from rolemesh.services.endpoint.servicer import EndpointServicer
from rolemesh.services.rollout.deliveries import Deliveries
from rolemesh.services.rollout.updates import WeightUpdates
from rolemesh.services.runtime.calls.role import (
    InitializeResult,
    ProgressCallback,
    Role,
    add_servicers,
)
from rolemesh.services.runtime.calls.runtime import Context, RoleServicer, Runtime
from rolemesh.services.runtime.experience.published_weights import parameter_specs
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.rollout import PromptSource, RolloutServicer
from rolemesh.services.runtime.servicers.weights.exchange import ExchangeServicer
from rolemesh.services.runtime.servicers.weights.exchange_ends import Exchanges
from rolemesh.services.runtime.servicers.weights.weights import checksums_of_sampler
from rolemesh.v1 import rollout_pb2, weights_pb2, weights_pb2_grpc

T = TypeVar("T")


class RolloutRole(Role, EndpointRole):
    """Holds a sampler and the prompts.

    Invariant: no generation begins before weights came, nor after an update that failed.
    """

    name = "rollout"
    spec_class = RolloutRoleSpec

    def __init__(self) -> None:
        self._backend: RolloutBackend | None = None
        self._source: PromptSource | None = None
        self._mesh = RankMesh.single()
        self._layout = HybridLayout(TrainLayout())
        self._manifest: Manifest = {}
        self._shape: DecoderShape | None = None
        self._dtype: DtypeName = "float32"
        self._deliveries: Deliveries | None = None
        self.exchanges = Exchanges()
        """Of this rank, with the actor."""

    def initialize(
        self, spec: RolloutRoleSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Loads prompts and the engine, which has no weights yet."""
        progress("load prompts", 0, 2)
        self._source = PromptSource(
            spec.model, spec.data, run_seed, max_model_len=spec.rollout.max_model_len
        )
        self._source.play(spec.environment, spec.rollout.max_model_len, mesh, self.sandbox)
        progress(f"load {spec.rollout.type}", 1, 2)
        folder = read_model_folder(spec.model.path, spec.rollout.max_model_len)
        adapter = spec.model.adapter
        self._dtype = spec.rollout.dtype if adapter is None else "float32"
        expected = (
            expected_weights(folder) if adapter is None else expected_factors(folder, adapter)
        )
        self._manifest = {
            name: Parameter(shape, "float32", keeps_dtype=True)
            if name in expected.buffers
            else Parameter(shape, self._dtype)
            for name, shape in expected.shapes.items()
        }
        self._mesh, self._layout = mesh, spec.rank_layout()
        try:
            self._shape = DecoderShape.from_config(folder.config.to_dict())
            if adapter is not None:
                self._shape = with_adapter(self._shape, adapter)
        except UnsupportedFamilyError:
            # Then weights come from one rank to whole models; `plan` refuses everything else.
            self._shape = None
        self._backend = make_backend(
            spec.rollout,
            spec.model.path,
            mesh=mesh,
            device=rank_device(),
            numerics=spec.chosen_numerics,
            # Which schedule the run has, only the coordinator knows: weights may come at any time.
            updates_between_steps=True,
            adapter=adapter,
            shares_engine=self.is_shared,
            has_endpoint=spec.endpoint is not None,
        )
        self._deliveries = Deliveries(self._backend, mesh, are_shards=self._takes_shards)
        door = self.open_endpoint(spec.endpoint, spec.environment, self.sandbox, spec.data)
        progress("ready", 2, 2)
        return InitializeResult(
            policy_version=self._backend.policy_version,
            facts={**self._source.facts, **door, "rollout": spec.rollout.type},
        )

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves rollout, and what of weights concerns a sampler."""
        self.serve_run(runtime)
        return add_servicers(
            server,
            StandAloneRolloutServicer(self, runtime),
            EndpointServicer(self, runtime),
            SamplerWeightsServicer(self, runtime),
            ExchangeServicer(self, runtime),
        )

    @property
    def backend(self) -> RolloutBackend:
        """The sampler; raises NOT_INITIALIZED before Initialize."""
        return self._initialized(self._backend)

    @property
    def source(self) -> PromptSource:
        """Prompts and tokenizer; raises NOT_INITIALIZED before Initialize."""
        return self._initialized(self._source)

    @property
    def deliveries(self) -> Deliveries:
        """Where weights go; raises NOT_INITIALIZED before Initialize."""
        return self._initialized(self._deliveries)

    @property
    def manifest(self) -> Manifest:
        """The sampler's parameters, by Hugging Face name."""
        self._initialized(self._backend)
        return self._manifest

    def policy_version(self) -> int:
        """Version of the weights; -1 while there are none that may be used."""
        if self._deliveries is None or self._deliveries.is_outdated:
            return -1
        return self.backend.policy_version

    def bring_weights(self) -> int:
        """Checks that the newest update arrived; nothing travels here."""
        self.deliveries.check()
        return 0

    def plan(self, manifest: Manifest, train: TrainLayout, dtype: DtypeName) -> Taking:
        """What this rank takes of published weights.

        Args:
            manifest: Of the publication.
            train: Layout of the publishing service.
            dtype: Element type of the publication.

        Raises:
            ManifestError: The weights are of another model; names the parameter.
            LayoutError: The model cannot be cut so.
        """
        check_manifest(manifest, self.manifest)
        source = source_layout(manifest, train, dtype, self._shape)
        target = target_layout(manifest, self._layout, dtype, self._shape)
        return plan_taking(source, target, self._mesh.rank)

    def plan_exchange(self, peer: TrainLayout, dtype: DtypeName) -> Plan:
        """What travels from an actor of a layout."""
        return exchange_plan(self.manifest, self._shape, peer, self._layout.train, dtype)

    @property
    def _takes_shards(self) -> bool:
        """Whether a rank's sampler holds a part of the model."""
        return self._layout.generate.tp * self._layout.generate.pp > 1

    def sleep(self) -> int:
        """Frees the sampler's device memory. On a GPU its weights are gone then."""
        self.exchanges.close()
        return self.backend.sleep()

    def wake(self) -> int:
        """Takes device memory again; on a GPU weights have to be sent anew."""
        return self.backend.wake()

    def start_over(self) -> None:
        """Refuses to sample until weights come anew: a version may come again with others."""
        self.exchanges.close()
        self.deliveries.outdate()

    def close(self) -> None:
        """Ends the sampler."""
        self.close_endpoint()
        self.exchanges.close()
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self._source = None
        self._deliveries = None

    def _initialized(self, part: T | None) -> T:
        if part is None:
            raise PreconditionError(
                "the rollout service holds no run yet: call Initialize first",
                reason="NOT_INITIALIZED",
            )
        return part


class StandAloneRolloutServicer(RolloutServicer):
    """RolloutService of a role whose weights come from elsewhere."""

    def __init__(self, role: RolloutRole, runtime: Runtime) -> None:
        super().__init__(role, runtime)
        self._updates = WeightUpdates(role, runtime)

    def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.UpdateWeightsResponse]:
        """See rollout.proto."""
        work = self._updates.whole
        if request.ahead:
            work = self._updates.ahead
        elif not self._runtime.is_face:
            work = self._updates.in_turn
        # The ranks hear of it beside their generation, too, which the face passes on by itself.
        return self._runtime.keyed(
            request,
            rollout_pb2.UpdateWeightsResponse,
            functools.partial(work, request),
            on_all_ranks=False,
        )


def _not_served(instead: str) -> Any:
    """A method that refuses all requests, and says who does it instead."""

    def refuse(self: object, request: object, context: object) -> NoReturn:
        raise UnsupportedError(f"a rollout service trains nothing: weights are {instead}")

    return refuse


class SamplerWeightsServicer(RoleServicer[RolloutRole], weights_pb2_grpc.WeightsServiceServicer):
    """Says what the sampler holds. It is not trained, so nothing is kept, loaded or published."""

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        """See weights.proto."""
        return weights_pb2.GetManifestResponse(
            parameters=parameter_specs(self._role.manifest),
            policy_version=self._role.policy_version(),
        )

    async def GetChecksums(
        self, request: weights_pb2.GetChecksumsRequest, context: Context
    ) -> weights_pb2.GetChecksumsResponse:
        """See weights.proto."""
        if request.holder != weights_pb2.WEIGHTS_HOLDER_SAMPLER:
            raise InvalidRequestError(
                f"holder is {weights_pb2.WeightsHolder.Name(request.holder)}: the rollout role "
                "holds a sampler's weights only, ask for WEIGHTS_HOLDER_SAMPLER",
                reason="HOLDER_UNKNOWN",
            )
        own = await checksums_of_sampler(self._role.backend, self._runtime)
        own.other_ranks.extend(await self._runtime.tell_others(request))
        return own

    PublishWeights = _not_served("published by the actor")
    FetchWeights = _not_served("fetched from the actor")
    SaveCheckpoint = _not_served("saved by the actor")
    LoadCheckpoint = _not_served("loaded by the actor, which then publishes them")
    Export = _not_served("exported by the actor")
