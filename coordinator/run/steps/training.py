"""Loop of a run: evaluation, steps, cuts, checkpoints, evaluation, model folder."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from rolemesh.coordinator.algorithms.registry import start_step
from rolemesh.coordinator.api.messages import to_state
from rolemesh.coordinator.dataflow.calls.connection import OnPhase, RoleConnection
from rolemesh.coordinator.dataflow.calls.role_calls import StepContext
from rolemesh.coordinator.dataflow.errors import NodeFailedError
from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.dataflow.samplers import make_sampler
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection
from rolemesh.coordinator.run.checks.cautions import cautions
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.results.metrics import phase_seconds
from rolemesh.coordinator.run.results.samples import SampleTaker
from rolemesh.coordinator.run.saving.best import BestOfRun
from rolemesh.coordinator.run.saving.checkpoints import Checkpoints
from rolemesh.coordinator.run.saving.cut_pace import CutPace
from rolemesh.coordinator.run.saving.cuts import Cuts
from rolemesh.coordinator.run.saving.durable import DurableCheckpoints
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER
from rolemesh.coordinator.run.steps.first_step import FirstStep
from rolemesh.coordinator.run.steps.health import Health, is_refusal
from rolemesh.coordinator.run.steps.held_out_rows import HeldOutRows
from rolemesh.coordinator.run.steps.run_loop import RunLoop
from rolemesh.coordinator.run.steps.steps_ahead import StepsAhead
from rolemesh.coordinator.run.steps.told_steps import ToldSteps
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.together import together
from rolemesh.v1 import weights_pb2

TRAIN_FACT = "data.train_prompts"
"""Name of a fact in the answer to Initialize of the role that reads the data."""

HELD_OUT_FACT = "data.held_out_prompts"
"""The same of the number of held-out prompts."""


class TrainingLoop(RunLoop):
    """Makes the steps of one run over services that are ready.

    Invariant: `step` counts committed steps. A step is committed once all its nodes are done and
    every trained role has a cut of it; its experience is released afterwards. The loop goes on from
    whatever its progress says, which is how an attempt after a failure begins.

    Owner: one asyncio loop.
    """

    def __init__(
        self, parts: RunParts, mesh: RunMesh, journal: Journal, samples: SampleTaker
    ) -> None:
        """Prepares; nothing is sent yet.

        Args:
            parts: Of the run, with an algorithm.
            mesh: Its services, as the attempt meets them.
            journal: Names what is asked of them, and keeps what came of it.
            samples: Keeps some of the completions.
        """
        super().__init__(parts)
        recipe, observer = parts.recipe, parts.observer
        # A client makes the steps of the one other kind of section.
        assert isinstance(recipe.algorithm, AlgorithmSection)
        assert parts.algorithm is not None
        self._section = recipe.algorithm
        self._algorithm = parts.algorithm
        self._recipe = recipe
        self._mesh = mesh
        self._journal = journal
        self._samples = samples
        changing = [role for role in recipe.roles if recipe.changes(role)]
        replicas: dict[str, Sequence[str]] = {
            role: recipe.services_of(role) for role in recipe.roles
        }
        for role in changing:
            replicas[role] = [name for name in replicas[role] if name in mesh.connections]
        self._pools = Pools(recipe.pools, mesh, replicas, changing)
        self._sampler = make_sampler(recipe, observer.on_event, replicas.get("rollout"))
        self.turn: Callable[[int], Awaitable[None]] | None = None
        """Called before each step with its number: services may join and leave in it."""
        self._ahead = StepsAhead(recipe.run, self._sampler, self.progress, self._context)
        self.cuts = Cuts(mesh, journal, self._pools, observer, is_wanted=recipe.run.recovery.cuts)
        self._pace = CutPace.of(recipe, observer.on_event)
        self._best = BestOfRun(recipe.run, self.progress)
        self._held_out = HeldOutRows(parts, mesh, journal, samples, self._best)
        self.told = ToldSteps(parts, journal)
        self.checkpoints = Checkpoints(
            parts.directory / CHECKPOINTS_FOLDER,
            lambda: mesh.trained,
            journal,
            self._pools,
            keep=recipe.run.checkpoint.keep,
            best=self._best.step,
            on_phase=observer.on_phase,
        )
        self.durable = DurableCheckpoints(
            self.checkpoints,
            self.cuts,
            self._pace,
            self.progress,
            observer,
            parts.events,
            every=recipe.run.checkpoint.every_steps,
            best=self._best.step,
            phase=self._phase,
        )
        self.is_exporting = False
        """Whether all steps are made, so that only the trained roles are read from here on."""
        self._first: FirstStep | None = None
        """Watches the calls of the first step that this attempt makes."""
        self._is_first = True
        self._health = Health(parts, journal, self.cuts, self.durable)

    async def run(self) -> None:
        """Everything between initialised services and an exported model.

        After a wish to stop, the step in progress is the last one. The run is then saved and
        exported, but not evaluated.
        """
        self._held_out.check(self._number_of(HELD_OUT_FACT))
        await self._enter(RunState.RUNNING)
        if self.step == 0:
            self._caution()
            await self._begin_run()
        try:
            await self._make_steps()
            if self.step:
                await self.durable.save_now()
        finally:
            await self.durable.give_up()
        reason = self._best.early_stop()
        if reason and self.step < self._recipe.run.steps:
            self.parts.observer.on_event(reason)
        await self._export()
        await self.cuts.drop_all()

    async def _make_steps(self) -> None:
        try:
            if self.progress.unrecorded is not None:
                # The attempt before has made the step, but has not told of it.
                await self._tell_step()
            # It may have ended between a step and its checkpoint, too.
            await self.durable.save_owed()
            await self._heed_wishes()
            if self.parts.tuning is not None:
                await self.parts.tuning.begin(self._journal)
            while not (self._is_made or self.wishes.is_stop_wanted):
                if self.turn is not None:
                    await self.turn(self.step + 1)
                await self._make_step(self.step + 1)
                await self.durable.save_due()
                await self._heed_wishes()
                await self._tune()
        finally:
            await self._ahead.drop()

    async def _tune(self) -> None:
        """Ends the attempt where the run goes on with other settings.

        The next attempt begins with the cut of the newest step. A checkpoint that is being written
        would have to be begun again: the run turns after a step without one.
        """
        if self.parts.tuning is None or self._is_made or self.wishes.is_stop_wanted:
            return
        if self.cuts.is_on and not self.durable.is_writing:
            await self.parts.tuning.after_step(self._journal)

    def rewound(self) -> None:
        """Told that the progress went back to an earlier step, before `run`."""
        self._ahead.rewound()

    async def begin_ahead(self) -> None:
        """Begins what an attempt before would have begun by now."""
        await self._ahead.begin_again(self.cuts, self.parts.observer)

    async def _begin_run(self) -> None:
        """Makes the state before the first step one that the run can go back to."""
        progress, actor = self.progress, self._mesh.connections.get("actor")
        version = 0 if actor is None else actor.policy_version
        progress.actor_versions = [version]
        if not progress.has_begun:
            # What an earlier run of this name may have left. Later attempts need what this one has
            # kept: what judges answer in the first step is not asked again.
            await self.cuts.drop_all()
        await self.cuts.save(0)
        await self._journal.commit(0, {"actor_version": version})
        progress.has_begun = True
        if progress.before is None and not self.wishes.is_stop_wanted:
            progress.before = await self._evaluate()
            if progress.before is not None:
                # Later ones come with the record of their step.
                await self.parts.writer.write_before(progress.before.scalars())

    async def _enter(self, state: RunState) -> None:
        journal = self._journal
        await self.parts.store.update_run(journal.run_id, epoch=journal.epoch, state=state)
        self.parts.events.state(to_state(state))
        await self.parts.events.flush()

    async def _heed_wishes(self) -> None:
        """Serves wishes between two steps: saves requested checkpoints, waits during a pause."""
        await self.wishes.read()
        if self.wishes.take_checkpoint():
            await self.durable.save_now(is_wished=True)
        if self._is_made or not self.wishes.is_pause_wanted or self.wishes.is_stop_wanted:
            return
        paused = f"paused after step {self.step}"
        with self._phase("paused", paused):
            self.wishes.is_paused = True
            await self._enter(RunState.PAUSED)
            while self.wishes.is_pause_wanted and not self.wishes.is_stop_wanted:
                await self.wishes.change()
                if self.wishes.take_checkpoint():
                    await self.durable.save_now(is_wished=True)
            self.wishes.is_paused = False
        if not self.wishes.is_stop_wanted:
            await self._enter(RunState.RUNNING)

    @property
    def _dataflows(self) -> list[StepGraph]:
        """Of the newest step, then of those that are begun ahead of it."""
        newest = [] if self.dataflow is None else [self.dataflow]
        return [*newest, *self._ahead.begun]

    def running(self, service: str) -> list[Node]:
        """Calls of a service that are in flight: of the newest step, then of those ahead of it."""
        return [node for dataflow in self._dataflows for node in dataflow.running(service)]

    def lost(self, service: str) -> None:
        """Told that a service is replaced: what it has answered has to be asked for again."""
        if self.parts.tuning is not None:
            self.parts.tuning.disturbed(self.step + 1)
        for dataflow in self._dataflows:
            dataflow.lost(service)

    def left(self, service: str) -> None:
        """Told that a service has left: others make its calls, and answer again what they read."""
        self._pools.leave(service)
        self.lost(service)

    def joined(self, service: str) -> None:
        """Told, between two steps, that a service has joined."""
        self._pools.join(service)

    def use(self, services: Sequence[str]) -> None:
        """Told, between two steps, which services sample from here on."""
        self._sampler.use(services)

    def room(self, service: str) -> AbstractAsyncContextManager[None]:
        """Holds a service's devices for its new process."""
        return self._pools.of(service).loading(service, self.step + 1)

    async def prepare(self, new: RoleConnection, on_phase: OnPhase) -> None:
        """Gives the new process of a lost service what the lost one had beside its models."""
        await self._sampler.bring_again(new, on_phase)

    def _number_of(self, fact: str) -> int | None:
        """A number that the role which reads the data has told; None where it has not."""
        role = "actor" if "actor" in self._mesh.connections else "reward"
        told = self._mesh.facts.get(role, {}).get(fact)
        return None if told is None else int(told)

    @property
    def _is_made(self) -> bool:
        """Whether no step is left to make."""
        return self.step == self._recipe.run.steps or bool(self._best.early_stop())

    def _caution(self) -> None:
        """Tells of settings that seldom mean what they do."""
        train, held_out = self._number_of(TRAIN_FACT), self._number_of(HELD_OUT_FACT)
        for caution in cautions(self._recipe, train, held_out):
            self.parts.observer.on_event(f"caution: {caution.text}; {caution.remedy}")

    @contextlib.contextmanager
    def _phase(self, name: str, activity: str) -> Iterator[None]:
        started, before, self.activity = now(), self.activity, activity
        try:
            yield
            self.activity = before
        finally:
            self.progress.seconds[name] += now() - started

    def _context(self, step: int, *, is_evaluation: bool = False) -> StepContext:
        return StepContext(
            step=step,
            algorithm=self._section,
            dataflow=StepGraph(step, self._pools, self._mesh.replaceable),
            sampler=self._sampler,
            journal=self._journal,
            connections=self._mesh.connections,
            on_phase=self._on_phase,
            is_evaluation=is_evaluation,
            may_drop=self._recipe.may_drop,
            reward_columns=self._recipe.reward_columns,
            served_by_actor=self._recipe.served_by_actor,
            teacher=self._recipe.teacher,
        )

    def _on_phase(self, service: str, stage: str, done: int, total: int) -> None:
        """Tells what a call of a step does."""
        self.parts.observer.on_phase(service, stage, done, total)
        if self._first is not None:
            self._first.on_phase(service, stage, done, total)

    def _watch_first(self, step: int, nodes: Sequence[Node]) -> None:
        """Tells, from here on, how long the first step will take."""
        if self._is_first:
            tell = partial(self.parts.observer.on_estimate, step)
            self._first, self._is_first = FirstStep(self._recipe, nodes, tell), False

    async def _evaluate(self) -> Evaluation | None:
        """What held-out rows say of the current weights; None when evaluation is switched off."""
        if not self._held_out.are_wanted:
            return None
        with self._phase("evaluate", f"evaluation after step {self.step}"):
            context = self._context(self.step, is_evaluation=True)
            self.dataflow = context.dataflow
            return await self._held_out.evaluate(context)

    async def _make_step(self, step: int) -> None:
        self.told.step_begins()
        skipped = self.progress.take_skipped(step)
        if skipped is not None:
            await self.durable.save_cut(step)
            await self._commit(step, skipped.next_prompt, skipped.record)
            self.rewound()
            await self._tell_step()
        else:
            await self._tell_step(await self._train(step))

    async def _tell_step(self, context: StepContext | None = None) -> None:
        """Releases what the newest step has left behind, evaluates where it is due, and tells.

        Args:
            context: Of the step; None where an attempt that has ended made it.
        """
        record = self.progress.unrecorded
        assert record is not None, "a step that was told of is not told again"
        try:
            if context is not None:
                left = [self.parts.writer.write_graph(self.step, context.dataflow.nodes)]
                if context.trained_on:
                    left.append(self._samples.take(self.step, context.trained_on[-1]))
                await together(left)
            await self._mesh.release(self.step)
        finally:
            if context is not None:
                # The release counts as traffic of the step, but not as its time.
                record |= self.told.traffic()
        if self._held_out.is_due(self.step) and not self.wishes.is_stop_wanted:
            self.progress.after = await self._evaluate()
            if self.progress.after is not None:
                record |= self.progress.after.scalars()
        await self.told.tell()

    async def _train(self, step: int) -> StepContext:
        """Makes and commits a step."""
        self.activity = f"step {step}"
        started = now()
        roles = [one.role for one in self._mesh.connections.values()]
        num_services = {
            f"services/{role}": float(roles.count(role))
            for role in set(roles)
            if self._recipe.changes(role)
        }
        context, prompts = self._ahead.take(step)
        self.dataflow = self.step_in_progress = context.dataflow
        refusal: NodeFailedError | None = None
        try:
            async with context.dataflow:
                start_step(self._algorithm, prompts, context)
                if context.trained_on:
                    self._samples.begin(step, context.trained_on[-1])
                self._ahead.begin_while_training(step)
                self._sampler.step_ends(context)
                self._watch_first(step, context.dataflow.nodes)
        except NodeFailedError as error:
            if not is_refusal(error):
                raise
            refusal = error
        finally:
            self._first = None
            # Also of a step that has failed: they may be the reason.
            for node in context.dataflow.nodes:
                for note in node.notes:
                    self.parts.observer.on_event(f"step {step}: {note}")
        nodes = [node for node in context.dataflow.nodes if node.state is NodeState.DONE]
        await self._health.check(
            nodes, self.told.record(step, nodes, started), self._ahead.position(step), refusal
        )
        step_seconds = now() - started
        cut_seconds = await self.durable.save_cut(step)
        self._pace.made(step_seconds, cut_seconds)
        record = self.told.record(step, nodes, started) | self._health.marks()
        if cut_seconds is not None:
            record["time/cut"] = cut_seconds
        self.parts.writer.write_loads(step, nodes)
        await self._commit(step, self._ahead.position(step), record | num_services)
        self._ahead.made(step)
        if self.parts.tuning is not None:
            self.parts.tuning.made(step, nodes)
        for phase, spent in phase_seconds(nodes).items():
            self.progress.seconds[phase] += spent
        return context

    async def _commit(self, step: int, position: int, record: Mapping[str, float]) -> None:
        """From here on the step counts, even if something fails later.

        Args:
            step: Of which every trained role has a cut, if the step is to have one.
            position: In the data, that the step after it begins with.
            record: Of the step.
        """
        versions = {role: known.policy_version for role, known in self._mesh.connections.items()}
        actor_version = versions.get("actor", 0)
        await self._journal.commit(
            step,
            {
                "policy_versions": versions,
                "actor_version": actor_version,
                "next_prompt": position,
                "record": record,
            },
        )
        self.progress.commit(step, position, actor_version, record)
        self.parts.events.step = step
        self.step_in_progress = None

    async def _export(self) -> None:
        self.is_exporting = True
        role = "actor" if "actor" in self._mesh.connections else "reward"
        trained, target = self._mesh.connections[role], self.parts.directory / "model"
        key = self._journal.next_key(self.step, f"{role}.export")

        async def call(on_progress: ProgressCallback) -> weights_pb2.CheckpointResult:
            async with self._pools.awake(role, self.step):
                return await trained.client.export(key, str(target)).result(on_progress)

        with self._phase("export", "export"):
            await trained.make(
                key,
                "export",
                call,
                lambda _: {"directory": str(target)},
                journal=self._journal,
                on_phase=self.parts.observer.on_phase,
            )
        self.model_directory = target
