"""How long the first step will take, from those of its calls that have been made.

The products of scoring passes and updates follow from the models' sizes, so the seconds of those
that were made, or that are under way, tell those of the rest. Nothing is said where that would be a
guess: steps that overlap, calls that are shared or not known yet, a pool without such a pass, and a
call that is no product and has yet to come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.dataflow.loop.clock import unix_time
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.from_recipe import job_of
from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.operations import scoring_flops, update_flops
from rolemesh.coordinator.mapping.job.tasks import TaskKind, Timeline
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection, SampledSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.model_sizes import models_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec
from rolemesh.engine.specs.columns import PROXIMAL_LOGPROBS

_SOURCES = ("generate", "read")
"""Methods of the calls that make a step's rows."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """Operations of a call: of a forward pass that it makes first, and of the rest."""

    before: float
    main: float

    @property
    def all(self) -> float:
        return self.before + self.main


@dataclass(frozen=True, slots=True)
class _Done:
    """How far a call was, and when."""

    stage: str
    part: float
    at: float


class FirstStep:
    """Watches the calls of a step. Owner: the coordinator's loop.

    Example: of 1 PFLOP in one pool, a reference pass of 0.1 took 6 s after 10 s of generation: the
    step will take 10 + 6 + 54 s.
    """

    def __init__(
        self,
        recipe: Recipe,
        nodes: Sequence[Node],
        tell: Callable[[float, float], None],
        clock: Callable[[], float] = unix_time,
    ) -> None:
        """Prepares; the step begins now.

        Args:
            recipe: Of the run.
            nodes: Calls of the step.
            tell: Told how many seconds the step will take, and how many of them are gone.
            clock: Unix time.
        """
        self._recipe = recipe
        self._nodes = nodes
        self._tell = tell
        self._clock = clock
        self._began_at = clock()
        self._done: dict[int, _Done] = {}
        """What calls under way have told last, by node."""
        self._sized: tuple[Job, Mapping[int, _Passes]] | None = None
        self._can_tell = self._is_plain()
        pools = list(recipe.pools)
        self._pools = {
            role: pools.index(name) for name, pool in recipe.pools.items() for role in pool.roles
        }

    def _is_plain(self) -> bool:
        """Whether the step is made for itself, by calls that are all known and whole."""
        sampler = self._recipe.schedule.sampler
        if not isinstance(sampler, SyncSamplerSpec) or sampler.block_rows or sampler.batch_size:
            return False
        if any(len(self._recipe.services_of(node.role)) > 1 for node in self._nodes):
            return False
        # Else it samples until it has enough.
        return any(node.method in _SOURCES for node in self._nodes)

    def on_phase(self, service: str, stage: str, done: int, total: int) -> None:
        """Told of what a service does, as an observer is; tells what is known from it."""
        if not self._can_tell:
            return
        now = self._clock()
        method, _, inner = stage.partition(": ")
        for node in self._nodes:
            if (node.service, node.method) != (service, method) or not total:
                continue
            before = self._done.get(node.node_id)
            # The same may be told again.
            if before is None or (before.stage, before.part) != (inner, done / total):
                self._done[node.node_id] = _Done(inner, done / total, now)
        seconds = self.seconds(now)
        if seconds is not None:
            self._tell(seconds, now - self._began_at)

    def seconds(self, now: float) -> float | None:
        """How long the step will have taken, as far as is known now; None: it is not."""
        if self._sized is None:
            self._sized = self._sizes()
        if self._sized is None:
            return None
        job, passes = self._sized
        tasks = job.step.tasks
        if len(tasks) != len(self._nodes):
            # What came out has decided on further calls.
            return None
        known: dict[int, float] = {}
        flops: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for index, node in enumerate(self._nodes):
            if node.started_at is None:
                continue
            part, until = 1.0, node.ended_at
            if node.state is NodeState.RUNNING:
                part, until = self._reached(node, passes.get(index))
            if until is None:
                continue
            took = until - node.started_at
            if index in passes:
                flops[node.pool] += part * passes[index].all
                spent[node.pool] += took
            known[index] = node.started_at + took / part
            if node.state is NodeState.RUNNING:
                known[index] = max(now, known[index])
        seconds = [0.0] * len(tasks)
        for index, node in enumerate(self._nodes):
            if index in known or tasks[index].kind is TaskKind.SMALL:
                continue
            if index not in passes or not flops[node.pool]:
                return None
            seconds[index] = passes[index].all * spent[node.pool] / flops[node.pool]
            if node.started_at is not None:
                known[index] = max(now, node.started_at + seconds[index])
        ends_at = Timeline(job.step, self._pools).ends_from(now, known, seconds)
        return max(now, *ends_at) - self._began_at

    def _reached(self, node: Node, passes: _Passes | None) -> tuple[float, float | None]:
        """The part of a call's operations that it has told of, and when; None: it has not."""
        done = self._done.get(node.node_id)
        assert node.started_at is not None  # it runs
        # A call that is made again, of a service that was lost, begins anew.
        if done is None or passes is None or done.at < node.started_at:
            return 0.0, None
        if node.method == "update" and done.stage != "update":
            part = done.part * passes.before / passes.all
        else:
            part = (passes.before + done.part * passes.main) / passes.all
        return part, done.at if part else None

    def _sizes(self) -> tuple[Job, Mapping[int, _Passes]] | None:
        """Tasks and operations of the calls, once the rows are there whose lengths they have."""
        work = self._work()
        if work is None:
            return None
        try:
            job = job_of(self._recipe, self._nodes, work)
        except (RecipeError, PlanError):
            # A model of a family whose sizes are not known, or on another host.
            return None
        models = {role.name: role.model for role in job.roles}
        specs = models_of(self._recipe)
        passes: dict[int, _Passes] = {}
        for task in job.step.tasks:
            model = models.get(task.role)
            if model is None or not specs[task.role]:
                continue
            ranks = self._recipe.layout(task.role).world_size
            scored = task.share * scoring_flops(model, work) / ranks
            if task.kind is TaskKind.SCORE:
                passes[task.index] = _Passes(0.0, scored)
            elif task.kind is TaskKind.UPDATE:
                recomputes = specs[task.role][0].recompute == "full"
                main = update_flops(model, work, recomputes=recomputes) / ranks
                before = scored if task.role == "actor" and self._scores_first() else 0.0
                passes[task.index] = _Passes(before, main)
        return job, passes

    def _scores_first(self) -> bool:
        """Whether the actor's update computes log-probs before it moves the weights."""
        loss = getattr(self._recipe.algorithm, "policy_loss", None)
        return loss is not None and PROXIMAL_LOGPROBS in loss.columns()

    def _work(self) -> Work | None:
        """The rows of the step, as long as they are; None: there are none yet."""
        source = next(node for node in self._nodes if node.method in _SOURCES)
        section, num_rows = self._recipe.algorithm, source.num_rows
        if source.state is not NodeState.DONE or not num_rows or not source.num_tokens:
            return None
        assert isinstance(section, AlgorithmSection)  # a client's run has no such loop
        row_tokens = source.num_tokens / num_rows
        # Where a given answer begins is not told. The head is the smaller part of most models.
        completion = source.metrics.get("completion_length/mean", row_tokens / 2)
        prompts = self._recipe.run.prompts_per_step
        return Work(
            prompts=prompts,
            samples=max(1, num_rows // prompts),
            prompt_tokens=max(0.0, row_tokens - completion),
            completions=Lengths.fixed(max(1.0, completion)),
            mini_batch_rows=section.mini_batch_rows,
            epochs=section.epochs,
            shares_prompts=isinstance(section, SampledSpec),
        )
