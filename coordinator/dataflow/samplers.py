"""Samplers of a step's trajectories: the schedules behind `actor.generate`.

The actor samples by itself, or rollout services do. These take the weights that the actor
publishes. How far they may be ahead of training is the schedule's; which prompts belong to which
step never depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.calls.connection import OnPhase, RoleConnection
from rolemesh.coordinator.dataflow.calls.exchanges import OnEvent, Pairing, WeightExchanges
from rolemesh.coordinator.dataflow.calls.generation import Generation, GenerationCalls
from rolemesh.coordinator.dataflow.calls.role_calls import (
    PromptBatch,
    Sampler,
    ServiceNodes,
    StepContext,
)
from rolemesh.coordinator.dataflow.futures import CallFuture, ExperienceFuture, NodeKind, all_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import (
    AsyncSamplerSpec,
    OneStepAheadSpec,
    SamplerSpec,
    SyncSamplerSpec,
)
from rolemesh.engine.specs import AgentSpec, SamplingSpec
from rolemesh.engine.specs.columns import ENVIRONMENT_REWARDS, ROLLOUT_COLUMNS
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.experience.tensors import data_type_of
from rolemesh.v1 import exchange_pb2, experience_pb2, operation_pb2, rollout_pb2, weights_pb2


class ActorSampler(Sampler):
    """The actor samples by itself, with the weights that it has."""

    def __init__(
        self, spec: SamplerSpec, columns: tuple[str, ...], *, rows_vary: bool = False
    ) -> None:
        self._calls = GenerationCalls(spec, columns, rows_vary=rows_vary)

    def generate(
        self, context: StepContext, prompts: PromptBatch, sampling: SamplingSpec
    ) -> ExperienceFuture:
        """Completions of the prompts."""
        return self._calls.make(context, ("actor",), prompts, sampling, {}).experience


@dataclass(eq=False)
class _Publication:
    """Weights that the actor has published, or will have."""

    part: CallFuture
    refs: list[weights_pb2.WeightsRef]
    """One, once the part exists."""
    policy_version: int | None
    """None: that of an update that is not made yet."""

    @property
    def known_version(self) -> int | None:
        """The version, as soon as it is known."""
        return self.refs[0].policy_version if self.refs else self.policy_version


class RolloutSampler(Sampler):
    """Rollout services sample, with weights that the actor publishes.

    Invariant: a token that step s trains on was sampled with weights of step s - 1 - max_staleness
    or later. The schedule says when weights are brought:

    - sync: before a step samples.
    - one_step_ahead: to each service when it has sampled its part of a step, before it samples the
      next one; which weights sample which step does not depend on timing.
    - async: when a step is made, between two tokens of what is being sampled, or when that is
      finished.

    Owner: the coordinator's loop.
    """

    def __init__(
        self,
        spec: SamplerSpec,
        services: Sequence[str],
        dtype: str,
        sampling: SamplingSpec | None,
        columns: tuple[str, ...],
        exchanges: WeightExchanges | None,
        services_change: bool,
        *,
        rows_vary: bool = False,
    ) -> None:
        """Prepares.

        Args:
            spec: The schedule's sampler.
            services: Names of the rollout services.
            dtype: Type in which weights travel.
            sampling: Of training, for what is sampled ahead.
            columns: Columns of a trajectory.
            exchanges: By which weights go where they can; None: all weights are fetched.
            services_change: Whether services may join and leave, as `use` says.
            rows_vary: Whether a trajectory may have several rows or none.
        """
        self._spec = spec
        self._exchanges = exchanges
        self._calls = GenerationCalls(
            spec, columns, services_change=services_change, rows_vary=rows_vary
        )
        self._services = tuple(services)
        self._dtype = dtype
        self._sampling = sampling
        self._publication: _Publication | None = None
        self._taken: _Publication | None = None
        self._takes: dict[str, CallFuture] = {}
        """By service, the call that brings the newest weights."""
        self._keys: dict[str, operation_pb2.OperationKey] = {}
        """Of the call in which each service takes, or took, the newest weights."""
        self._last_begun: Mapping[str, Sequence[CallFuture]] = {}
        """By service, its calls of the step that was begun last."""
        self._begun: dict[tuple[int, PromptBatch], ExperienceFuture] = {}
        self.steps_ahead = spec.max_staleness if isinstance(spec, AsyncSamplerSpec) else 0
        self.steps_ahead_while_training = int(isinstance(spec, OneStepAheadSpec))

    def generate(
        self, context: StepContext, prompts: PromptBatch, sampling: SamplingSpec
    ) -> ExperienceFuture:
        """Completions of the prompts; those that were begun ahead are taken as they are."""
        if not context.is_evaluation and sampling == self._sampling:
            begun = self._begun.pop((context.step, prompts), None)
            if begun is not None:
                return begun
        # Evaluation brings new weights too: not while a step that was begun still samples.
        made = self._generate(context, prompts, sampling, self._bring_weights(context))
        if not context.is_evaluation:
            self._last_begun = made.calls
        return made.experience

    def begin(self, context: StepContext, prompts: PromptBatch) -> None:
        """Begins to sample a step's prompts before its algorithm asks for them."""
        if self._sampling is None:
            raise ValueError("the algorithm samples nothing that could be begun ahead")
        takes = self._bring_weights(context)
        begun = self._generate(context, prompts, self._sampling, takes)
        self._last_begun = begun.calls
        self._begun[context.step, prompts] = begun.experience

    def _generate(
        self,
        context: StepContext,
        prompts: PromptBatch,
        sampling: SamplingSpec,
        takes: Mapping[str, CallFuture],
    ) -> Generation:
        """Samples with weights that services have, or that these calls bring.

        A call waits for its own service alone, and one that may go to another service for all.
        """
        before: Mapping[str, Sequence[CallFuture]]
        before = {service: (take,) for service, take in takes.items()}
        if self._calls.may_go_to_another(context):
            before = self._as_one(before)
        return self._calls.make(context, self._services, prompts, sampling, before)

    def _as_one(
        self, calls: Mapping[str, Sequence[CallFuture]]
    ) -> Mapping[str, Sequence[CallFuture]]:
        """For each service what waits for the calls of all of them, and names its own alone.

        They share one future: a thousand calls would wait for a thousand others each, and name all.
        """
        shared = all_of([call for of_one in calls.values() for call in of_one])

        def own(service: str) -> CallFuture:
            nodes = (node for call in calls.get(service, ()) for node in call.nodes)
            return CallFuture(tuple(nodes), (shared,), frozenset())

        return {service: (own(service),) for service in self._services}

    def step_ends(self, context: StepContext) -> None:
        """Publishes the weights that the step makes, where the next steps are sampled ahead."""
        match self._spec:
            case AsyncSamplerSpec():
                self._publication = self._publish(context, context.policy_updates)
                is_leased = not self._spec.partial_rollouts
                self._bring_weights(context, is_leased=is_leased)
            case OneStepAheadSpec():
                # A publication replaces the one before, which must have been taken by then.
                after = (*context.policy_updates, *self._takes.values())
                self._publication = self._publish(context, after)

    def use(self, services: Sequence[str]) -> None:
        """Told, between two steps, which services sample from here on."""
        if set(services) - set(self._services):
            # All of them take the weights of what comes next.
            self._taken = None
        self._services = tuple(services)

    async def weights_brought(self) -> None:
        """Returns once the newest publication is made, and the services have what they take."""
        published = () if self._publication is None else self._publication.part.outcomes
        taken = [outcome for part in self._takes.values() for outcome in part.outcomes]
        await asyncio.gather(*published, *taken)

    async def bring_again(self, new: RoleConnection, on_phase: OnPhase) -> None:
        """Gives the new process of a lost service the weights that the lost one had.

        A call that was still to bring them waits for the new process, and then does.
        """
        if new.service not in self._takes or self._taken is None:
            return
        (take,) = self._takes[new.service].outcomes
        if not take.done() or take.cancelled() or take.exception() is not None:
            return

        def on_progress(progress: operation_pb2.Progress) -> None:
            on_phase(new.service, "update_weights", progress.done, progress.total)

        taken, key = self._taken, self._keys[new.service]
        try:
            result = await new.client.update_weights(key, taken.refs[0]).result(on_progress)
        except RolemeshError:
            # The next step may have published others meanwhile, which a call is still to bring.
            if self._taken is taken:
                raise
        else:
            new.policy_version = result.policy_version

    def _bring_weights(
        self, context: StepContext, *, is_leased: bool = True
    ) -> Mapping[str, CallFuture]:
        """Has every rollout service take the newest weights, unless it has them.

        One step ahead, each finishes first what it samples of the step before.

        Args:
            context: Of the step.
            is_leased: Whether they finish first whatever they sample.

        Returns:
            The calls that bring them, by service.
        """
        publication = self._publication
        version = context.connections["actor"].policy_version
        if isinstance(self._spec, SyncSamplerSpec) and (
            publication is None or publication.known_version != version
        ):
            publication = None
        if publication is None:
            publication = self._publication = self._publish(context, (), version)
        if publication is not self._taken:
            is_ahead = isinstance(self._spec, OneStepAheadSpec)
            sampled = self._last_begun if is_ahead else {}
            pairing = None
            if self._exchanges is not None:
                pairing = Pairing(self._services)
                # Sender and takers meet: they wait for each other, and so none comes early.
                sampled = self._as_one(sampled) if sampled else {}
            self._taken, self._takes = (
                publication,
                {
                    service: self._take(
                        context,
                        service,
                        publication,
                        (publication.part, *sampled.get(service, ())),
                        is_leased,
                        pairing,
                    )
                    for service in self._services
                },
            )
            if self._exchanges is not None and pairing is not None:
                before = sampled.get(self._services[0], ())
                self._send(context, self._exchanges, pairing, (publication.part, *before))
        return self._takes

    def _publish(
        self, context: StepContext, after: Sequence[CallFuture], policy_version: int | None = None
    ) -> _Publication:
        actor = ServiceNodes(context, "actor")
        refs: list[weights_pb2.WeightsRef] = []

        async def publish(
            client: ServiceClient,
            key: operation_pb2.OperationKey,
            _: experience_pb2.ExperienceRef,
            on_progress: ProgressCallback,
        ) -> weights_pb2.PublishWeightsResult:
            dtype = data_type_of(self._dtype)
            result = await client.publish_weights(key, dtype).result(on_progress)
            refs.append(result.weights)
            return result

        part = actor.node(NodeKind.UPDATE, "publish_weights", publish, after=after)
        return _Publication(part, refs, policy_version)

    def _take(
        self,
        context: StepContext,
        service: str,
        publication: _Publication,
        after: Sequence[CallFuture],
        is_leased: bool,
        pairing: Pairing | None,
    ) -> CallFuture:
        calls = ServiceNodes(context, service)
        chosen: dict[ServiceClient, str] = {}

        async def take(
            client: ServiceClient,
            key: operation_pb2.OperationKey,
            _: experience_pb2.ExperienceRef,
            on_progress: ProgressCallback,
        ) -> rollout_pb2.UpdateWeightsResult:
            self._keys[service] = key
            if client not in chosen:
                # Once: a repeat of the call has to be the same.
                chosen[client] = "" if pairing is None else await pairing.exchange_for(service)
            # The publication has its weights only when the node runs.
            result = await client.update_weights(
                key, publication.refs[0], exchange=chosen[client]
            ).result(on_progress)
            if self._exchanges is not None and result.exchange_failure:
                self._exchanges.taken(service, client, result.exchange_failure)
            return result

        return calls.node(NodeKind.UPDATE, "update_weights", take, after=after, is_leased=is_leased)

    def _send(
        self,
        context: StepContext,
        exchanges: WeightExchanges,
        pairing: Pairing,
        after: Sequence[CallFuture],
    ) -> None:
        """Has the actor send, to those who are there, what the services take by other nodes."""
        actor = ServiceNodes(context, "actor")
        names: list[str] | None = None

        async def send(
            client: ServiceClient,
            key: operation_pb2.OperationKey,
            _: experience_pb2.ExperienceRef,
            on_progress: ProgressCallback,
        ) -> exchange_pb2.SendWeightsResult:
            nonlocal names
            if names is None:
                names = await exchanges.pair(context, pairing)
            if not names:
                return exchange_pb2.SendWeightsResult()
            result = await client.send_weights(key, names).result(on_progress)
            exchanges.sent(result.failures)
            return result

        actor.node(NodeKind.UPDATE, "send_weights", send, after=after)


def _quiet(text: str) -> None:
    return


def make_sampler(
    recipe: Recipe, on_event: OnEvent = _quiet, services: Sequence[str] | None = None
) -> Sampler:
    """The sampler of a recipe's schedule.

    Args:
        recipe: The recipe.
        on_event: Is told how weights go to services.
        services: Rollout services that are there; None: all that the recipe has.
    """
    actor, rollout = recipe.actor, recipe.rollout
    environment = None if actor is None else actor.environment
    is_agent = isinstance(environment, AgentSpec)
    has_rewards = environment is not None and getattr(environment, "gives_reward", True)
    columns = (*ROLLOUT_COLUMNS, *((ENVIRONMENT_REWARDS,) if has_rewards else ()))
    if rollout is None:
        return ActorSampler(recipe.schedule.sampler, columns, rows_vary=is_agent)
    spec, dtype = recipe.schedule.sampler, rollout.rollout.dtype
    if actor is not None and actor.model.adapter is not None:
        # Factors are small, and the sampler itself rounds them as far as it must.
        dtype = "float32"
    return RolloutSampler(
        spec,
        recipe.services_of("rollout") if services is None else services,
        dtype,
        recipe.sampling,
        columns,
        WeightExchanges(recipe, dtype, on_event) if spec.weights == "nccl" else None,
        services_change=recipe.changes("rollout"),
        rows_vary=is_agent,
    )
