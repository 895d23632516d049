"""The loop of a run: held-out score, steps, checkpoints, held-out score, model folder."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.algorithms.registry import Algorithm, start_step
from rolemesh.coordinator.checkpoints import Checkpoints
from rolemesh.coordinator.dataflow import Dataflow, Node
from rolemesh.coordinator.errors import RunError
from rolemesh.coordinator.evaluation import Evaluation, evaluate
from rolemesh.coordinator.journal import Journal
from rolemesh.coordinator.mesh import Mesh
from rolemesh.coordinator.metrics import (
    MetricsWriter,
    dataflow_traffic,
    phase_seconds,
    step_record,
    traffic_since,
)
from rolemesh.coordinator.observer import RunObserver
from rolemesh.coordinator.pools import Pools
from rolemesh.coordinator.recipe import Recipe
from rolemesh.coordinator.roles import PromptBatch, StepContext
from rolemesh.coordinator.state.store import RunState, StateStore
from rolemesh.v1 import operation_pb2, weights_pb2

HELD_OUT_FACT = "data.held_out_prompts"
"""What the actor says of its data at Initialize: the number of held-out prompts."""


class TrainingLoop:
    """Makes the steps of one run over services that are ready.

    Invariant: `step` counts committed steps. A step is committed once all its nodes are done;
    its experience is released afterwards.

    Owner: one asyncio loop.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        mesh: Mesh,
        journal: Journal,
        store: StateStore,
        writer: MetricsWriter,
        observer: RunObserver,
        directory: Path,
    ) -> None:
        self.step = 0
        self.is_stop_requested = False
        self.activity = "initialize"
        """What the run does, for messages to people."""
        self.dataflow: Dataflow | None = None
        """Graph of the newest step or evaluation."""
        self.records: list[Mapping[str, float]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By phase, over the whole run."""
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.model_directory: Path | None = None
        self._recipe = recipe
        self._algorithm = algorithm
        self._mesh = mesh
        self._journal = journal
        self._store = store
        self._writer = writer
        self._observer = observer
        self._directory = directory
        self._pools = Pools(recipe.pools)
        self._checkpoints = Checkpoints(
            directory / "checkpoints",
            mesh.trained,
            journal,
            keep=recipe.run.checkpoint.keep,
            on_phase=observer.on_phase,
        )

    async def run(self) -> None:
        """Everything between initialised services and an exported model.

        A wish to stop ends it after the step in progress: saved and exported, not evaluated.
        """
        spec = self._recipe.run
        self._check_held_out()
        await self._update_record(state=RunState.RUNNING)
        if not self.is_stop_requested:
            self.before = await self._evaluate()
        while self.step < spec.steps and not self.is_stop_requested:
            await self._make_step(self.step + 1)
            every = spec.checkpoint.every_steps
            if every and self.step % every == 0:
                await self._save_checkpoint()
        if self.step:
            await self._save_checkpoint()
        await self._export()

    def _check_held_out(self) -> None:
        wanted = self._recipe.run.evaluation.num_prompts
        have = self._mesh.facts.get("actor", {}).get(HELD_OUT_FACT)
        if have is not None and wanted > int(have):
            raise RunError(
                f"run.evaluation.num_prompts is {wanted}, but the data has {have} held-out "
                "prompts: lower it (0 switches evaluation off), or make more held-out prompts"
            )

    @contextlib.contextmanager
    def _phase(self, name: str, activity: str) -> Iterator[None]:
        started, self.activity = time.monotonic(), activity
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started

    def _context(self, step: int, *, is_evaluation: bool = False) -> StepContext:
        self.dataflow = Dataflow(step, self._pools)
        return StepContext(
            step=step,
            algorithm=self._recipe.algorithm,
            dataflow=self.dataflow,
            journal=self._journal,
            connections=self._mesh.connections,
            on_phase=self._observer.on_phase,
            is_evaluation=is_evaluation,
        )

    async def _evaluate(self) -> Evaluation | None:
        """The held-out score of the policy as it is; None when evaluation is switched off."""
        num_prompts = self._recipe.run.evaluation.num_prompts
        if num_prompts == 0:
            return None
        with self._phase("evaluate", f"evaluation after step {self.step}"):
            found = await evaluate(self._context(self.step, is_evaluation=True), num_prompts)
            await self._mesh.release(self._journal, self.step)
        self._writer.write_scalars(self.step, found.scalars())
        self._observer.on_event(
            f"held-out score after {self.step} steps: {found.score:.3f} "
            f"(standard error {found.standard_error:.3f}, {num_prompts} prompts)"
        )
        return found

    async def _make_step(self, step: int) -> None:
        before = dataflow_traffic(self._mesh.traffic)
        nodes, seconds = await self._train(step)
        evaluation = self._recipe.run.evaluation
        is_due = step == self._recipe.run.steps or (
            evaluation.every_steps > 0 and step % evaluation.every_steps == 0
        )
        record: dict[str, float] = {}
        try:
            try:
                await self._mesh.release(self._journal, step)
            finally:
                # Releasing is traffic of the step, but none of its time.
                traffic = traffic_since(before, dataflow_traffic(self._mesh.traffic))
                record |= step_record(step, nodes, seconds, traffic)
            if is_due and not self.is_stop_requested:
                self.after = await self._evaluate()
                if self.after is not None:
                    record |= self.after.scalars()
        finally:
            # The step is made, whatever became of its release and its evaluation.
            self.records.append(record)
            await self._writer.write_step(record)
            await self._update_record(step=step, metrics=record)
            self._observer.on_step(record)

    async def _train(self, step: int) -> tuple[Sequence[Node], float]:
        """Makes and commits a step; returns its nodes and its seconds."""
        count = self._recipe.run.prompts_per_step
        self.activity = f"step {step}"
        started = time.monotonic()
        context = self._context(step)
        async with context.dataflow:
            start_step(self._algorithm, PromptBatch(start=(step - 1) * count, count=count), context)
        versions = {role: known.policy_version for role, known in self._mesh.connections.items()}
        await self._journal.commit(step, {"policy_versions": versions})
        # From here on the step counts, whatever goes wrong after.
        self.step = step
        seconds, nodes = time.monotonic() - started, context.dataflow.nodes
        for phase, spent in phase_seconds(nodes).items():
            self.seconds[phase] += spent
        self._writer.write_graph(step, nodes)
        return nodes, seconds

    async def _save_checkpoint(self) -> None:
        with self._phase("checkpoint", f"checkpoint of step {self.step}"):
            state = {"next_prompt": self.step * self._recipe.run.prompts_per_step}
            await self._checkpoints.save(self.step, state)

    async def _export(self) -> None:
        actor, target = self._mesh.connections["actor"], self._directory / "model"
        key = self._journal.next_key(self.step, "actor.export")
        request = weights_pb2.ExportRequest(key=key, directory=str(target))

        def on_progress(progress: operation_pb2.Progress) -> None:
            stage = f"export: {progress.stage}"
            self._observer.on_phase("actor", stage, progress.done, progress.total)

        with self._phase("export", "export"):
            self._observer.on_phase("actor", "export", 0, 0)
            await actor.finish(actor.weights.Export(request), on_progress)
            await self._journal.acknowledge(key, {"directory": str(target)})
            self._observer.on_phase("actor", "", 0, 0)
        self.model_directory = target

    async def _update_record(self, **changes: Any) -> None:
        await self._store.update_run(self._journal.run_id, epoch=self._journal.epoch, **changes)
