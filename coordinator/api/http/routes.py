"""The REST routes: each asks the operations of the coordinator and sends what they answer."""

from __future__ import annotations

import math
import re
import uuid
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from rolemesh.coordinator.api.http import bases, models, wishes
from rolemesh.coordinator.api.http.conversion import to_metrics, to_plain
from rolemesh.coordinator.api.http.events import EVENT_SCHEMA, EVENT_STREAM_TYPE, EventStreams
from rolemesh.coordinator.api.http.problems import problems
from rolemesh.coordinator.api.messages import FINAL_STATES
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.v1 import coordinator_pb2

_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})", re.ASCII | re.IGNORECASE
)
"""RFC 3339, section 5.6: a part of the forms that fromisoformat reads."""


def _read_bool(value: object) -> object:
    # pydantic takes "yes", "on" and "1" as well, which the document does not say.
    if value not in ("true", "false", True, False):
        raise PydanticCustomError("bool", "Input should be true or false")
    return value


async def refuse_unknown_query(request: Request) -> None:
    """Refuses a query parameter that the route does not have: a typo must not pass silently."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise InvalidRequestError(f"no query parameter {unknown[0]!r} here: there are {has}")


def _operations(request: Request) -> StoreOperations:
    operations: StoreOperations = request.app.state.operations
    return operations


TheOperations = Annotated[StoreOperations, Depends(_operations)]
RunId = Annotated[
    str,
    Path(pattern=bases.NAME_PATTERN, description="Id of the run.", examples=["arithmetic-1"]),
]
Step = Annotated[
    int,
    Query(ge=0, le=bases.MAX_INT64, description="The step, from 1; 0 for the newest there is."),
]

_runs = APIRouter(prefix="/runs", tags=["runs"])
_run = APIRouter(prefix="/runs/{run_id}", tags=["runs"], responses=problems(404))
_observation = APIRouter(prefix="/runs/{run_id}", tags=["observation"], responses=problems(404))
_services = APIRouter(prefix="/services", tags=["services"])


@_runs.get("", response_model=models.RunList)
async def list_runs(
    operations: TheOperations,
    page_size: Annotated[int, Query(ge=1, le=1000, description="Most runs sent.")] = 100,
) -> Any:
    """Lists runs, newest first."""
    return {"runs": [to_plain(run) for run in await operations.list_runs(page_size)]}


@_runs.post(
    "",
    status_code=201,
    response_model=models.Run,
    responses={
        201: {"headers": {"Location": {"description": "The run.", "schema": {"type": "string"}}}},
        **problems(409, 413, 429),
    },
)
async def create_run(
    operations: TheOperations, wish: wishes.RunCreation, response: Response
) -> Any:
    """Starts a run of a recipe; a repeat with the same id and recipe answers with the run."""
    run = await operations.create_run(wish.run_id, wish.recipe, wish.overrides)
    response.headers["location"] = f"/api/v1/runs/{run.run_id}"
    return to_plain(run)


@_run.get("", response_model=models.Run)
async def get_run(operations: TheOperations, run_id: RunId) -> Any:
    """Describes a run."""
    return to_plain(await operations.get_run(run_id))


@_run.post("/stop", response_model=models.Run)
async def stop_run(operations: TheOperations, run_id: RunId) -> Any:
    """Asks a run to end after the step in progress, with everything saved."""
    return to_plain(await operations.stop_run(run_id))


@_run.post("/pause", response_model=models.Run, responses=problems(409))
async def pause_run(operations: TheOperations, run_id: RunId) -> Any:
    """Asks a run to make no further step until it is resumed."""
    return to_plain(await operations.pause_run(run_id))


@_run.post("/resume", response_model=models.Run, responses=problems(409, 413, 429))
async def resume_run(
    operations: TheOperations,
    run_id: RunId,
    wish: Annotated[
        wishes.Resumption | None,
        Body(description="What changes in a run that has ended; without a body nothing does."),
    ] = None,
) -> Any:
    """Takes the wish to pause back; starts a run that failed or was stopped from where it is."""
    return to_plain(await operations.resume_run(run_id, () if wish is None else wish.overrides))


@_run.post("/checkpoint", response_model=models.Run, responses=problems(409, 413))
async def checkpoint_run(
    operations: TheOperations,
    run_id: RunId,
    wish: Annotated[
        wishes.CheckpointWish | None,
        Body(description="Names the wish; without a body it gets a name of its own."),
    ] = None,
) -> Any:
    """Asks a run to save a checkpoint after the step in progress; an event tells that it did."""
    request_id = uuid.uuid4().hex if wish is None else wish.request_id
    return to_plain(await operations.checkpoint_run(run_id, request_id))


@_run.post("/steps", response_model=models.Run, responses=problems(409, 413))
async def log_step(operations: TheOperations, run_id: RunId, logged: wishes.LoggedStep) -> Any:
    """Takes the metrics of a step that a client made, in a run of the algorithm "external"."""
    samples = [
        coordinator_pb2.Sample(
            **sample.model_dump(exclude={"reward"}),
            reward=math.nan if sample.reward is None else sample.reward,
        )
        for sample in logged.samples
    ]
    return to_plain(
        await operations.log_step(
            run_id, logged.fencing_epoch, logged.step, logged.metrics, samples
        )
    )


@_observation.get(
    "/events",
    response_class=Response,
    responses={
        200: {
            "description": (
                "Events, those that were and those that come, until after the one of a final "
                "state; `event` says which member of the RunEvent is there. Comments come between "
                "them. The event `problem` has no id and tells why a stream ended early."
            ),
            "content": {
                EVENT_STREAM_TYPE: {
                    "itemSchema": EVENT_SCHEMA,
                    "example": (
                        'id: 7\nevent: note\ndata: {"event_id":"7","time":'
                        '"2026-01-01T00:00:00.000000Z","step":3,"note":{"text":"critic is back"}}'
                        "\n\n"
                    ),
                }
            },
        },
        204: {"description": "The run has ended and all its events were sent: do not come back."},
        **problems(410, 429),
    },
)
async def watch_run(
    request: Request,
    operations: TheOperations,
    run_id: RunId,
    after: Annotated[
        str, Query(max_length=100, description="Id of the last event that arrived.")
    ] = "",
    last_event_id: Annotated[
        str,
        Header(max_length=100, description="The same, as browsers send it; wins over `after`."),
    ] = "",
) -> Response:
    """Sends the events of a run as they come, from the start or after the given one."""
    run = await operations.get_run(run_id)
    streams: EventStreams = request.app.state.streams
    return await streams.open(
        operations.watch_run(run_id, last_event_id or after),
        request.state.request_id,
        has_ended=run.state in FINAL_STATES,
    )


@_observation.get("/metrics", response_model=models.Metrics)
async def get_metrics(
    operations: TheOperations,
    run_id: RunId,
    names: Annotated[
        list[str],
        Query(
            max_length=200,
            description=(
                "Names wanted, each as a parameter of its own; one that ends in * stands for all "
                "that begin so. None means all."
            ),
            examples=[["reward/*", "actor/kl"]],
        ),
    ] = [],  # noqa: B006 - FastAPI copies it
    from_step: Annotated[
        int, Query(ge=0, le=bases.MAX_INT64, description="First step wanted.")
    ] = 0,
    max_steps: Annotated[int, Query(ge=1, le=1000, description="Most steps sent.")] = 1000,
    thin: Annotated[
        bool,
        BeforeValidator(_read_bool),
        Query(
            description=(
                "With more steps than max_steps, send every n-th one, and always the newest, "
                "instead of the first ones."
            )
        ),
    ] = False,
) -> Any:
    """Sends metrics of steps, in columns."""
    return to_metrics(await operations.get_metrics(run_id, names, from_step, max_steps, thin=thin))


@_observation.get("/dataflow", response_model=models.Dataflow)
async def get_dataflow(operations: TheOperations, run_id: RunId, step: Step = 0) -> Any:
    """Sends the graph of a step; without one, that of the step in progress or else the newest."""
    return to_plain(await operations.get_dataflow(run_id, step))


@_observation.get("/plan", response_model=models.Plan)
async def get_plan(operations: TheOperations, run_id: RunId) -> Any:
    """Sends what was planned (`rolemesh plan --write`), beside what steps took so far."""
    return to_plain(await operations.get_plan(run_id))


@_observation.get("/samples", response_model=models.SampleList)
async def list_samples(operations: TheOperations, run_id: RunId, step: Step = 0) -> Any:
    """Sends some trajectories of a step with their rewards and log-probs."""
    return to_plain(await operations.list_samples(run_id, step))


@_observation.get("/experts", response_model=models.ExpertLoads)
async def get_expert_loads(operations: TheOperations, run_id: RunId, step: Step = 0) -> Any:
    """Sends how often each expert of the trained mixtures was chosen in a step."""
    return to_plain(await operations.get_expert_loads(run_id, step))


@_observation.get("/devices", response_model=models.DeviceUse)
async def get_device_use(
    operations: TheOperations,
    run_id: RunId,
    since: Annotated[
        str | None,
        Query(
            json_schema_extra={"format": "date-time"},
            description="First time wanted; absent for all that is kept.",
        ),
    ] = None,
) -> Any:
    """Sends how busy the devices of a run were, over time."""
    return to_plain(await operations.get_device_use(run_id, _to_seconds(since)))


@_observation.get("/alerts", response_model=models.AlertList)
async def list_alerts(operations: TheOperations, run_id: RunId) -> Any:
    """Says what deserves an operator's attention, in plain words."""
    return to_plain(await operations.list_alerts(run_id))


@_observation.get("/logs/{log}", response_model=models.LogPiece)
async def read_log(
    operations: TheOperations,
    run_id: RunId,
    log: Annotated[
        str,
        Path(
            pattern=bases.NAME_PATTERN,
            description='Name of the log, e.g. "coordinator", "actor" or "actor-rank-1".',
            examples=["coordinator"],
        ),
    ],
    offset: Annotated[
        int,
        Query(
            ge=-bases.MAX_INT64,
            le=bases.MAX_INT64,
            description="First byte wanted; negative: so many bytes before the end.",
        ),
    ] = 0,
    max_bytes: Annotated[int, Query(ge=1, le=2**20, description="Most bytes sent.")] = 2**16,
) -> Any:
    """Sends a piece of a log of a run."""
    return to_plain(await operations.read_log(run_id, log, offset, max_bytes))


@_services.get("", response_model=models.ServiceList)
async def list_services(operations: TheOperations) -> Any:
    """Lists the services that the coordinator knows, with their leases."""
    return {"services": [to_plain(service) for service in await operations.list_services()]}


def _to_seconds(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        if not _TIME.fullmatch(text):
            raise ValueError("that is not RFC 3339")
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"since is {text!r}: give a time as in 2026-01-01T00:00:00Z ({error})"
        ) from error


router = APIRouter(
    prefix="/api/v1",
    responses=problems(400, 403, 500, 503),
    dependencies=[Depends(refuse_unknown_query)],
    # The operations that CoordinatorService has too, under the same names.
    generate_unique_id_function=lambda route: route.name,
)
for _part in (_runs, _run, _observation, _services):
    router.include_router(_part)
