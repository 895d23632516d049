"""Calls of a service: one typed method for each RPC of every role.

A method takes the fields of its request and gives the answer. Who makes a call makes its key too,
so that a repeat of the call can carry the same one. What a call does, and which errors it has, the
comments of protos/rolemesh/v1 say. Rows are pulled by `rolemesh.rpc.experience.column_fetch`;
calls on weights and on the trainer's state stand in `rolemesh.rpc.calls.state_client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format, struct_pb2

from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.calls.state_client import StateClient
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.experience.columns import Columns, encode
from rolemesh.v1 import (
    data_pb2,
    data_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    logprob_pb2,
    logprob_pb2_grpc,
    operation_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    weights_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

_Key = operation_pb2.OperationKey
_Ref = experience_pb2.ExperienceRef
_Made = ResultCall[experience_pb2.ExperienceResult]


class ServiceClient(StateClient):
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
        super().__init__(channel, timeout_s, name)
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._experience = experience_pb2_grpc.ExperienceServiceStub(channel)
        self._rollout = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._data = data_pb2_grpc.DataServiceStub(channel)
        self._logprob = logprob_pb2_grpc.LogprobServiceStub(channel)
        self._value = value_pb2_grpc.ValueServiceStub(channel)
        self._reward = reward_pb2_grpc.RewardServiceStub(channel)
        self._trainer = trainer_pb2_grpc.TrainerServiceStub(channel)

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
        self,
        key: _Key,
        spec: Mapping[str, Any],
        run_seed: int,
        *,
        device_type: str = "",
        deterministic: bool = False,
    ) -> ResultCall[worker_pb2.InitializeResult]:
        """Gives the service its part of a run.

        Args:
            key: Of the operation.
            spec: The role's section of the recipe.
            run_seed: Of the run.
            device_type: "cuda" where the service has to compute on GPUs; "": on what it has.
            deterministic: Whether the same work must give the same bits on a GPU, too.

        Raises:
            ValueError: The spec holds a value that JSON does not have.
        """
        request = worker_pb2.InitializeRequest(
            key=key,
            spec=to_struct(spec),
            run_seed=run_seed,
            device_type=device_type,
            deterministic=deterministic,
        )
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
        without_adapter: bool = False,
        top_k: int = 0,
        as_teacher: bool = False,
        route: logprob_pb2.RowRoute | None = None,
    ) -> _Made:
        """Computes the log-prob of every completion token into the column of that name."""
        request = logprob_pb2.ComputeLogprobsRequest(
            key=key,
            experience=experience,
            column=column,
            temperature=temperature,
            with_entropy=with_entropy,
            without_adapter=without_adapter,
            top_k=top_k,
            as_teacher=as_teacher,
            route=route,
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
        self,
        key: _Key,
        expected_policy_version: int,
        learning_rate: float | None = None,
        adamw: trainer_pb2.AdamwStep | None = None,
    ) -> trainer_pb2.OptimStepResponse:
        """Applies the gradients; a learning rate of None is that of the spec's schedule."""
        request = trainer_pb2.OptimStepRequest(
            key=key,
            expected_policy_version=expected_policy_version,
            learning_rate=learning_rate,
            adamw=adamw,
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
