"""RPCs over a trainer, shared by every role that may hold one.

Each pulls the columns it needs, hands one function of the engine to the compute thread, and
publishes what came out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message
from pydantic import ValidationError

from rolemesh.engine.algorithms.judged import judged_rows
from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.batching import unit_lengths
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import AdamwStepSpec, LossSpec
from rolemesh.engine.specs.columns import IS_JUDGED, ROUTES
from rolemesh.engine.train.auxiliary import AuxiliaryLoss
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.rpc.calls.expert_loads import loads_message
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.rpc.experience.references import names_of, row_tokens
from rolemesh.rpc.limits import MAX_TRAINED_ROWS, exceeded
from rolemesh.services.runtime.calls.runtime import Call, Context
from rolemesh.services.runtime.servicers.estimates import EstimateServicer, algorithm_part
from rolemesh.services.runtime.servicers.model_inputs import model_inputs
from rolemesh.v1 import (
    experience_pb2,
    trainer_pb2,
)

if TYPE_CHECKING:
    from rolemesh.engine.train.expert_loads import LayerLoads
    from rolemesh.engine.train.trainer import Trainer

_Response = TypeVar("_Response", bound=Message)


class TrainerServicer(EstimateServicer):
    """TrainerService over a trainer: what changes weights, besides what estimates."""

    def ForwardBackward(
        self, request: trainer_pb2.ForwardBackwardRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.ForwardBackwardResponse]:
        """See trainer.proto."""

        async def work(call: Call) -> Message:
            loss = algorithm_part(LossSpec, request.loss)
            lengths = row_tokens(request.experience)
            rows_per_unit = _rows_per_unit(request.rows_per_unit, len(lengths))
            units = self._runtime.share("3D_PROTO", unit_lengths(lengths, rows_per_unit))
            share = units.times(rows_per_unit)
            plan = UpdatePlan.of_mini_batch(lengths, share.rows, rows_per_unit)
            batch = await self._pull_for(loss, request.experience, plan, call)
            metrics, outputs = await call.compute(
                self._role.trainer.forward_backward,
                batch,
                loss,
                plan,
                call.progress,
                without_gradients=request.without_gradients,
            )
            return trainer_pb2.ForwardBackwardResult(
                report=call.report(metrics, batch.num_tokens if share.counts else 0),
                outputs=self._runtime.publish(request.key, outputs, share=share),
            )

        return self._runtime.keyed(request, trainer_pb2.ForwardBackwardResponse, work)

    async def OptimStep(
        self, request: trainer_pb2.OptimStepRequest, context: Context
    ) -> trainer_pb2.OptimStepResponse:
        """See trainer.proto."""

        async def work(call: Call) -> trainer_pb2.OptimStepResponse:
            trainer = self._role.trainer
            rate = request.learning_rate if request.HasField("learning_rate") else None
            adamw = adamw_step(request.adamw) if request.HasField("adamw") else None

            def step() -> tuple[dict[str, float], int, list[LayerLoads]]:
                # Looked at where weights change: an update that was queued before may move them.
                _expect_version(trainer, request.expected_policy_version)
                metrics = trainer.optim_step(rate, adamw)
                return metrics, trainer.policy_version, trainer.take_expert_loads()

            metrics, policy_version, loads = await call.compute(step)
            return trainer_pb2.OptimStepResponse(
                policy_version=policy_version,
                report=call.report(metrics, 0),
                expert_loads=self._told_loads(loads),
            )

        return await self._runtime.keyed_unary(request, work)

    def Update(
        self, request: trainer_pb2.UpdateRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.UpdateResponse]:
        """See trainer.proto."""

        async def work(call: Call) -> Message:
            loss = algorithm_part(LossSpec, request.loss)
            if request.epochs < 1 or request.mini_batch_rows < 1:
                raise InvalidRequestError(
                    f"epochs is {request.epochs} and mini_batch_rows is "
                    f"{request.mini_batch_rows}: both must be at least 1",
                    reason="SPEC_INVALID",
                )
            if request.epochs * request.experience.num_rows > MAX_TRAINED_ROWS:
                raise exceeded(
                    "epochs * experience.num_rows",
                    request.epochs * request.experience.num_rows,
                    MAX_TRAINED_ROWS,
                    "every rank plans all of them: update in several calls",
                )
            trainer = self._role.trainer
            judged = await self._judged_rows(request.experience, call)
            plan = UpdatePlan.of_update(
                row_tokens(request.experience),
                trainer.mesh.parts,
                judged=judged,
                epochs=request.epochs,
                mini_batch_rows=request.mini_batch_rows,
                seed=derive_seed(
                    self._role.run_seed,
                    request.key.step,
                    self._role.name,
                    "update",
                    lineage=request.key.lineage,
                ),
                rows_per_unit=_rows_per_unit(
                    request.rows_per_unit, len(judged), request.mini_batch_rows
                ),
            )
            batch = await self._pull_for(loss, request.experience, plan, call)
            auxiliary = [
                await self._auxiliary(extra, len(plan.steps), call) for extra in request.auxiliary
            ]
            num_tokens = sum(part.num_tokens for part in (batch, *(x.batch for x in auxiliary)))
            counts = trainer.mesh.model.is_first

            def update() -> tuple[dict[str, float], int, list[LayerLoads]]:
                # Looked at where weights change: an update that was queued before may move them.
                _expect_version(trainer, request.expected_policy_version)
                metrics = trainer.update(
                    batch, loss, plan, progress=call.progress, auxiliary=auxiliary
                )
                return metrics, trainer.policy_version, trainer.take_expert_loads()

            metrics, policy_version, loads = await call.compute(update)
            return trainer_pb2.UpdateResult(
                policy_version=policy_version,
                report=call.report(metrics, num_tokens if counts else 0),
                expert_loads=self._told_loads(loads),
            )

        return self._runtime.keyed(request, trainer_pb2.UpdateResponse, work)

    def _told_loads(self, loads: Sequence[LayerLoads]) -> list[experience_pb2.LayerLoads]:
        """As they travel. All ranks have the same, and rank 0 tells them."""
        if not self._runtime.is_face:
            return []
        return loads_message({one.layer: one.choices for one in loads})

    async def _judged_rows(self, ref: experience_pb2.ExperienceRef, call: Call) -> Sequence[int]:
        """The rows that there is something to learn from: the others are in no mini-batch."""
        if IS_JUDGED not in names_of(ref):
            return range(ref.num_rows)
        rows = judged_rows(await self._runtime.pull(ref, [IS_JUDGED], call))
        return range(ref.num_rows) if rows is None else rows.tolist()

    async def _auxiliary(
        self, extra: trainer_pb2.AuxiliaryLoss, num_steps: int, call: Call
    ) -> AuxiliaryLoss:
        """A further loss with this rank's rows of it."""
        loss = algorithm_part(LossSpec, extra.loss)
        plan = UpdatePlan.dealt(
            row_tokens(extra.experience), self._role.trainer.mesh.parts, num_steps=num_steps
        )
        return AuxiliaryLoss(
            batch=await self._pull_for(loss, extra.experience, plan, call),
            loss=loss,
            weight=extra.weight,
            plan=plan,
        )

    async def _pull_for(
        self,
        loss: LossSpec,
        ref: experience_pb2.ExperienceRef,
        plan: UpdatePlan,
        call: Call,
    ) -> Experience:
        optional = loss.optional_columns()
        if not set(optional) <= set(names_of(ref)):
            optional = ()
        if self._role.replays_routes and ROUTES in names_of(ref):
            optional = (*optional, ROUTES)
        columns = dict.fromkeys((*model_inputs(ref), *loss.columns(), *optional))
        return await self._runtime.pull(ref, list(columns), call, rows=plan.rows)


def adamw_step(given: trainer_pb2.AdamwStep) -> AdamwStepSpec:
    """Numbers of one step; raises InvalidRequestError where one is out of range."""
    try:
        return AdamwStepSpec(
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            max_grad_norm=given.max_grad_norm or None,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(
            f"adamw.{where} is {first['input']}: {first['msg']}", reason="SPEC_INVALID"
        ) from error


def _rows_per_unit(asked: int, num_rows: int, mini_batch_rows: int = 0) -> int:
    """Rows of a unit, 0 meaning 1; raises InvalidRequestError where units would be cut apart."""
    if asked < 0:
        raise InvalidRequestError(
            f"rows_per_unit is {asked}: give at least 1, or 0 for rows by themselves",
            reason="SPEC_INVALID",
        )
    rows_per_unit = asked or 1
    for name, number in (("the batch's rows", num_rows), ("mini_batch_rows", mini_batch_rows)):
        if number % rows_per_unit:
            raise InvalidRequestError(
                f"{name} are {number}, which is no multiple of rows_per_unit {rows_per_unit}: "
                "give whole units",
                reason="SPEC_INVALID",
            )
    return rows_per_unit


def _expect_version(trainer: Trainer, expected: int) -> None:
    if trainer.policy_version != expected:
        raise PreconditionError(
            f"the weights are at policy_version {trainer.policy_version}, but the call expects "
            f"{expected}: another call has changed them; start the step again",
            reason="VERSION_MISMATCH",
        )
