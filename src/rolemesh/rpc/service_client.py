"""Calls of a service: one typed method for each RPC of every role.

A method takes the fields of its request and gives the answer. Who makes a call makes its key too,
so that a repeat of the call can carry the same one. What a call does, and which errors it has, the
comments of protos/rolemesh/v1 say. Rows are pulled by `rolemesh.rpc.column_fetch`.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format, struct_pb2

from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.columns import Columns, encode
from rolemesh.rpc.errors import DataLossError
from rolemesh.rpc.payload_stream import PayloadMalformedError
from rolemesh.rpc.pull import FETCH_WEIGHTS, Answer, pull
from rolemesh.rpc.result_call import ResultCall
from rolemesh.v1 import (
    cuts_pb2,
    cuts_pb2_grpc,
    data_pb2,
    data_pb2_grpc,
    exchange_pb2,
    exchange_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2,
    logprob_pb2_grpc,
    operation_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tensor_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

_Key = operation_pb2.OperationKey
_Ref = experience_pb2.ExperienceRef
_Made = ResultCall[experience_pb2.ExperienceResult]
_Saved = ResultCall[weights_pb2.CheckpointResult]
_Cut = ResultCall[cuts_pb2.CutResult]


class ServiceClient:
    """The calls of one service. Every call raises a RolemeshError. Owner: the channel's loop.

    Example: status = await ServiceClient(open_channel("127.0.0.1:50051")).get_status()
    """

    def __init__(
        self, channel: MeshChannel, timeout_s: float | None = None, *, name: str = "the service"
    ) -> None:
        """Prepares; nothing is sent yet.

        Args:
            channel: To the service.
            timeout_s: Longest time of each call in seconds; None: the deadline of its method, and
                for one that streams its progress the idle time.
            name: Of the service, for errors.
        """
        self._peer = f"{name} at {channel.address}"
        self._timeout_s = timeout_s
        self._channel = channel
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._experience = experience_pb2_grpc.ExperienceServiceStub(channel)
        self._rollout = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._data = data_pb2_grpc.DataServiceStub(channel)
        self._logprob = logprob_pb2_grpc.LogprobServiceStub(channel)
        self._value = value_pb2_grpc.ValueServiceStub(channel)
        self._reward = reward_pb2_grpc.RewardServiceStub(channel)
        self._trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        self._weights = weights_pb2_grpc.WeightsServiceStub(channel)
        self._exchange = exchange_pb2_grpc.ExchangeServiceStub(channel)
        self._cuts = cuts_pb2_grpc.CutServiceStub(channel)

    def within(self, timeout_s: float) -> ServiceClient:
        """The same client, whose calls may take so many seconds each."""
        client = copy.copy(self)
        client._timeout_s = timeout_s
        return client

    # --- WorkerService ---

    async def get_capabilities(self) -> worker_pb2.GetCapabilitiesResponse:
        """Asks what the service can do."""
        request = worker_pb2.GetCapabilitiesRequest()
        return await self._worker.GetCapabilities(request, timeout=self._timeout_s)

    async def get_status(self, run_id: str = "") -> worker_pb2.GetStatusResponse:
        """Asks how the service is; with the run that holds it, also says that the run goes on."""
        request = worker_pb2.GetStatusRequest(run_id=run_id)
        return await self._worker.GetStatus(request, timeout=self._timeout_s)

    def initialize(
        self, key: _Key, spec: Mapping[str, Any], run_seed: int
    ) -> ResultCall[worker_pb2.InitializeResult]:
        """Gives the service its part of a run.

        Raises:
            ValueError: The spec holds a value that JSON does not have.
        """
        request = worker_pb2.InitializeRequest(key=key, spec=to_struct(spec), run_seed=run_seed)
        return self._followed(self._worker.Initialize, request)

    def attach(
        self, key: _Key, spec: Mapping[str, Any], run_seed: int
    ) -> ResultCall[worker_pb2.InitializeResult]:
        """Takes a run over that the service holds, under a higher epoch; loads nothing.

        Args:
            key: Of the operation, with the new epoch.
            spec: As Initialize got it.
            run_seed: As Initialize got it.

        Raises:
            ValueError: The spec holds a value that JSON does not have.
        """
        request = worker_pb2.AttachRequest(key=key, spec=to_struct(spec), run_seed=run_seed)
        return self._followed(self._worker.Attach, request)

    async def sleep(self, key: _Key) -> worker_pb2.SleepResponse:
        """Has the service move what it holds off its devices."""
        return await self._worker.Sleep(worker_pb2.SleepRequest(key=key), timeout=self._timeout_s)

    async def wake(self, key: _Key) -> worker_pb2.WakeResponse:
        """Has the service bring back what Sleep has moved."""
        return await self._worker.Wake(worker_pb2.WakeRequest(key=key), timeout=self._timeout_s)

    async def drain(self, run_id: str, fencing_epoch: int, *, exit: bool = False) -> None:
        """Has the service finish and forget the run; with `exit` its process ends."""
        request = worker_pb2.DrainRequest(exit=exit, run_id=run_id, fencing_epoch=fencing_epoch)
        await self._worker.Drain(request, timeout=self._timeout_s)

    # --- ExperienceService ---

    async def put(self, key: _Key, columns: Columns) -> _Ref:
        """Has the service hold rows of the caller.

        Raises:
            ValueError: A dtype that may not travel.
        """
        header, chunks = encode(columns)

        async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
            opening = experience_pb2.PutOpening(key=key, header=header)
            yield experience_pb2.PutRequest(opening=opening)
            for chunk in chunks:
                yield experience_pb2.PutRequest(chunk=chunk)

        return (await self._experience.Put(requests(), timeout=self._timeout_s)).experience

    async def release(
        self,
        run_id: str,
        fencing_epoch: int,
        *,
        experience_ids: Sequence[str] = (),
        through_step: int = 0,
    ) -> int:
        """Has the service drop experience and returns the bytes freed.

        Args:
            run_id: The run that the experience belongs to.
            fencing_epoch: The epoch of the caller.
            experience_ids: Ids of shards; none: all that the run has up to `through_step`.
            through_step: The last step whose experience is dropped.
        """
        request = experience_pb2.ReleaseRequest(
            run_id=run_id,
            experience_ids=experience_ids,
            through_step=through_step,
            fencing_epoch=fencing_epoch,
        )
        return (await self._experience.Release(request, timeout=self._timeout_s)).released_bytes

    # --- RolloutService and DataService ---

    def generate(
        self,
        key: _Key,
        prompts: rollout_pb2.PromptSlice | rollout_pb2.GivenPrompts,
        sampling: rollout_pb2.Sampling,
        *,
        block_rows: int = 0,
    ) -> _Made:
        """Samples completions of prompts; with block_rows > 0 it sends blocks of so many rows."""
        request = rollout_pb2.GenerateRequest(key=key, sampling=sampling, block_rows=block_rows)
        if isinstance(prompts, rollout_pb2.PromptSlice):
            request.prompts.CopyFrom(prompts)
        else:
            request.given.CopyFrom(prompts)
        return self._followed(self._rollout.Generate, request)

    def update_weights(
        self, key: _Key, weights: weights_pb2.WeightsRef, *, exchange: str = ""
    ) -> ResultCall[rollout_pb2.UpdateWeightsResult]:
        """Brings published weights to the sampler, over an exchange if one is named."""
        request = rollout_pb2.UpdateWeightsRequest(key=key, weights=weights, exchange=exchange)
        return self._followed(self._rollout.UpdateWeights, request)

    def read_batch(
        self, key: _Key, rows: rollout_pb2.PromptSlice, kind: data_pb2.ReadKind.ValueType
    ) -> _Made:
        """Makes experience of rows of the service's data."""
        request = data_pb2.ReadBatchRequest(key=key, rows=rows, kind=kind)
        return self._followed(self._data.ReadBatch, request)

    # --- scores ---

    def compute_logprobs(
        self,
        key: _Key,
        experience: _Ref,
        column: str,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> _Made:
        """Computes the log-prob of every completion token into the column of that name."""
        request = logprob_pb2.ComputeLogprobsRequest(
            key=key,
            experience=experience,
            column=column,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return self._followed(self._logprob.ComputeLogprobs, request)

    def compute_values(self, key: _Key, experience: _Ref) -> _Made:
        """Computes the value before every completion token."""
        request = value_pb2.ComputeValuesRequest(key=key, experience=experience)
        return self._followed(self._value.ComputeValues, request)

    def compute_reward(self, key: _Key, experience: _Ref, *, pass_at: Sequence[int] = ()) -> _Made:
        """Judges trajectories by reference; also reports pass@k for each k of `pass_at`."""
        request = reward_pb2.ComputeRewardRequest(key=key, experience=experience, pass_at=pass_at)
        return self._followed(self._reward.ComputeReward, request)

    def judge(
        self, key: _Key, trajectories: Iterable[reward_pb2.Trajectory]
    ) -> ResultCall[reward_pb2.Rewards]:
        """Judges trajectories that the request itself carries, by ComputeReward."""
        batch = reward_pb2.TrajectoryBatch(trajectories=trajectories)
        request = reward_pb2.ComputeRewardRequest(key=key, trajectories=batch)
        return self._followed(self._reward.ComputeReward, request, "rewards")

    # --- TrainerService ---

    def compute_advantages(
        self,
        key: _Key,
        experience: _Ref,
        estimator: trainer_pb2.AlgorithmPart,
        baseline: _Ref | None = None,
    ) -> _Made:
        """Computes advantages, compared with a baseline where the estimator asks for one."""
        request = trainer_pb2.ComputeAdvantagesRequest(
            key=key, experience=experience, estimator=estimator, baseline=baseline
        )
        return self._followed(self._trainer.ComputeAdvantages, request)

    def select_groups(
        self, key: _Key, experience: _Ref, rule: trainer_pb2.AlgorithmPart, max_groups: int = 0
    ) -> ResultCall[trainer_pb2.SelectGroupsResult]:
        """Keeps the groups that a rule wants, at most `max_groups`; 0 means all of them."""
        request = trainer_pb2.SelectGroupsRequest(
            key=key, experience=experience, rule=rule, max_groups=max_groups
        )
        return self._followed(self._trainer.SelectGroups, request)

    def forward_backward(
        self,
        key: _Key,
        experience: _Ref,
        loss: trainer_pb2.AlgorithmPart,
        *,
        rows_per_unit: int = 0,
        without_gradients: bool = False,
    ) -> ResultCall[trainer_pb2.ForwardBackwardResult]:
        """Adds gradients of a loss, or computes it alone; changes no weight."""
        request = trainer_pb2.ForwardBackwardRequest(
            key=key,
            experience=experience,
            loss=loss,
            rows_per_unit=rows_per_unit,
            without_gradients=without_gradients,
        )
        return self._followed(self._trainer.ForwardBackward, request)

    async def optim_step(
        self, key: _Key, expected_policy_version: int, learning_rate: float | None = None
    ) -> trainer_pb2.OptimStepResponse:
        """Applies the gradients; a learning rate of None is that of the spec's schedule."""
        request = trainer_pb2.OptimStepRequest(
            key=key,
            expected_policy_version=expected_policy_version,
            learning_rate=learning_rate,
        )
        return await self._trainer.OptimStep(request, timeout=self._timeout_s)

    def update(
        self,
        key: _Key,
        experience: _Ref,
        loss: trainer_pb2.AlgorithmPart,
        *,
        epochs: int,
        mini_batch_rows: int,
        rows_per_unit: int,
        expected_policy_version: int,
        auxiliary: Sequence[trainer_pb2.AuxiliaryLoss] = (),
    ) -> ResultCall[trainer_pb2.UpdateResult]:
        """Trains on a batch: gradients and a step for each epoch and mini-batch."""
        request = trainer_pb2.UpdateRequest(
            key=key,
            experience=experience,
            loss=loss,
            epochs=epochs,
            mini_batch_rows=mini_batch_rows,
            expected_policy_version=expected_policy_version,
            rows_per_unit=rows_per_unit,
            auxiliary=auxiliary,
        )
        return self._followed(self._trainer.Update, request)

    # --- WeightsService ---

    async def get_manifest(self) -> weights_pb2.GetManifestResponse:
        """Asks for the parameters of the model."""
        request = weights_pb2.GetManifestRequest()
        return await self._weights.GetManifest(request, timeout=self._timeout_s)

    async def get_checksums(
        self, holder: weights_pb2.WeightsHolder.ValueType
    ) -> weights_pb2.GetChecksumsResponse:
        """Asks for hashes of the weights as the trainer or the sampler holds them."""
        request = weights_pb2.GetChecksumsRequest(holder=holder)
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


def to_struct(fields: Mapping[str, Any]) -> struct_pb2.Struct:
    """Fields as they travel.

    Raises:
        ValueError: A value is nothing that JSON has.
    """
    try:
        return json_format.ParseDict(dict(fields), struct_pb2.Struct())
    except json_format.ParseError as error:
        raise ValueError(f"the fields {dict(fields)!r} cannot travel: {error}") from error


def to_algorithm_part(fields: Mapping[str, Any]) -> trainer_pb2.AlgorithmPart:
    """A loss, an estimator or a rule as it travels.

    Args:
        fields: Its registered name as "type", and its parameters.

    Raises:
        ValueError: There is no type, or a value is nothing that JSON has.
    """
    if "type" not in fields:
        raise ValueError(f'a part is {dict(fields)!r}: give its name as "type"')
    parameters = {name: value for name, value in fields.items() if name != "type"}
    return trainer_pb2.AlgorithmPart(type=fields["type"], parameters=to_struct(parameters))
