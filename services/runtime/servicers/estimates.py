"""RPCs of a trainer that no model takes part in: estimates from numbers of a whole batch.

They live with the trainer because their controllers are part of its state. One rank computes
them, since group statistics and whitening take the whole batch, which is numbers only.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, get_args

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic import TypeAdapter

from rolemesh.engine.algorithms.estimators.estimation import (
    Controllers,
    check_baseline,
    estimate_advantages,
)
from rolemesh.engine.algorithms.selection import select_groups
from rolemesh.engine.specs import (
    EstimatorPartSpec,
    EstimatorSpec,
    OwnFunctionSpec,
    PartSpec,
    SelectionSpec,
)
from rolemesh.engine.specs.columns import IS_JUDGED
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.experience.references import names_of
from rolemesh.services.runtime.calls.runtime import Call, Context, Runtime
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.worker import whole_numbers
from rolemesh.v1 import experience_pb2, trainer_pb2, trainer_pb2_grpc


class EstimateServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """ComputeAdvantages and SelectGroups of TrainerService; `TrainerServicer` adds the rest.

    Invariant: the estimator's controllers (weight of the KL, Lagrange multiplier, running baseline)
    move once per ComputeAdvantages, and are part of the trainer's checkpoint.
    """

    def __init__(self, role: ModelRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime
        self._estimating = asyncio.Lock()

    def ComputeAdvantages(
        self, request: trainer_pb2.ComputeAdvantagesRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.ComputeAdvantagesResponse]:
        """See trainer.proto."""

        async def work(call: Call) -> Message:
            spec = algorithm_part(EstimatorSpec, request.estimator)
            check_baseline(spec, has_baseline=request.HasField("baseline"))
            batch = await self._runtime.pull(
                request.experience, _columns_of(spec, request.experience), call
            )
            baseline = None
            if request.HasField("baseline"):
                baseline = await self._runtime.pull(request.baseline, spec.baseline_columns(), call)
            # Two calls that began with the same state would move the controllers once.
            async with self._estimating:
                controllers = Controllers.from_spec(spec)
                controllers.load_state_dict(self._role.extra_state)
                estimated, metrics = await call.compute(
                    estimate_advantages,
                    batch,
                    spec,
                    controllers,
                    baseline,
                    self._role.own_functions,
                )
                result = experience_pb2.ExperienceResult(
                    report=call.report(metrics, batch["loss_mask"].values.numel()),
                    experience=self._runtime.publish(request.key, estimated),
                )
                # Last: a call that fails before is repeated, and must find the controllers unmoved.
                self._role.extra_state.update(controllers.state_dict())
            return result

        # Whitening takes the whole batch, which is numbers only: one rank computes it.
        return self._runtime.keyed(
            request, trainer_pb2.ComputeAdvantagesResponse, work, on_all_ranks=False
        )

    def SelectGroups(
        self, request: trainer_pb2.SelectGroupsRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.SelectGroupsResponse]:
        """See trainer.proto."""

        async def work(call: Call) -> Message:
            rule = algorithm_part(SelectionSpec, request.rule)
            if request.max_groups < 0:
                raise InvalidRequestError(
                    f"max_groups is {request.max_groups}: give the most groups to keep, or 0 for "
                    "no bound",
                    reason="SPEC_INVALID",
                )
            # Few numbers decide; what is not kept is never fetched.
            numbers = await self._runtime.pull(
                request.experience, _columns_of(rule, request.experience), call
            )
            rows, num_groups, metrics = await call.compute(
                select_groups, numbers, rule, request.max_groups
            )
            if not num_groups:
                return trainer_pb2.SelectGroupsResult(report=call.report(metrics, 0))
            kept = await self._runtime.pull(
                request.experience, names_of(request.experience), call, rows=rows.tolist()
            )
            return trainer_pb2.SelectGroupsResult(
                experience=self._runtime.publish(request.key, kept),
                num_groups=num_groups,
                report=call.report(metrics, kept.num_tokens),
            )

        # A group's rows may lie anywhere in the batch: one rank looks at all of it.
        return self._runtime.keyed(
            request, trainer_pb2.SelectGroupsResponse, work, on_all_ranks=False
        )


def algorithm_part(spec: Any, part: trainer_pb2.AlgorithmPart) -> Any:
    """The validated spec of an algorithm part; pydantic's ValidationError names the field.

    Raises:
        InvalidRequestError: SPEC_INVALID: there is no part of this name.
    """
    # The union and its discriminator.
    members, *_ = get_args(spec)
    known = {one.model_fields["type"].default: one for one in get_args(members)}
    if part.type not in known:
        own = any(issubclass(one, OwnFunctionSpec) for one in known.values())
        raise InvalidRequestError(
            f"type is {part.type!r}: valid are {', '.join(known)}"
            + ("; python, with function 'path/to/file.py:name', is one of yours" if own else ""),
            reason="SPEC_INVALID",
        )
    parameters = whole_numbers(json_format.MessageToDict(part.parameters))
    return _adapter_of(spec).validate_python({**parameters, "type": part.type})


@functools.cache
def _adapter_of(spec: Any) -> TypeAdapter[Any]:
    """Made once: it takes a millisecond, which is a tenth of a small call."""
    return TypeAdapter(spec)


def _columns_of(spec: PartSpec, ref: experience_pb2.ExperienceRef) -> list[str]:
    """What is read: optional columns only where the batch has all of them.

    And always which rows are judged, where the batch says so.
    """
    there = names_of(ref)
    optional = spec.optional_columns()
    used = spec.used_columns() if isinstance(spec, EstimatorPartSpec) else ()
    read = (
        *spec.columns(),
        *(optional if set(optional) <= set(there) else ()),
        *(name for name in used if name in there),
    )
    return list(dict.fromkeys((*read, *((IS_JUDGED,) if IS_JUDGED in there else ()))))
