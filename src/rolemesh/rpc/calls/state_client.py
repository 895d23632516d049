"""Calls on what a service trains: its weights, exchanges of them, and the cuts of its state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import DataLossError
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.pull import FETCH_WEIGHTS, Answer, pull
from rolemesh.v1 import (
    cuts_pb2,
    cuts_pb2_grpc,
    exchange_pb2,
    exchange_pb2_grpc,
    operation_pb2,
    tensor_pb2,
    weights_pb2,
    weights_pb2_grpc,
)

_Key = operation_pb2.OperationKey
_Saved = ResultCall[weights_pb2.CheckpointResult]
_Cut = ResultCall[cuts_pb2.CutResult]


class StateClient:
    """The part of a ServiceClient that these calls are; see there."""

    def __init__(self, channel: MeshChannel, timeout_s: float | None, name: str) -> None:
        """Prepares; the arguments are those of ServiceClient."""
        self._peer = f"{name} at {channel.address}"
        self._timeout_s = timeout_s
        self._channel = channel
        self._weights = weights_pb2_grpc.WeightsServiceStub(channel)
        self._exchange = exchange_pb2_grpc.ExchangeServiceStub(channel)
        self._cuts = cuts_pb2_grpc.CutServiceStub(channel)

    def within(self, timeout_s: float) -> Self:
        """The same client, whose calls may take so many seconds each."""
        client = copy.copy(self)
        client._timeout_s = timeout_s
        return client

    # --- WeightsService ---

    async def get_manifest(self, run_id: str = "") -> weights_pb2.GetManifestResponse:
        """Asks for the parameters of the model, of a run where several hold the service."""
        request = weights_pb2.GetManifestRequest(run_id=run_id)
        return await self._weights.GetManifest(request, timeout=self._timeout_s)

    async def get_checksums(
        self, holder: weights_pb2.WeightsHolder.ValueType, run_id: str = ""
    ) -> weights_pb2.GetChecksumsResponse:
        """Asks for hashes of the weights as the trainer or the sampler holds them.

        Of a run where several hold the service.
        """
        request = weights_pb2.GetChecksumsRequest(holder=holder, run_id=run_id)
        return await self._weights.GetChecksums(request, timeout=self._timeout_s)

    def publish_weights(
        self, key: _Key, dtype: tensor_pb2.DataType.ValueType
    ) -> ResultCall[weights_pb2.PublishWeightsResult]:
        """Has the service keep a copy of its trained weights for others."""
        request = weights_pb2.PublishWeightsRequest(key=key, dtype=dtype)
        return self._followed(self._weights.PublishWeights, request)

    async def fetch_weights(
        self,
        run_id: str,
        policy_version: int,
        boxes: Iterable[weights_pb2.WeightsBox],
        num_bytes: int,
    ) -> bytearray:
        """Pulls boxes of published weights: their elements, `num_bytes` in all, in their order."""
        request = weights_pb2.FetchWeightsRequest(
            run_id=run_id, policy_version=policy_version, boxes=boxes
        )

        async def take(answer: Answer[weights_pb2.FetchWeightsHeader]) -> bytearray:
            if answer.header.total_bytes != num_bytes:
                raise PayloadMalformedError(
                    f"{num_bytes} bytes of weights were asked for, but {answer.header.total_bytes} "
                    "are announced"
                )
            payload = bytearray(num_bytes)
            await answer.read_into(payload)
            return payload

        try:
            return await pull(
                self._channel,
                FETCH_WEIGHTS,
                request,
                take,
                peer=self._peer,
                metadata={},
                timeout_s=self._timeout_s,
            )
        except PayloadMalformedError as error:
            raise DataLossError(str(error), reason="PAYLOAD_MALFORMED") from error

    def save_checkpoint(self, key: _Key, directory: str, *, from_cut: bool = False) -> _Saved:
        """Writes what training goes on from to a folder on the service's host.

        Args:
            key: Of the call.
            directory: Absolute; must not exist.
            from_cut: Whether the cut of the key's step is written, while other calls compute.
        """
        request = weights_pb2.SaveCheckpointRequest(key=key, directory=directory, from_cut=from_cut)
        return self._followed(self._weights.SaveCheckpoint, request)

    def load_checkpoint(self, key: _Key, directory: str) -> _Saved:
        """Loads what SaveCheckpoint has written."""
        request = weights_pb2.LoadCheckpointRequest(key=key, directory=directory)
        return self._followed(self._weights.LoadCheckpoint, request)

    def export(self, key: _Key, directory: str) -> _Saved:
        """Writes a Hugging Face folder on the service's host."""
        request = weights_pb2.ExportRequest(key=key, directory=directory)
        return self._followed(self._weights.Export, request)

    # --- ExchangeService ---

    async def offer_exchange(
        self,
        key: _Key,
        exchange: str,
        peer_layout: Mapping[str, str],
        dtype: tensor_pb2.DataType.ValueType,
        plan: bytes = b"",
    ) -> exchange_pb2.OfferExchangeResponse:
        """Asks how the ranks can be reached, to move weights in `dtype` to or from a service.

        Args:
            key: Of the call.
            exchange: Name of the exchange, new with each meeting.
            peer_layout: Of the other service.
            dtype: Element type in which weights travel.
            plan: What the other service has answered, if it was asked before.
        """
        request = exchange_pb2.OfferExchangeRequest(
            key=key, exchange=exchange, peer_layout=peer_layout, dtype=dtype, plan=plan
        )
        return await self._exchange.OfferExchange(request, timeout=self._timeout_s)

    async def join_exchange(
        self, key: _Key, exchange: str, offers: Sequence[bytes]
    ) -> exchange_pb2.JoinExchangeResponse:
        """Connects the ranks with those of the other service; without offers, has them leave."""
        request = exchange_pb2.JoinExchangeRequest(key=key, exchange=exchange, offers=offers)
        return await self._exchange.JoinExchange(request, timeout=self._timeout_s)

    def send_weights(
        self, key: _Key, exchanges: Sequence[str]
    ) -> ResultCall[exchange_pb2.SendWeightsResult]:
        """Has the service send its trained weights as they are, while others take them."""
        request = exchange_pb2.SendWeightsRequest(key=key, exchanges=exchanges)
        return self._followed(self._exchange.SendWeights, request)

    # --- CutService ---

    def save_cut(self, key: _Key) -> _Cut:
        """Copies the trainer's state into shared memory, as the cut of the key's step."""
        return self._followed(self._cuts.SaveCut, cuts_pb2.SaveCutRequest(key=key))

    def restore_cut(self, key: _Key, step: int, *, keeps_later: bool = False) -> _Cut:
        """Puts the cut of a step back, and removes those of later steps unless they are kept."""
        request = cuts_pb2.RestoreCutRequest(key=key, step=step, keeps_later=keeps_later)
        return self._followed(self._cuts.RestoreCut, request)

    async def list_cuts(self, run_id: str) -> Sequence[cuts_pb2.Cut]:
        """Asks for the cuts of a run that all ranks have whole, by ascending step."""
        request = cuts_pb2.ListCutsRequest(run_id=run_id)
        return (await self._cuts.ListCuts(request, timeout=self._timeout_s)).cuts

    async def drop_cuts(self, run_id: str, fencing_epoch: int) -> None:
        """Removes the cuts of a run on all ranks."""
        request = cuts_pb2.DropCutsRequest(run_id=run_id, fencing_epoch=fencing_epoch)
        await self._cuts.DropCuts(request, timeout=self._timeout_s)

    def _followed(self, method: Any, request: Any, field: str = "result") -> ResultCall[Any]:
        call = method(request, timeout=self._timeout_s)
        return ResultCall(call, self._peer, field, idle_s=call.idle_s)
