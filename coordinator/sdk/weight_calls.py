"""Calls that move, store and check weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

from rolemesh.coordinator.sdk.service_calls import ServiceCalls
from rolemesh.coordinator.sdk.values.experience import Report, Update
from rolemesh.coordinator.sdk.values.messages import from_message
from rolemesh.coordinator.sdk.values.weights import (
    Checkpoint,
    Checksums,
    Cut,
    Manifest,
    Weights,
)
from rolemesh.rpc.experience.columns import Array, read_values
from rolemesh.rpc.experience.tensors import ITEM_BYTES, data_type_of
from rolemesh.v1 import weights_pb2


class WeightCalls(ServiceCalls):
    """Weights of a service; see AsyncRole."""

    async def get_manifest(self) -> Manifest:
        """Every parameter of its model."""
        answer = await self._call(self._client.get_manifest, self._mesh.run_id)
        return from_message(Manifest, answer)

    async def get_checksums(self, holder: str = "trainer") -> Checksums:
        """Hashes of the weights that its "trainer" or its "sampler" holds.

        Raises:
            ValueError: The holder is unknown.
        """
        name = f"WEIGHTS_HOLDER_{holder.upper()}"
        if name not in weights_pb2.WeightsHolder.keys()[1:]:
            raise ValueError(f"holder is {holder!r}: give trainer or sampler")
        asked = weights_pb2.WeightsHolder.Value(name)
        answer = await self._call(self._client.get_checksums, asked, self._mesh.run_id)
        ranks = (answer, *answer.other_ranks)
        return Checksums(
            answer.policy_version, tuple(MappingProxyType(dict(one.checksums)) for one in ranks)
        )

    async def publish_weights(self, dtype: str) -> Weights:
        """Keeps a copy of the trained weights for others, in a dtype, e.g. "bfloat16".

        Raises:
            ValueError: The dtype may not travel.
        """
        key = self._new_key("publish_weights")
        result = await self._call(self._client.publish_weights, key, data_type_of(dtype))
        return Weights(result.weights, Report.of(result.report))

    async def update_weights(self, weights: Weights) -> Update:
        """Brings published weights to the sampler of a rollout service."""
        key = self._new_key("update_weights")
        return self._updated(await self._call(self._client.update_weights, key, weights.reference))

    async def fetch_weights(self, weights: Weights, names: Sequence[str] = ()) -> dict[str, Array]:
        """Whole parameters that it has published, by name; bfloat16 comes as float32.

        Only from a service of one rank, which alone holds parameters whole: of others use export.

        Args:
            weights: What publish_weights answered.
            names: Parameters wanted; empty: all.
        """
        wanted = [one for one in weights.parameters if not names or one.name in names]
        boxes = [
            weights_pb2.WeightsBox(parameter=one.name, start=[0] * len(one.shape), stop=one.shape)
            for one in wanted
        ]
        dtype = weights.reference.dtype
        sizes = [math.prod(one.shape) for one in wanted]
        payload = await self._call(
            self._client.fetch_weights,
            weights.reference.run_id,
            weights.policy_version,
            boxes,
            sum(sizes) * ITEM_BYTES[dtype],
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
        key = self._new_key("save_state")
        return Checkpoint.of(await self._call(self._client.save_checkpoint, key, directory))

    async def load_state(self, directory: str) -> Checkpoint:
        """Loads what save_state wrote, after checking its hashes."""
        key = self._new_key("load_state")
        loaded = Checkpoint.of(await self._call(self._client.load_checkpoint, key, directory))
        self.policy_version = loaded.policy_version
        return loaded

    async def save_cut(self) -> Cut:
        """Keeps all that training goes on from in host memory, as the cut of the current step.

        It outlives the process. Two cuts are kept: of an even step and of an odd one.
        """
        key = self._new_key("save_cut")
        return Cut.of(key.step, await self._call(self._client.save_cut, key))

    async def restore_cut(self, step: int) -> Cut:
        """Puts the cut of a step back, also in a new process; cuts of later steps are dropped."""
        key = self._new_key("restore_cut")
        told = await self._call(self._client.restore_cut, key, step)
        cut = Cut.of(step, told)
        self.policy_version = cut.policy_version
        return cut

    async def list_cuts(self) -> tuple[Cut, ...]:
        """The cuts of the run that it can restore, by ascending step."""
        cuts = await self._call(self._client.list_cuts, self._mesh.run_id)
        return tuple(Cut.of(cut.step, cut) for cut in cuts)

    async def drop_cuts(self) -> None:
        """Removes the cuts of the run, which outlive it otherwise."""
        await self._call(self._client.drop_cuts, self._mesh.run_id, self._mesh.epoch)

    async def export(self, directory: str) -> Checkpoint:
        """Writes a Hugging Face folder, which replaces what stands there.

        Args:
            directory: Absolute path on the service's host.
        """
        key = self._new_key("export")
        return Checkpoint.of(await self._call(self._client.export, key, directory))
