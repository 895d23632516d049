"""Section `plan` of a recipe: what `rolemesh plan --write` predicted of its step.

A run learns the same with it, without it, and with another one: it is only shown beside what the
steps took.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from rolemesh.engine.specs import Spec

MAX_TASKS = 256
"""Tasks of a planned step. One call of each role's method makes a dozen."""

MAX_POOLS = 64
"""Pools of a plan. Each has a role at least."""

_MAX_S = 1e9
"""Longest step in seconds: 30 years."""

_Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_Text = Annotated[str, StringConstraints(min_length=1, max_length=4000)]


class PlannedTaskSpec(Spec):
    """One call of the predicted step."""

    name: str = Field(pattern=r"^[a-z]+\.[a-z_]+$", max_length=64)
    """Role and method, e.g. actor.update, as the recorded graph names its calls. Calls of one name
    count together."""
    pool: _Name | None = None
    """Pool that it was planned for; None: it needs no device."""
    start_s: float = Field(ge=0, le=_MAX_S)
    """When it starts, in seconds since the step began."""
    end_s: float = Field(ge=0, le=_MAX_S)
    """When it ends, in seconds since the step began."""
    is_ahead: bool = False
    """Whether it samples for a later step."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.end_s < self.start_s:
            raise ValueError(
                f"{self.name} has end_s {self.end_s:g}, which is before its start_s "
                f"{self.start_s:g}: write the plan anew with `rolemesh plan --write`"
            )
        return self


class PlannedPoolSpec(Spec):
    """A pool as it was planned."""

    devices: _Name
    """Number and kind, e.g. 4 h100."""
    roles: dict[_Name, _Name] = Field(min_length=1, max_length=MAX_POOLS)
    """Layout p-t-d of each role: stages, slices, replicas."""


class PlanSpec(Spec):
    """A predicted step, and what its seconds stand on."""

    step_s: float = Field(gt=0, le=_MAX_S)
    """Seconds of a step."""
    tokens: float = Field(gt=0, le=1e15)
    """Tokens of the step's rows, prompts included: of other lengths other seconds are right."""
    rows: _Text
    """Rows that it was made for, in words."""
    basis: _Text
    """What the seconds stand on: data sheets, or a calibration with its errors."""
    pools: dict[_Name, PlannedPoolSpec] = Field(min_length=1, max_length=MAX_POOLS)
    """Pools by name."""
    tasks: tuple[PlannedTaskSpec, ...] = Field(min_length=1, max_length=MAX_TASKS)
    """Calls of the step, in the order in which they are asked for."""

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        for task in self.tasks:
            if task.pool is not None and task.pool not in self.pools:
                raise ValueError(
                    f"the task {task.name} has the pool {task.pool!r}, but plan.pools has "
                    f"{', '.join(self.pools)}: write the plan anew with `rolemesh plan --write`"
                )
        return self

    @property
    def told(self) -> str:
        """The prediction in one line, for people."""
        return f"{self.step_s:.3g} s a step; {self.basis}"
