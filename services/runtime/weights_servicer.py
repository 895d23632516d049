"""WeightsService over a trainer: what it holds, and what it leaves on disk."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from google.protobuf.message import Message

from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoint import MANIFEST_FILE
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.tensors import data_type_of
from rolemesh.services.runtime.model_role import ModelRole
from rolemesh.services.runtime.runtime import Call, Context, Runtime
from rolemesh.v1 import weights_pb2, weights_pb2_grpc

CHECKSUMS_METHOD = "/rolemesh.v1.WeightsService/GetChecksums"


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):
    """WeightsService over a trainer."""

    def __init__(self, role: ModelRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        """See weights.proto."""
        trainer = self._role.trainer
        return weights_pb2.GetManifestResponse(
            parameters=[
                weights_pb2.ParameterSpec(name=name, shape=shape, dtype=data_type_of(dtype))
                for name, shape, dtype in _whole_parameters(trainer)
            ],
            policy_version=trainer.policy_version,
        )

    async def GetChecksums(
        self, request: weights_pb2.GetChecksumsRequest, context: Context
    ) -> weights_pb2.GetChecksumsResponse:
        """See weights.proto."""
        own = await self._checksums(request.holder)
        if self._runtime.face is not None:
            own.other_ranks.extend(await self._runtime.face.tell(CHECKSUMS_METHOD, request))
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
        checksums = await self._runtime.compute.run(
            lambda: {name: tensor_checksum(weight) for name, weight in trainer.named_weights()}
        )
        return weights_pb2.GetChecksumsResponse(
            checksums=checksums, policy_version=trainer.policy_version
        )

    async def SaveCheckpoint(
        self, request: weights_pb2.SaveCheckpointRequest, context: Context
    ) -> AsyncIterator[weights_pb2.SaveCheckpointResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            directory = _absolute(request.directory)
            await call.compute(self._role.trainer.save, directory, self._role.extra_state)
            return self._result(directory, call)

        async for response in self._runtime.keyed(
            request, context, weights_pb2.SaveCheckpointResponse, work
        ):
            yield response

    async def LoadCheckpoint(
        self, request: weights_pb2.LoadCheckpointRequest, context: Context
    ) -> AsyncIterator[weights_pb2.LoadCheckpointResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            directory = _absolute(request.directory)
            if not (directory / MANIFEST_FILE).is_file():
                raise InvalidRequestError(
                    f"directory is {request.directory!r}, which has no {MANIFEST_FILE}: give a "
                    "folder that SaveCheckpoint wrote",
                    reason="PATH_INVALID",
                )
            self._role.extra_state = await call.compute(self._role.trainer.load, directory)
            self._role.weights_replaced()
            return self._result(directory, call)

        async for response in self._runtime.keyed(
            request, context, weights_pb2.LoadCheckpointResponse, work
        ):
            yield response

    async def Export(
        self, request: weights_pb2.ExportRequest, context: Context
    ) -> AsyncIterator[weights_pb2.ExportResponse]:
        """See weights.proto."""

        async def work(call: Call) -> Message:
            directory = _absolute(request.directory)
            await call.compute(self._role.trainer.export, directory)
            return self._result(directory, call)

        async for response in self._runtime.keyed(
            request, context, weights_pb2.ExportResponse, work
        ):
            yield response

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


def _whole_parameters(trainer: Trainer) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, global shape and dtype of each parameter, whatever part of it this rank holds."""
    shape = trainer.model.shape
    if trainer.mesh.world.size == 1 or shape is None:
        for name, tensor in trainer.named_weights():
            yield name, tuple(tensor.shape), str(tensor.dtype)
    else:
        for name, parameter in shape.manifest("float32").items():
            yield name, parameter.shape, f"torch.{parameter.dtype}"


def _absolute(directory: str) -> Path:
    path = Path(directory)
    if not directory or not path.is_absolute():
        raise InvalidRequestError(
            f"directory is {directory!r}: give an absolute path on the service's host",
            reason="PATH_INVALID",
        )
    return path
