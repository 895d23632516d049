"""Calls that move, store and check weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from rolemesh.coordinator.sdk.experience import Report, Update
from rolemesh.coordinator.sdk.service_calls import ServiceCalls
from rolemesh.coordinator.sdk.weights import Checkpoint, Checksums, Manifest, Parameter, Weights
from rolemesh.rpc.columns import Array, read_values
from rolemesh.rpc.errors import DataLossError
from rolemesh.rpc.tensors import ITEM_BYTES, data_type_of
from rolemesh.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc


class WeightCalls(ServiceCalls):
    """Weights of a service; see AsyncRole."""

    async def get_manifest(self) -> Manifest:
        """Every parameter of its model."""
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        answer = await self._mesh.call(stub.GetManifest, weights_pb2.GetManifestRequest())
        return Manifest(
            answer.policy_version, tuple(Parameter.of(one) for one in answer.parameters)
        )

    async def get_checksums(self, holder: str = "trainer") -> Checksums:
        """Hashes of the weights that its "trainer" or its "sampler" holds.

        Raises:
            ValueError: The holder is unknown.
        """
        name = f"WEIGHTS_HOLDER_{holder.upper()}"
        if name not in weights_pb2.WeightsHolder.keys()[1:]:
            raise ValueError(f"holder is {holder!r}: give trainer or sampler")
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        request = weights_pb2.GetChecksumsRequest(holder=weights_pb2.WeightsHolder.Value(name))
        answer = await self._mesh.call(stub.GetChecksums, request)
        ranks = (answer, *answer.other_ranks)
        return Checksums(
            answer.policy_version, tuple(MappingProxyType(dict(one.checksums)) for one in ranks)
        )

    async def publish_weights(self, dtype: str) -> Weights:
        """Keeps a copy of the trained weights for others, in a dtype, e.g. "bfloat16".

        Raises:
            ValueError: The dtype may not travel.
        """
        request = weights_pb2.PublishWeightsRequest(
            key=self._new_key("publish_weights"), dtype=data_type_of(dtype)
        )
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        result = await self._streamed(stub.PublishWeights, request)
        return Weights(result.weights, Report.of(result.report))

    async def update_weights(self, weights: Weights) -> Update:
        """Brings published weights to the sampler of a rollout service."""
        request = rollout_pb2.UpdateWeightsRequest(
            key=self._new_key("update_weights"), weights=weights.reference
        )
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        return self._updated(await self._streamed(stub.UpdateWeights, request))

    async def fetch_weights(self, weights: Weights, names: Sequence[str] = ()) -> dict[str, Array]:
        """Whole parameters that it has published, by name; bfloat16 comes as float32.

        Only from a service of one rank, which alone holds parameters whole: of others use export.

        Args:
            weights: What publish_weights answered.
            names: Parameters wanted; empty: all.
        """
        wanted = [one for one in weights.parameters if not names or one.name in names]
        request = weights_pb2.FetchWeightsRequest(
            run_id=weights.reference.run_id,
            policy_version=weights.policy_version,
            boxes=[
                weights_pb2.WeightsBox(
                    parameter=one.name, start=[0] * len(one.shape), stop=one.shape
                )
                for one in wanted
            ],
        )
        stub: Any = weights_pb2_grpc.WeightsServiceStub(self._channel)

        async def pull(asked: Any, **how: Any) -> bytearray:
            payload = bytearray()
            async with aclosing(aiter(stub.FetchWeights(asked, **how))) as messages:
                async for message in messages:
                    payload += message.chunk
            return payload

        payload = await self._mesh.call(pull, request)
        dtype = weights.reference.dtype
        sizes = [math.prod(one.shape) for one in wanted]
        if len(payload) != sum(sizes) * ITEM_BYTES[dtype]:
            raise DataLossError(
                f"{self.name} sent {len(payload)} bytes for {sum(sizes)} elements",
                reason="PAYLOAD_MALFORMED",
            )
        fetched, at = {}, 0
        for one, size in zip(wanted, sizes, strict=True):
            fetched[one.name] = read_values(payload, dtype, size, at).reshape(one.shape)
            at += size * ITEM_BYTES[dtype]
        return fetched

    async def save_state(self, directory: str) -> Checkpoint:
        """Writes all that training goes on from: weights, optimizer, random state, schedule.

        Args:
            directory: Absolute path on the service's host, which must not exist yet.
        """
        request = weights_pb2.SaveCheckpointRequest(
            key=self._new_key("save_state"), directory=directory
        )
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        return Checkpoint.of(await self._streamed(stub.SaveCheckpoint, request))

    async def load_state(self, directory: str) -> Checkpoint:
        """Loads what save_state wrote, after checking its hashes."""
        request = weights_pb2.LoadCheckpointRequest(
            key=self._new_key("load_state"), directory=directory
        )
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        loaded = Checkpoint.of(await self._streamed(stub.LoadCheckpoint, request))
        self.policy_version = loaded.policy_version
        return loaded

    async def export(self, directory: str) -> Checkpoint:
        """Writes a Hugging Face folder, which replaces what stands there.

        Args:
            directory: Absolute path on the service's host.
        """
        request = weights_pb2.ExportRequest(key=self._new_key("export"), directory=directory)
        stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        return Checkpoint.of(await self._streamed(stub.Export, request))
