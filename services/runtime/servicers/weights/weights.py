"""WeightsService over a trainer: what it holds, and what it leaves on disk."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.rollout.agreement.probe import ProbeScores
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.weights.checkpoints.checkpoint import MANIFEST_FILE
from rolemesh.engine.weights.exchanges.published import Publication
from rolemesh.rpc.errors import CapacityError, InvalidRequestError
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer, Runtime
from rolemesh.services.runtime.experience.published_weights import (
    answer_fetch,
    dtype_of,
    parameter_specs,
    reference_to,
)
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.weights.cut_checkpoints import write_cut
from rolemesh.v1 import weights_pb2, weights_pb2_grpc

SERVICE_NAME = "rolemesh.v1.WeightsService"
"""Full name of the service."""


class WeightsServicer(RoleServicer[ModelRole], weights_pb2_grpc.WeightsServiceServicer):
    """WeightsService over a trainer."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all methods; FetchWeights by hand, since it writes its own bytes."""
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self.FetchWeights,
            request_deserializer=weights_pb2.FetchWeightsRequest.FromString,
            response_serializer=None,
        )
        own = {"FetchWeights": handler}
        # Of a method's handlers gRPC takes the registered one that came last; versions that know
        # none of these take the generic one that came first.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, own),))
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE_NAME, own)

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        """See weights.proto."""
        return weights_pb2.GetManifestResponse(
            parameters=parameter_specs(self._role.manifest),
            policy_version=self._role.trainer.policy_version,
        )

    async def GetChecksums(
        self, request: weights_pb2.GetChecksumsRequest, context: Context
    ) -> weights_pb2.GetChecksumsResponse:
        """See weights.proto."""
        own = await self._checksums(request.holder)
        own.other_ranks.extend(await self._runtime.tell_others(request))
        return own

    async def _checksums(
        self, holder: weights_pb2.WeightsHolder.ValueType
    ) -> weights_pb2.GetChecksumsResponse:
        """Of the parts that this rank holds."""
        if holder != weights_pb2.WEIGHTS_HOLDER_TRAINER:
            raise InvalidRequestError(
                f"holder is {weights_pb2.WeightsHolder.Name(holder)}: the {self._role.name} holds "
                "training weights only, ask for WEIGHTS_HOLDER_TRAINER",
                reason="HOLDER_UNKNOWN",
            )
        trainer = self._role.trainer
        # The version too: by the time that the loop goes on, there may be another.
        checksums, version = await self._runtime.compute.run(
            lambda: (
                {name: tensor_checksum(weight) for name, weight in trainer.named_weights()},
                trainer.policy_version,
            )
        )
        return weights_pb2.GetChecksumsResponse(checksums=checksums, policy_version=version)

    def PublishWeights(
        self, request: weights_pb2.PublishWeightsRequest, context: Context
    ) -> AsyncIterator[weights_pb2.PublishWeightsResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            dtype = dtype_of(request.dtype, "dtype")
            call.progress("publish weights")
            with call.phase("publish"):
                publication, probe = await call.compute(self._publish, request.key.run_id, dtype)
            process = self._runtime.process
            return weights_pb2.PublishWeightsResult(
                weights=reference_to(
                    publication,
                    request.key.run_id,
                    self._role.trainer.mesh.layout.train,
                    process.rank_addresses or [process.address],
                    probe,
                ),
                report=call.report({"published_bytes": publication.num_bytes}, 0),
            )

        return self._runtime.keyed(request, weights_pb2.PublishWeightsResponse, work)

    def _publish(self, run_id: str, dtype: DtypeName) -> tuple[Publication, ProbeScores | None]:
        """Copies this rank's weights, and scores a row by them. On the compute thread."""
        probe = self._role.probe_scores()
        trainer = self._role.trainer
        weights = dict(trainer.named_weights())
        if any(one.keeps_dtype for one in trainer.weights_layout.manifest.values()):
            # A publication has one type, and takers round what is not to be kept.
            dtype = "float32"
        shares_memory = self._runtime.process.config.shared_memory
        # Before the next copy is made: two at once would take twice the memory, and no caller may
        # begin to fetch the old one any more in any case.
        self._role.published.close()
        try:
            publication = Publication(
                trainer.weights_layout.in_dtype(dtype),
                trainer.mesh.rank,
                weights,
                policy_version=trainer.policy_version,
                memory=self._role.published.memory if shares_memory else None,
            )
        except OSError as error:
            raise CapacityError(
                f"the weights of policy_version {trainer.policy_version} do not fit into shared "
                f"memory ({error.strerror or error}): enlarge /dev/shm (Docker: shm_size), or "
                "switch shared_memory off",
                reason="EXPERIENCE_CAPACITY",
            ) from error
        self._role.published.put(run_id, publication)
        return publication, probe

    async def FetchWeights(  # type: ignore[override]
        self, request: weights_pb2.FetchWeightsRequest, context: object
    ) -> AsyncIterator[bytes]:
        """See weights.proto; in messages that are serialized already, without protobuf's copies."""
        publication = self._role.published.get(request.run_id, request.policy_version)
        async for message in answer_fetch(publication, request, self._runtime.process.host_id):
            yield message

    def SaveCheckpoint(
        self, request: weights_pb2.SaveCheckpointRequest, context: Context
    ) -> AsyncIterator[weights_pb2.SaveCheckpointResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            role = self._role
            directory = self._granted(request.directory, writes=True)
            if not request.from_cut:
                await call.compute(role.trainer.save, directory, role.extra_state)
                return self._result(directory, call)
            version = await write_cut(role, self._runtime, request.key, directory, call)
            result = weights_pb2.CheckpointResult()
            if self._runtime.is_face:
                # The folder that other ranks were given is the face's.
                result = self._result(directory, call)
            result.policy_version, result.from_cut = version, True
            return result

        return self._runtime.keyed(
            request,
            weights_pb2.SaveCheckpointResponse,
            work,
            # From a cut the face has the others write by itself, and what computes goes on.
            on_all_ranks=not request.from_cut,
            needs_awake=not request.from_cut,
        )

    def LoadCheckpoint(
        self, request: weights_pb2.LoadCheckpointRequest, context: Context
    ) -> AsyncIterator[weights_pb2.LoadCheckpointResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            directory = self._granted(request.directory)
            if not (directory / MANIFEST_FILE).is_file():
                raise InvalidRequestError(
                    f"directory is {request.directory!r}, which has no {MANIFEST_FILE}: give a "
                    "folder that SaveCheckpoint wrote",
                    reason="PATH_INVALID",
                )
            self._role.extra_state = await call.compute(self._role.trainer.load, directory)
            self._role.weights_replaced()
            return self._result(directory, call)

        return self._runtime.keyed(request, weights_pb2.LoadCheckpointResponse, work)

    def Export(
        self, request: weights_pb2.ExportRequest, context: Context
    ) -> AsyncIterator[weights_pb2.ExportResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            directory = self._granted(request.directory, writes=True)
            await call.compute(self._role.trainer.export, directory)
            return self._result(directory, call)

        return self._runtime.keyed(request, weights_pb2.ExportResponse, work)

    def _granted(self, directory: str, *, writes: bool = False) -> Path:
        """The folder of a request, with all links resolved.

        Raises:
            InvalidRequestError: PATH_INVALID: it is not absolute.
            NotGrantedError: It lies in no folder that the owner of the service has granted.
        """
        if not directory or not Path(directory).is_absolute():
            raise InvalidRequestError(
                f"directory is {directory!r}: give an absolute path on the service's host",
                reason="PATH_INVALID",
            )
        return self._runtime.process.config.grant.folder(directory, "directory", writes=writes)

    def _result(self, directory: Path, call: Call) -> weights_pb2.CheckpointResult:
        manifest = directory / MANIFEST_FILE
        return weights_pb2.CheckpointResult(
            policy_version=self._role.trainer.policy_version,
            num_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
            manifest_sha256=(
                hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else ""
            ),
            report=call.report({}, 0),
        )


async def checksums_of_sampler(
    backend: RolloutBackend, runtime: Runtime
) -> weights_pb2.GetChecksumsResponse:
    """Of the weights that this rank's sampler holds."""
    # The version too: by the time that the loop goes on, there may be another.
    checksums, version = await runtime.compute.run(
        lambda: (backend.weight_checksums(), backend.policy_version)
    )
    return weights_pb2.GetChecksumsResponse(checksums=checksums, policy_version=version)
