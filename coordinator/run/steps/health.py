"""Health of learning: looks at each step before it is committed, and undoes one that went wrong.

A step that is skipped, or from which the run goes back, ends the attempt that made it. The next
one brings the trained roles back as after a crash, so nothing of the step is left: no weights, and
nothing that was sampled ahead with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.recipe.sections.health import Action
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.saving.cuts import Cuts
from rolemesh.coordinator.run.saving.durable import DurableCheckpoints
from rolemesh.coordinator.run.saving.progress import ROLL_BACK_OPERATION, SkippedStep
from rolemesh.coordinator.run.steps.health_rules import (
    SKIPPED,
    Record,
    Strike,
    strikes_of,
    unjudged,
)

ROLL_BACKS = "health/roll_backs"
"""Metric of every step after the run has gone back: how often it has."""

_REFUSALS = ("LOSS_NOT_FINITE", "METRIC_NOT_FINITE", "WEIGHTS_NOT_FINITE")
"""Reasons of a service that does not compute on with what is no number."""

_SEVERITY: Sequence[Action] = ("stop", "roll_back", "skip")
"""What comes first where several rules strike."""


class UnhealthyError(RunError):
    """A rule of `run.health` ends the run."""


class StepUndoneError(RunError):
    """A step does not count: the next attempt goes on from what the progress says."""


def is_refusal(error: BaseException) -> bool:
    """Whether a node failed since it would have had to compute with what is no number."""
    return isinstance(error, NodeFailedError) and error.reason in _REFUSALS


class Health:
    """Judges steps by the recipe's rules, and does what they say. Owner: the coordinator's loop.

    Invariant: what is decided about a step depends on its metrics and on the records before it
    alone, so a step that is made again after a crash is judged alike.
    """

    def __init__(
        self, parts: RunParts, journal: Journal, cuts: Cuts, checkpoints: DurableCheckpoints
    ) -> None:
        """Prepares.

        Args:
            parts: Of the run. Its store and files are to forget the steps that it took back.
            journal: Keeps that the run went back.
            cuts: What a skipped step goes back to.
            checkpoints: Those of steps that were taken back are removed.
        """
        self._parts = parts
        self._spec = parts.recipe.run.health
        self._progress = parts.progress
        self._journal = journal
        self._cuts = cuts
        self._checkpoints = checkpoints

    def marks(self) -> dict[str, float]:
        """What each record says of the run's health."""
        roll_backs = len(self._progress.roll_backs)
        return {ROLL_BACKS: float(roll_backs)} if roll_backs else {}

    async def check(
        self,
        nodes: Sequence[Node],
        record: Record,
        next_prompt: int,
        refusal: NodeFailedError | None = None,
    ) -> None:
        """Returns where the step may be committed.

        Args:
            nodes: Calls of the step that was made.
            record: Of the step.
            next_prompt: Position in the data that the step after it begins with.
            refusal: What ended the step's graph, where `is_refusal` says so.

        Raises:
            StepUndoneError: It is skipped, or the run goes back.
            UnhealthyError: The run ends.
            NodeFailedError: The same, with the refusal.
        """
        step = int(record["step"])
        if step == 1 and refusal is None:
            for text in unjudged(self._spec, record):
                self._parts.observer.on_event(text)
        strikes = self._strikes(nodes, record, refusal)
        if not strikes:
            return
        strike = min(strikes, key=lambda one: _SEVERITY.index(one.action))
        told = f"step {step}: run.health.{strike.rule} struck: {strike.text}"
        obstacle = self._obstacle(strike.action)
        if strike.action == "stop" or obstacle:
            self._end(told, strike, obstacle, refusal)
        if strike.action == "skip":
            self._skip(record, next_prompt, [one.rule for one in strikes])
            done = "its updates are undone, and the run goes on with the next prompts"
        else:
            target = max(0, step - strike.back)
            await self._roll_back(target, strike.rule)
            done = f"the run goes back to step {target}, and samples anew from there"
        self._parts.observer.on_event(f"{told}; {done}")
        raise StepUndoneError(f"{told}; {done}")

    def _strikes(
        self, nodes: Sequence[Node], record: Record, refusal: NodeFailedError | None
    ) -> list[Strike]:
        if refusal is not None:
            # Whatever the rules say of metrics, there is nothing that could be committed.
            rule = self._spec.not_finite
            return [Strike("not_finite", rule.do, rule.back, str(refusal))]
        found = ", ".join(_not_finite(nodes)) if self._spec.not_finite.enabled else ""
        updated = {node.role for node in nodes if node.method == "update"}
        return strikes_of(self._spec, [*self._progress.records, record], found, updated)

    def _obstacle(self, action: Action) -> str:
        """Why a step cannot be undone; "" where it can, or is not to be."""
        progress, spec = self._progress, self._spec
        if action == "roll_back" and len(progress.roll_backs) >= spec.most_roll_backs:
            return f"it has gone back {spec.most_roll_backs} times (run.health.most_roll_backs)"
        if action != "skip":
            return ""
        if not self._cuts.is_on:
            return "no cuts are kept in memory (run.recovery.cuts), which skipping takes"
        newest = progress.records[-spec.most_skips :]
        if len(newest) == spec.most_skips and all(SKIPPED in record for record in newest):
            return f"{spec.most_skips} steps in a row were skipped (run.health.most_skips)"
        return ""

    def _end(
        self, told: str, strike: Strike, obstacle: str, refusal: NodeFailedError | None
    ) -> None:
        """Raises what ends the run."""
        told += "; the run ends" + (f", since {obstacle}" if obstacle else "")
        self._parts.observer.on_event(told)
        if refusal is not None and not obstacle:
            # It says more than any rule could.
            raise refusal
        raise UnhealthyError(
            f"{told}: look at samples and rewards of the steps before, lower the learning rate or "
            f"change run.health.{strike.rule}, and go on with `rolemesh train --resume`"
        ) from refusal

    def _skip(self, record: Record, next_prompt: int, rules: Sequence[str]) -> None:
        """Leaves it to the next attempt to commit the step with the weights before it."""
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        marks = {SKIPPED: 1.0, **{f"health/{rule}": 1.0 for rule in rules}}
        step = int(record["step"])
        self._progress.skipped = SkippedStep(step, next_prompt, {**finite, **marks})

    async def _roll_back(self, target: int, rule: str) -> None:
        """Takes back what comes after a step; the next attempt goes on from there."""
        progress, journal = self._progress, self._journal
        # First: a resuming coordinator trusts a checkpoint that is newer than the journal.
        await self._checkpoints.remove_after(target)
        # From here on the run has gone back, even if something fails later.
        await journal.note(target, ROLL_BACK_OPERATION, {"from": progress.step, "rule": rule})
        progress.roll_back(target)
        await self._parts.store.rewind(journal.run_id, target, epoch=journal.epoch)
        self._parts.writer.rewind(target, progress.records)


def _not_finite(nodes: Sequence[Node]) -> Iterator[str]:
    """Metrics that are no numbers."""
    for node in nodes:
        for name, value in node.metrics.items():
            if not math.isfinite(value):
                yield f"{name} of {node.name} is {value}"
