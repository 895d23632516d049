"""Checkpoints of a run: when one is written, which stay, and when no better one is waited for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rolemesh.engine.specs import Spec

Mode = Literal["max", "min"]
"""Whether the greatest or the smallest value of a metric is the best."""


class BestSpec(Spec):
    """Which of the evaluated states of a run is the best one."""

    metric: str = Field(default="held_out/score", pattern=r"^held_out/.+$")
    """Metric of the evaluations that says how good a state is, e.g. held_out/pass@4."""
    mode: Mode = "max"
    """Whether the greatest or the smallest value is the best; of equal ones the first is."""


class CheckpointSpec(Spec):
    """When checkpoints are written."""

    every_steps: int = Field(default=20, ge=0)
    """Write one after every so many steps; 0 writes only the last one."""
    keep: int = Field(default=2, ge=2)
    """Newest checkpoints kept: two at least, so that one is left if the other is damaged."""
    keep_best: BestSpec | None = None
    """Write one after each evaluation that is better than all before it, and keep it beside the
    newest ones until a better one is there. None: only the newest are kept."""


class EarlyStoppingSpec(Spec):
    """When a run ends before its last step, since it does not get better."""

    patience: int = Field(ge=1)
    """Evaluations in a row without a better value of checkpoint.keep_best.metric, after which the
    run ends. The evaluation before the first step is the first value."""
    min_delta: float = Field(default=0.0, ge=0)
    """What a value has to be better by, to count as better, in units of the metric."""
