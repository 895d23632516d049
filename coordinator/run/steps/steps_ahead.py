"""Steps that are begun: their prompts, and what is sampled of them before they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rolemesh.coordinator.dataflow.calls.role_calls import (
    PromptBatch,
    PromptCursor,
    Sampler,
    StepContext,
)
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.sections.run_section import RunSpec
from rolemesh.coordinator.run.saving.cuts import Cuts
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.state.errors import StateStoreError


class StepsAhead:
    """Begins steps, each once and in order, and hands them out to be made.

    Invariant: prompts are taken from the data in the order of steps, whenever a step is begun.

    Owner: the coordinator's loop.
    """

    def __init__(
        self,
        spec: RunSpec,
        sampler: Sampler,
        progress: RunProgress,
        make_context: Callable[[int], StepContext],
    ) -> None:
        """Prepares; the first step to begin is the one after the progress.

        Args:
            spec: The run's section of the recipe.
            sampler: Who samples, and when.
            progress: What the run has reached.
            make_context: Makes the context of a step.
        """
        self._spec = spec
        self._sampler = sampler
        self._progress = progress
        self._make_context = make_context
        self._cursor = PromptCursor(progress.next_prompt)
        self._begun: dict[int, StepContext] = {}
        """Steps that are not handed out yet."""
        self._prompts: dict[int, PromptBatch] = {}

    def rewound(self) -> None:
        """Told that the progress went to another step, while none is begun."""
        self._cursor = PromptCursor(self._progress.next_prompt)

    def take(self, step: int) -> tuple[StepContext, PromptBatch]:
        """Hands a step out to be made, begun or not."""
        if self._sampler.steps_ahead:
            self._begin(range(step, step + self._sampler.steps_ahead + 1))
        context, prompts = self._context(step)
        del self._begun[step]
        return context, prompts

    def begin_while_training(self, step: int) -> None:
        """Begins steps after one whose nodes all exist, as the schedule says."""
        self._begin(range(step + 1, step + 1 + self._sampler.steps_ahead_while_training))

    def position(self, step: int) -> int:
        """Position in the data that the step after this one begins with."""
        # Prompts of steps that are only being sampled count as not used.
        following = self._prompts.get(step + 1)
        return self._cursor.position if following is None else following.start

    def made(self, step: int) -> None:
        """Told that a step counts."""
        del self._prompts[step]

    @property
    def begun(self) -> list[StepGraph]:
        """Graphs of the steps that are not handed out yet."""
        return [context.dataflow for context in self._begun.values()]

    async def drop(self) -> None:
        """Cancels the sampling of steps that will not be made."""
        contexts = list(self._begun.values())
        self._begun.clear()
        # Cancel all of them first: waiting for one of them may be interrupted.
        for context in contexts:
            context.dataflow.abort(RunError(f"step {context.step} is not made any more"))
        for context in contexts:
            # A failure in a step that will not be made is not the reason for the run's end.
            with contextlib.suppress(RunError, StateStoreError):
                await context.dataflow.finish()

    async def begin_again(self, cuts: Cuts, observer: RunObserver) -> None:
        """Has the next step sampled with the weights of the step before the newest one.

        So it is when that step is sampled while the newest one trains, and an attempt after a
        failure has to do it anew. Where only the newest weights are left, it takes those.

        Args:
            cuts: Where older weights are.
            observer: Is told when they are not.
        """
        newest = self._progress.step
        following, before = newest + 1, newest - 1
        if not self._sampler.steps_ahead_while_training or newest == 0:
            return
        if following > self._spec.steps or self._progress.skipped is not None:
            return
        if before not in await cuts.known():
            observer.on_event(
                f"step {following} is sampled with weights that are one step newer than the "
                f"schedule says: those of step {before} are not left"
            )
            return
        try:
            await cuts.restore(before, ("actor",), keeps_later=True)
            self._begin(range(following, following + 1))
            await self._sampler.weights_brought()
            await cuts.restore(newest, ("actor",))
            self._sampler.step_ends(self._begun[following])
            await self._sampler.weights_brought()
        except BaseException:
            await self.drop()
            raise

    def _begin(self, steps: range) -> None:
        """Begins to sample these steps, if the run has them and they are not begun yet."""
        for step in steps:
            if step <= self._spec.steps and step not in self._begun:
                self._sampler.begin(*self._context(step))

    def _context(self, step: int) -> tuple[StepContext, PromptBatch]:
        if step not in self._begun:
            prompts = self._cursor.take(self._spec.prompts_per_step)
            self._begun[step] = self._make_context(step)
            self._prompts[step] = prompts
        return self._begun[step], self._prompts[step]
