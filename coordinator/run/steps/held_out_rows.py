"""Evaluations of a run: whether and when held-out rows are asked, and who is told what they say."""

from __future__ import annotations

from rolemesh.coordinator.dataflow.calls.role_calls import StepContext
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.results.evaluation import (
    Evaluation,
    can_evaluate,
    evaluate,
    evaluate_loss,
)
from rolemesh.coordinator.run.results.samples import SampleTaker
from rolemesh.coordinator.run.saving.best import BestOfRun
from rolemesh.coordinator.run.saving.progress import EVALUATION_OPERATION


class HeldOutRows:
    """Held-out rows of one run, as `run.evaluation` wants them. Owner: the coordinator's loop."""

    def __init__(
        self,
        parts: RunParts,
        mesh: RunMesh,
        journal: Journal,
        samples: SampleTaker,
        best: BestOfRun,
    ) -> None:
        """Prepares; no row is read before `evaluate`.

        Args:
            parts: Of the run. Its recipe says how many rows, and after which steps.
            mesh: Services of the run, and what they said at their start.
            journal: Keeps each evaluation, so that it is not made twice.
            samples: Keeps some of the judged completions.
            best: Checks that the metric that it compares is among the values.
        """
        self._parts = parts
        self._recipe = parts.recipe
        self._spec = parts.recipe.run.evaluation
        self._mesh = mesh
        self._journal = journal
        self._samples = samples
        self._best = best

    @property
    def _say_something(self) -> bool:
        return can_evaluate(self._recipe, [one.role for one in self._mesh.connections.values()])

    @property
    def are_wanted(self) -> bool:
        """Whether the run evaluates at all."""
        return self._spec.num_prompts > 0 and self._say_something

    def is_due(self, step: int) -> bool:
        """Whether the recipe wants an evaluation after a step of its training."""
        every = self._spec.every_steps
        return step == self._recipe.run.steps or (every > 0 and step % every == 0)

    def check(self, num_rows: int | None) -> None:
        """Raises RunError where the recipe wants what held-out rows cannot say.

        Args:
            num_rows: Held-out rows of the data; None where its reader does not say.
        """
        if not self._say_something:
            best = self._recipe.run.checkpoint.keep_best
            if best is not None:
                raise RunError(
                    f"run.checkpoint.keep_best.metric is {best.metric!r}, but algorithm "
                    f"{self._recipe.algorithm.type!r} is not evaluated: leave "
                    "run.checkpoint.keep_best and run.early_stopping out"
                )
        elif num_rows is not None and self._spec.num_prompts > num_rows:
            raise RunError(
                f"run.evaluation.num_prompts is {self._spec.num_prompts}, but the data has "
                f"{num_rows} held-out prompts: lower it (0 switches evaluation off), or make more "
                "held-out prompts"
            )

    async def evaluate(self, context: StepContext) -> Evaluation:
        """Asks what the rows say of the weights after a step, and tells of it.

        Args:
            context: Of the step, with is_evaluation set.

        Raises:
            RunError: A call failed, or a metric that the recipe wants is not reported.
        """
        if self._recipe.sampling is None:
            assert self._parts.algorithm is not None
            found = await evaluate_loss(context, self._spec, self._parts.algorithm)
        else:
            found, judged = await evaluate(context, self._spec)
            await self._samples.take_held_out(context.step, judged)
        self._best.check(found)
        await self._mesh.release(context.step)
        await self._journal.note(context.step, EVALUATION_OPERATION, found.to_dict())
        self._parts.events.evaluated(found.scalars())
        self._parts.observer.on_event(found.told())
        return found
