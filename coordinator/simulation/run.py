"""One simulated run, and what it came to."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.algorithms.registry import roles_in
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.reporting.events import Recovered
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.simulation.kept import CallRecord
from rolemesh.coordinator.simulation.mesh import Loss, SimulatedMesh
from rolemesh.coordinator.simulation.timing import Settings
from rolemesh.coordinator.simulation.virtual_time import run_virtually
from rolemesh.coordinator.state.memory import MemoryStateStore

RUN_ID = "simulation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulated run came to. Seconds are virtual."""

    services: int
    commits: tuple[int, ...]
    """Steps in the journal, in the order of commits."""
    step_ends: tuple[float, ...]
    """When each step was told of as made, from the first one on."""
    tokens: float
    """Of prompts and completions that the steps trained on."""
    busy: Mapping[str, float]
    """Share of the time in which services of a role computed what counted, in the mean over them,
    by role."""
    lost_s: float
    """Seconds that services spent on calls that broke, or were made again."""
    losses: tuple[Loss, ...]
    recoveries: tuple[Recovered, ...]
    staleness: float
    """Most steps that weights which sampled were behind those that trained."""
    calls: int
    """Of services, without looks at how they are."""
    tuning: Mapping[str, Any] | None
    """What the summary says of it; None where the recipe asks for none."""

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step after the first one, which nothing is sampled ahead for."""
        return [b - a for a, b in zip(self.step_ends, self.step_ends[1:], strict=False)]

    @property
    def period(self) -> float:
        """Seconds of a step in the mean, without the first one where there are others."""
        return statistics.fmean(self.step_seconds or self.step_ends)


class _Watching(QuietObserver):
    """Notes when steps are made. Owner: one event loop."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.records: list[Mapping[str, float]] = []

    def on_step(self, record: Mapping[str, float]) -> None:
        self.ends.append(now())
        self.records.append(record)


def simulate(recipe: Recipe, settings: Settings) -> Outcome:
    """Makes a run of a recipe in virtual time. The same arguments give the same outcome.

    Args:
        recipe: As `planned.simulated_recipe` gives it.
        settings: What services do, and what goes wrong.

    Raises:
        RunError: The run could not go on, e.g. after too many losses within a step.
    """
    return run_virtually(_simulate(recipe, settings))


async def _simulate(recipe: Recipe, settings: Settings) -> Outcome:
    section = recipe.algorithm
    assert isinstance(section, AlgorithmSection)
    services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
    has_estimator = "advantages" in type(section).model_fields
    mesh = SimulatedMesh(
        services=services,
        settings=settings,
        estimator_columns=section.parts.advantages.makes() if has_estimator else (),
    )
    store, observer = MemoryStateStore(now), _Watching()
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(
            recipe,
            directory=Path(folder),
            addresses=mesh.addresses,
            store=store,
            observer=observer,
            run_id=RUN_ID,
            watch=WatchSettings(interval_s=settings.watch_s),
            restart=mesh.restart,
            open_channel=mesh.open_channel,
        )
        mesh.on_exit = run.service_lost
        losing = asyncio.create_task(mesh.lose_processes())
        try:
            summary = await run.execute()
        finally:
            losing.cancel()
    if losing.done() and not losing.cancelled() and losing.exception() is not None:
        raise RunError(f"losses could not be simulated: {losing.exception()}")
    entries = await store.read_journal(RUN_ID)
    counted, lost_s = _counted(mesh.calls)
    total = observer.ends[-1] if observer.ends else 0.0
    return Outcome(
        services=len(services),
        commits=tuple(e.step for e in entries if e.operation == COMMIT_OPERATION and e.step),
        step_ends=tuple(observer.ends),
        tokens=sum(record.get("tokens", 0.0) for record in observer.records),
        busy=_busy(counted, services, total),
        lost_s=lost_s,
        losses=tuple(mesh.losses),
        recoveries=summary.recoveries,
        staleness=max((r.get("staleness/max", 0.0) for r in observer.records), default=0.0),
        calls=len(mesh.calls),
        tuning=summary.tuning,
    )


def _counted(calls: Sequence[CallRecord]) -> tuple[list[CallRecord], float]:
    """Calls whose answer counts, and the seconds of all others."""
    newest: dict[tuple[int, str, int], CallRecord] = {}
    lost_s = 0.0
    for call in calls:
        _, step, operation, sequence = call.identity
        if not call.is_answered:
            lost_s += call.ended - call.started
            continue
        before = newest.get((step, operation, sequence))
        if before is not None:
            lost_s += before.ended - before.started
        newest[step, operation, sequence] = call
    return list(newest.values()), lost_s


def _busy(calls: Sequence[CallRecord], services: Sequence[str], total: float) -> dict[str, float]:
    seconds: dict[str, float] = {role_of(service): 0.0 for service in services}
    numbers = dict.fromkeys(seconds, 0)
    for service in services:
        numbers[role_of(service)] += 1
    for call in calls:
        if call.started < total:
            seconds[role_of(call.service)] += min(call.ended, total) - call.started
    return {
        role: spent / numbers[role] / total if total else 0.0 for role, spent in seconds.items()
    }
