"""The critic: a value model that estimates returns and is trained on them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import Message

from rolemesh.engine.experience import Experience
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import CriticSpec
from rolemesh.rpc.experience.references import row_tokens
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, add_servicers
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer, Runtime
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.servicers.model_inputs import model_inputs
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.models import TrainerServicer
from rolemesh.services.runtime.servicers.weights.cuts import CutServicer
from rolemesh.services.runtime.servicers.weights.weights import WeightsServicer
from rolemesh.v1 import experience_pb2, value_pb2, value_pb2_grpc


class CriticRole(ModelRole):
    """Holds a value model and its trainer."""

    name = "critic"
    spec_class = CriticSpec

    def initialize(
        self, spec: CriticSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Loads the value model."""
        progress("load value model", 0, 1)
        model = ScoringModel(
            spec.model,
            VALUE_HEAD,
            device=rank_device(),
            mesh=mesh,
            numerics=spec.chosen_numerics,
        )
        return self.train_with(model, spec.optimizer, run_seed)

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves values, training and weights."""
        return add_servicers(
            server,
            ValueServicer(self, runtime),
            TrainerServicer(self, runtime),
            WeightsServicer(self, runtime),
            CutServicer(self, runtime),
        )


class ValueServicer(RoleServicer[CriticRole], value_pb2_grpc.ValueServiceServicer):
    """ValueService over the critic's trainer."""

    def ComputeValues(
        self, request: value_pb2.ComputeValuesRequest, context: Context
    ) -> AsyncIterator[value_pb2.ComputeValuesResponse]:
        """See value.proto."""

        async def work(call: Call) -> Message:
            share = self._runtime.share("3D_PROTO", row_tokens(request.experience))
            columns = model_inputs(request.experience)
            batch = await self._runtime.pull(request.experience, columns, call, rows=share.rows)
            values = await call.compute(
                self._role.trainer.compute_values, batch, progress=call.progress
            )
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(
                    request.key, Experience({"values": values}), share=share
                ),
                report=call.report({}, batch.num_tokens if share.counts else 0),
            )

        return self._runtime.keyed(request, value_pb2.ComputeValuesResponse, work)
