"""Calls for log-probs: of one policy, or of several teachers that each score rows of their own."""

from __future__ import annotations

from google.protobuf.message import Message

from rolemesh.coordinator.dataflow.calls.role_calls import RoleHandle, ServiceNodes
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import CallFuture, ExperienceFuture, NodeKind, SharedCall
from rolemesh.coordinator.recipe.role_names import kind_of, teacher_role
from rolemesh.engine.specs import LEFT, RouteShare
from rolemesh.engine.specs.columns import (
    INPUT_COLUMNS,
    IS_JUDGED,
    teacher_voices,
    top_column,
    top_ids_column,
    weights_column,
)
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.v1 import experience_pb2, logprob_pb2, operation_pb2


def compute_logprobs(
    handle: RoleHandle, experience: ExperienceFuture, column: str, *, top_k: int = 0
) -> ExperienceFuture:
    """Asks whoever plays a role for log-probs.

    Args:
        handle: Of the role.
        experience: What is scored.
        column: Name of the log-probs.
        top_k: How many of the likeliest tokens are wanted besides at each place.
    """
    context = handle.context
    players = context.players_of(handle.role)
    route = None if context.teacher is None else context.teacher.route
    if route is None or kind_of(players[0]) != "teacher":
        part = _scored(handle, players[0], experience, column, top_k)
        return ExperienceFuture(context.dataflow, (part,))
    voices = route.voices()
    has_weights = len(voices) > 1
    parts = []
    for name, shares in zip(teacher_voices(len(voices), column), voices, strict=True):
        calls = [
            _scored(
                handle,
                teacher_role(share.teacher),
                experience,
                name,
                top_k,
                to_row_route(share, with_weights=has_weights),
            )
            for share in shares
        ]
        parts.append(SharedCall.of(calls))
    return ExperienceFuture(context.dataflow, tuple(parts))


def _scored(
    handle: RoleHandle,
    player: str,
    experience: ExperienceFuture,
    column: str,
    top_k: int,
    route: logprob_pb2.RowRoute | None = None,
) -> CallFuture:
    context = handle.context
    temperature = context.parts.policy_loss.logprob_temperature
    is_served_by_actor = player in context.served_by_actor
    teacher = context.teacher_of(player)
    told = () if teacher is None or teacher.prompt is None else teacher.prompt.columns()
    if route is not None and route.field:
        told = (*told, "metadata")
    is_base = is_served_by_actor and teacher is None
    is_told = teacher is not None and teacher.as_actor() is not None
    needs, makes = dropping(handle)
    top = (top_ids_column(column), top_column(column)) if top_k else ()
    weights = (weights_column(column),) if route is not None and route.with_weights else ()

    async def call(
        client: ServiceClient,
        key: operation_pb2.OperationKey,
        ref: experience_pb2.ExperienceRef,
        on_progress: ProgressCallback,
    ) -> Message:
        result: experience_pb2.ExperienceResult = await client.compute_logprobs(
            key,
            ref,
            column,
            temperature=temperature,
            without_adapter=is_base,
            top_k=top_k,
            as_teacher=is_told,
            route=route,
        ).result(on_progress)
        if route is not None and not result.is_part:
            raise RunError(
                f"step {context.step}: the {player} was asked for its own rows and answered for "
                "all (is_part is false): a service that is one of several teachers must keep "
                "ComputeLogprobsRequest.route; see `rolemesh compliance --role teacher`"
            )
        return result

    return ServiceNodes(context, *context.services_of_player(player)).node(
        NodeKind.INFER,
        # Named apart from what an actor scores for itself.
        f"compute_{kind_of(player)}_logprobs" if is_served_by_actor else "compute_logprobs",
        call,
        experience.select((*INPUT_COLUMNS, *told, *needs), uses=(IS_JUDGED,) if needs else ()),
        (column, *top, *weights, *makes),
    )


def dropping(handle: RoleHandle) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Columns that a role reads and makes besides, where it may leave rows out of the step."""
    if handle.connection.role not in handle.context.may_drop:
        return (), ()
    # A row that is left out loses its mask, and so its part in every update.
    return ("prompt_ids", "loss_mask"), (IS_JUDGED, "loss_mask")


def to_row_route(share: RouteShare, *, with_weights: bool) -> logprob_pb2.RowRoute:
    """A teacher's share of the rows, as it travels."""
    route = logprob_pb2.RowRoute(
        field=share.field, weights=share.weights, left=share.left, with_weights=with_weights
    )
    if share.others == LEFT:
        route.others_left = True
    elif share.others is not None:
        route.others_weight = share.others
    return route
