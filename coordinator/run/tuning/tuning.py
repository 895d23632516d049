"""Self-tuning of a run: asks the tuner between steps, tells and keeps what it decides."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.mapping.calibration.calibration import CalibrationError
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.search.rearranged import RecordedStep, same_size
from rolemesh.coordinator.mapping.search.resized import Resized
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.tuning import (
    SIZES,
    Settings,
    key_of,
    space_of,
    with_settings,
)
from rolemesh.coordinator.run.results.metrics import GRAPHS_FILE
from rolemesh.coordinator.run.saving.progress import TURN_OPERATION, RunProgress
from rolemesh.coordinator.run.saving.turns import TURNS_FILE, Turn
from rolemesh.coordinator.run.tuning.calibrations import calibrations_for
from rolemesh.coordinator.run.tuning.tuner import Expect, Tuner
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.trackers.files import whole_lines


class RetunedError(RunError):
    """The run goes on with other settings, in another attempt."""


class RunTuning:
    """Tunes one run. Owner: the coordinator's loop.

    Settings change between two attempts: the next one attaches the services whose section stays,
    initialises the others, and brings the trained roles back to the cut of the newest step. So
    whatever changes, the run goes on as after a failure, with the same bits.
    """

    def __init__(
        self, recipe: Recipe, progress: RunProgress, directory: Path, observer: RunObserver
    ) -> None:
        """Prepares.

        Args:
            recipe: That the run began with, with a section `run.tuning`.
            progress: What the run has reached.
            directory: Folder of the run's files.
            observer: Is told of each decision.
        """
        assert recipe.run.tuning is not None
        self._own = recipe
        self._progress = progress
        self._directory = directory
        self._observer = observer
        self._tuner = Tuner(recipe.run.tuning, space_of(recipe))
        self._has_sizes = any(name.endswith(SIZES) for name in recipe.run.tuning.space)
        self._graphs: dict[int, Sequence[Node]] = {}
        self._uncounted: set[int] = set()
        self._recipes: dict[str, Recipe | None] = {}
        self._cpu, self._coefficients = device_of("cpu"), Coefficients()
        try:
            for measured in calibrations_for(["cpu"], ()).values():
                self._cpu = measured.described_device
                self._coefficients = measured.coefficients
        except CalibrationError as error:
            observer.on_event(f"tuning expects by data sheets: {error}")

    @property
    def recipe(self) -> Recipe:
        """With the settings that the next step is made by."""
        turns = self._progress.turns
        if not turns or not self._knows(turns[-1]):
            return self._own
        recipe = self._with(turns[-1].settings)
        assert recipe is not None, "settings that the recipe refuses are not tried"
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """What the run's summary says of it."""
        turns = self._progress.turns
        return {
            "settings": dict(turns[-1].best if turns else self._tuner.own),
            "is_over": bool(turns) and turns[-1].is_last,
            "turns": [turn.to_dict() for turn in turns],
        }

    async def begin(self, journal: Journal) -> None:
        """Told that an attempt makes its first step next, which does not count."""
        turns, step = self._progress.turns, self._progress.step
        self._uncounted.add(step + 1)
        if turns and not self._knows(turns[-1]):
            self._observer.on_event("tuning begins anew: run.tuning.space is another one")
            own = self._tuner.own
            await self._take(Turn(step=step, settings=own, best=own), journal)

    def made(self, step: int, nodes: Sequence[Node]) -> None:
        """Told of the calls of a step that counts."""
        if not self._is_over:
            self._graphs[step] = nodes

    def disturbed(self, step: int) -> None:
        """Told that a step takes longer for another reason: it does not count."""
        self._uncounted.add(step)

    async def after_step(self, journal: Journal) -> None:
        """Decides how the run goes on after the newest step.

        Raises:
            RetunedError: With other settings.
        """
        progress, before = self._progress, self.recipe
        turn = self._tuner.next_turn(
            progress.step, progress.turns, self._seconds, self._expected, progress.failed_settings
        )
        if turn is None:
            return
        await self._take(turn, journal)
        if self.recipe != before:
            raise RetunedError(f"step {progress.step + 1} is made with other settings")

    async def gave_up(self, journal: Journal, cause: str) -> bool:
        """Goes back to the best settings after a failure; returns whether others were tried."""
        progress = self._progress
        turn = self._tuner.given_up(progress.step, progress.turns, self._seconds, cause)
        if turn is None:
            return False
        await self._take(turn, journal)
        return True

    @property
    def _is_over(self) -> bool:
        turns = self._progress.turns
        return bool(turns) and turns[-1].is_last

    @property
    def _seconds(self) -> dict[int, float]:
        """Of the steps that may count."""
        return {
            int(record["step"]): record["time/step"]
            for record in self._progress.records
            if int(record["step"]) not in self._uncounted
        }

    def _knows(self, turn: Turn) -> bool:
        return self._tuner.knows(turn.settings) and self._tuner.knows(turn.best)

    def _with(self, settings: Settings) -> Recipe | None:
        """The recipe with settings; None where it refuses them together."""
        key = key_of(settings)
        if key not in self._recipes:
            try:
                self._recipes[key] = with_settings(self._own, settings)
            except ValidationError:
                self._recipes[key] = None
        return self._recipes[key]

    def _expected(self, best: Settings) -> Expect:
        """Says what settings would take, by the graph of a step with the best ones."""
        base = self._with(best)
        assert base is not None, "settings that the recipe refuses are not tried"
        steps = self._tuner.counted(self._progress.turns, self._seconds)[key_of(best)]
        measured_s = statistics.median(steps.values())
        # The step that took the median, or about that.
        nearest = sorted(steps, key=lambda step: abs(steps[step] - measured_s))
        nodes = next((found for step in nearest if (found := self._nodes(step))), ())
        recorded = RecordedStep(base, nodes)
        beside_s = measured_s - recorded.seconds(base)
        once = [node for node in nodes if not node.block]
        resized = Resized(base, once, self._cpu, self._coefficients)

        def expect(settings: Settings) -> float | None:
            recipe = self._with(settings)
            if recipe is None:
                return None
            if not nodes:
                # Nothing is known of the step, so that all settings are expected to be as good.
                return measured_s
            factor = resized.factor(recipe) if self._has_sizes else same_size
            # A millisecond: however much waits beside the calls, a step takes some time.
            return max(1e-3, recorded.seconds(recipe, factor) + beside_s)

        return expect

    def _nodes(self, step: int) -> Sequence[Node]:
        """The calls of a step, also of one that another process has made; none if not known."""
        if step not in self._graphs:
            for _, line in whole_lines(self._directory / GRAPHS_FILE):
                graph = json.loads(line)
                known = [Node.from_dict(node) for node in graph["nodes"]]
                self._graphs.setdefault(graph["step"], known)
        nodes = self._graphs.get(step, ())
        return nodes if all(node.state is NodeState.DONE for node in nodes) else ()

    async def _take(self, turn: Turn, journal: Journal) -> None:
        """Keeps a decision, and tells of it."""
        for line in self._told(turn):
            self._observer.on_event(f"tuning after step {turn.step}: {line}")
        await journal.note(turn.step, TURN_OPERATION, turn.to_dict())
        self._progress.take_turn(turn)
        lines = [json.dumps(one.to_dict()) + "\n" for one in self._progress.turns]
        write_atomically(self._directory / TURNS_FILE, "".join(lines))

    def _told(self, turn: Turn) -> list[str]:
        """A decision in words."""
        told, verdict = [], turn.verdict
        if verdict is not None:
            measured = "nothing" if verdict.measured_s is None else f"{verdict.measured_s:.3g} s"
            told.append(
                f"{'keeps' if verdict.is_kept else 'does not keep'} "
                f"{self._differences(verdict.settings, self._tuner.own)}: {verdict.why}; measured "
                f"{measured} a step, expected {verdict.expected_s:.3g} s, before "
                f"{verdict.before_s:.3g} s"
            )
        if turn.is_trial and turn.expected_s is not None:
            told.append(
                f"tries {self._differences(turn.settings, turn.best)}: expects "
                f"{turn.expected_s:.3g} s a step"
            )
        if turn.is_last:
            told.append(f"goes on with {self._differences(turn.best, self._tuner.own)}")
        return told

    @staticmethod
    def _differences(settings: Settings, others: Settings) -> str:
        """What settings have other than others, e.g. "run.x 8 (was 0)"."""
        return (
            ", ".join(
                f"{name} {json.dumps(value)} (was {json.dumps(others[name])})"
                for name, value in settings.items()
                if value != others[name]
            )
            or "what the recipe says"
        )
