"""Made-up weights that the suite publishes to a rollout service, which has none of its own."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from rolemesh.rpc.channel import CHUNK_BYTES
from rolemesh.rpc.experience.tensors import ITEM_BYTES
from rolemesh.v1 import tensor_pb2, weights_pb2

SERVICE_NAME = "rolemesh.v1.WeightsService"

SPREAD = 0.05
"""Standard deviation of made-up matrices: no token is certain, and not all are equally likely."""

_BFLOAT16 = tensor_pb2.DATA_TYPE_BFLOAT16
_NUMPY: dict[tensor_pb2.DataType.ValueType, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
}


def made_up(parameter: weights_pb2.ParameterSpec) -> npt.NDArray[Any]:
    """Makes values of a parameter, the same in every call. bfloat16 is the upper half of float32.

    Raises:
        ValueError: The element type is none that weights have.
    """
    shape = tuple(parameter.shape)
    if parameter.dtype != _BFLOAT16 and parameter.dtype not in _NUMPY:
        name = tensor_pb2.DataType.Name(parameter.dtype)
        raise ValueError(f"parameter {parameter.name!r} has dtype {name}: none of weights")
    if len(shape) > 1:
        generator = np.random.default_rng(zlib.crc32(parameter.name.encode()))
        values = generator.standard_normal(shape, np.float32) * np.float32(SPREAD)
    else:
        # A vector is the scale of a norm, or a bias.
        values = np.full(shape, 0.0 if parameter.name.endswith("bias") else 1.0, np.float32)
    if parameter.dtype == _BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(_NUMPY[parameter.dtype])


class Publisher:
    """Serves FetchWeights for the weights of the last `publish`. Owner: the loop."""

    def __init__(self) -> None:
        self._parameters: dict[str, weights_pb2.ParameterSpec] = {}

    def publish(
        self,
        manifest: weights_pb2.GetManifestResponse,
        run_id: str,
        address: str,
        policy_version: int,
    ) -> weights_pb2.WeightsRef:
        """Publishes made-up weights for the parameters of a manifest, all on one rank."""
        self._parameters = {one.name: one for one in manifest.parameters}
        return weights_pb2.WeightsRef(
            run_id=run_id,
            policy_version=policy_version,
            dtype=manifest.parameters[0].dtype,
            parameters=manifest.parameters,
            addresses=[address],
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        """The one method that it serves."""
        fetch = grpc.unary_stream_rpc_method_handler(
            self._fetch,
            request_deserializer=weights_pb2.FetchWeightsRequest.FromString,
            response_serializer=weights_pb2.FetchWeightsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"FetchWeights": fetch})

    async def _fetch(
        self,
        request: weights_pb2.FetchWeightsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        total = 0
        for box in request.boxes:
            if box.parameter not in self._parameters:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"no parameter {box.parameter!r}"
                )
            sizes = [stop - start for start, stop in zip(box.start, box.stop, strict=True)]
            item_bytes = ITEM_BYTES[self._parameters[box.parameter].dtype]
            total += int(np.prod(sizes, dtype=np.int64)) * item_bytes
        header = weights_pb2.FetchWeightsHeader(total_bytes=total)
        yield weights_pb2.FetchWeightsResponse(header=header)
        for box in request.boxes:
            # One parameter at a time: models may be larger than this machine's memory.
            values = made_up(self._parameters[box.parameter])
            cut = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
            data = values[cut].tobytes()
            for at in range(0, len(data), CHUNK_BYTES):
                yield weights_pb2.FetchWeightsResponse(chunk=data[at : at + CHUNK_BYTES])
