"""JSON models of what clients send by REST."""

from __future__ import annotations

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from rolemesh.coordinator.api.http.bases import (
    MAX_INT64,
    NAME_PATTERN,
    GivenInt64,
    Number,
    Wish,
)
from rolemesh.coordinator.api.reads.logged_steps import (
    MAX_METRICS,
    MAX_SAMPLES,
    MAX_STEP,
    MAX_VALUE,
    METRIC_NAME_PATTERN,
)


class RunCreation(Wish):
    """Asks to start a run."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "run_id": "arithmetic-1",
                    "recipe": "algorithm: {type: grpo}\n",
                    "overrides": ["run.steps=20"],
                }
            ]
        }
    )

    run_id: str = Field(pattern=NAME_PATTERN)
    """Id of the run, chosen by the caller: a repeat with the same recipe starts no second one."""
    recipe: str = Field(min_length=1)
    """The recipe, as YAML or JSON text."""
    overrides: list[str] = Field(default=[], max_length=1000)
    """Fields to set besides, "a.b.c=value", as on the command line."""


class CheckpointWish(Wish):
    """Asks for a checkpoint."""

    request_id: str = Field(min_length=1, max_length=128)
    """Names the wish, e.g. a UUID: a repeat asks for no second checkpoint."""


class Resumption(Wish):
    """Asks to resume a run."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"overrides": ["run.steps=40"]}]})

    overrides: list[str] = Field(default=[], max_length=1000)
    """Fields of a run that has ended to set besides, "a.b.c=value", as on the command line."""


_FINITE: JsonDict = {"type": "number", "minimum": -MAX_VALUE, "maximum": MAX_VALUE}
"""Schema of a finite float32."""


class LoggedSample(Wish):
    """One trajectory that a client logs."""

    row: GivenInt64 = Field(ge=0, le=MAX_INT64)
    """Row of the batch, different for each sample of a step."""
    prompt: str
    """The prompt as text."""
    completion: str
    """The completion as text."""
    answer: str = ""
    """The expected answer, when the data has one."""
    reward: Number = None
    """Its reward; null where it has none."""
    policy_version: GivenInt64 = Field(default=0, ge=0, le=MAX_INT64)
    """Version of the weights that sampled its first token."""
    reward_parts: dict[str, float] = Field(
        default={}, json_schema_extra={"additionalProperties": _FINITE}
    )
    """Parts of its reward by "<source>/<part>", finite."""


class LoggedStep(Wish):
    """Metrics of a step that a client made, and some of its samples."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"fencing_epoch": 2, "step": 1, "metrics": {"reward/mean": 0.25}}]
        }
    )

    fencing_epoch: GivenInt64 = Field(ge=1, le=MAX_INT64)
    """Of the client, from AttachRun of gRPC."""
    step: GivenInt64 = Field(ge=1, le=MAX_STEP)
    """The step. Those of one epoch ascend; a repeat with the same metrics changes nothing."""
    metrics: dict[str, float] = Field(
        min_length=1,
        max_length=MAX_METRICS,
        json_schema_extra={
            "propertyNames": {"pattern": METRIC_NAME_PATTERN, "not": {"const": "step"}},
            "additionalProperties": _FINITE,
        },
    )
    """Finite values by name."""
    samples: list[LoggedSample] = Field(default=[], max_length=MAX_SAMPLES)
    """Some trajectories of the step."""
