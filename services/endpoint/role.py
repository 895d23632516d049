"""A role whose sampler answers at an endpoint, where its recipe wants that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import torch

from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.experience import Experience
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.endpoint.calls import EndpointCalls
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.sampling import OnBlock, without_rows
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.runner import SessionRunner
from rolemesh.engine.specs import (
    AgentSpec,
    DataSpec,
    EndpointSpec,
    EnvironmentSpec,
    SamplingSpec,
    images_of_data,
)
from rolemesh.rpc.errors import RolemeshError, UnavailableError
from rolemesh.services.endpoint.endpoint import Endpoint, EndpointClosedError
from rolemesh.services.endpoint.replicas import Calls, RemoteCalls, Replicas
from rolemesh.services.endpoint.turns import RankTurns, Turns, TurnsOfAll, end_teller
from rolemesh.services.runtime.calls.role import ProgressCallback
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.ranks.face import GIVEN_UP
from rolemesh.services.runtime.servicers.asked_prompts import AskedPrompts
from rolemesh.services.runtime.servicers.rollout import SamplingRole

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class EndpointRole(SamplingRole):
    """What actor and rollout role share of an endpoint, from Initialize to the end of the run.

    Rank 0 answers; the other ranks sample what it gives them. In each generation replica the first
    rank hears of calls, and tells its other slices.
    """

    endpoint: Endpoint | None = None
    """Where programs ask the policy; None: nowhere, or at rank 0."""
    runtime: Runtime | None = None
    """Of the run that the role serves; set by `serve_run`."""
    turns: RankTurns | None = None
    """Of this rank, where it is one of several of a service with an endpoint."""
    world: RankGroup = RankMesh.single().world
    """All ranks of the service."""

    def serve_run(self, runtime: Runtime) -> None:
        """Learns of the run, on the service's loop, before anything else."""
        self.runtime = runtime
        self._service_loop = asyncio.get_running_loop()

    def open_endpoint(
        self,
        spec: EndpointSpec | None,
        environment: EnvironmentSpec | None,
        sandbox: Sandbox,
        data: DataSpec,
    ) -> dict[str, str]:
        """Serves the sampler at an endpoint from now on, where there is to be one.

        Args:
            spec: Of the endpoint; None: there is none.
            environment: Of the rows; an agent asks at the endpoint.
            sandbox: Where a user's code runs.
            data: Of the run, whose bounds of images hold for clients.

        Returns:
            Where it answers, as a fact of Initialize.

        Raises:
            ValueError: The port cannot be bound, or a field cannot be served.
            UserCodeError: The code of an agent cannot be loaded.
        """
        if spec is None:
            return {}
        if self.runtime is None:
            raise RuntimeError("an endpoint is opened before the role was registered")
        hold, process, own = self.runtime.hold, self.runtime.process, self.backend.endpoint_calls
        assert own is not None
        self.has_agents = isinstance(environment, AgentSpec)
        self.world = self.runtime.mesh.world
        calls: Calls = own
        turns: Turns = process.compute
        if self.world.size > 1:
            self.turns = RankTurns(own)
            if process.face is None:
                return {}
            calls, turns = self._over_all_ranks(own, self.turns)
        self.endpoint = Endpoint(
            spec,
            self.backend,
            turns,
            calls=calls,
            ranks=self.turns,
            bring_weights=self.bring_weights,
            may_sample=lambda: hold.may_sample,
            image_bounds=images_of_data(data),
        )
        if isinstance(environment, AgentSpec):
            self.source.agents = SessionRunner(
                environment,
                sandbox,
                self.endpoint,
                may_show_images=self.source.prompts.has_images,
            )
            logger.info("agents run in the sandbox %s", sandbox)
        return {"endpoint": self.endpoint.url}

    def _over_all_ranks(self, own: EndpointCalls, ranks: RankTurns) -> tuple[Calls, Turns]:
        """Where calls go, and who takes turns, on rank 0 of several."""
        assert self.runtime is not None
        process, run_id, loop = self.runtime.process, self.runtime.hold.run_id, self._service_loop
        face = process.face
        assert face is not None
        turns = TurnsOfAll(run_id, ranks, face, process.compute, loop)
        replicas = self.runtime.mesh.layout.replicas()
        if len(replicas) == 1:
            return own, turns
        ranks.tell_end = end_teller(run_id, face, loop)
        others = [RemoteCalls(face.channel(first), run_id, loop) for first, *_ in replicas[1:]]
        return Replicas(own, others), turns

    def take_turn(self) -> None:
        """Samples what rank 0 gives this rank, until that ends the turn. On the compute thread.

        Raises:
            WeightsStaleError: The sampler cannot have the weights to sample with.
        """
        turns = self.turns
        if turns is None:  # it was closed while the turn waited
            raise EndpointClosedError("the rank has ended its endpoint")
        number = turns.begin()
        try:
            self.bring_weights()
            turns.follow(self.backend, number)
        except (WeightsStaleError, RolemeshError):
            raise
        except Exception as error:
            # As rank 0 does: what is in the engines stays alike.
            turns.calls.fail(self.backend.engine, error)
            raise

    def generate(
        self,
        asked: AskedPrompts,
        sampling: SamplingSpec,
        step: int,
        progress: ProgressCallback,
        *,
        lineage: int,
        only: Sequence[int],
        block_rows: int = 0,
        on_block: OnBlock | None = None,
    ) -> Experience:
        """As `SamplingRole.generate`. Agents play on rank 0, and the other ranks sample for them.

        Raises:
            EnvironmentFailedError: A trajectory failed; on all ranks alike.
        """

        def own() -> Experience:
            return super(EndpointRole, self).generate(
                asked,
                sampling,
                step,
                progress,
                lineage=lineage,
                only=only,
                block_rows=block_rows,
                on_block=on_block,
            )

        turns = self.turns
        if not self.has_agents or turns is None:
            return own()
        # What is wrong with them is so on all ranks, before any of them waits for another.
        asked.of(self.source.prompts, self.source.tokenizer)
        batch = without_rows(has_rewards=False)
        failure: EnvironmentFailedError | RolemeshError | None = None
        try:
            if self.endpoint is not None:
                with turns.turn():
                    batch = own()
            else:
                number = turns.begin()
                self.bring_weights()
                turns.follow(self.backend, number, anew=True)
        except (EnvironmentFailedError, RolemeshError) as error:
            # After these the other ranks end their turn as well. After an error of an engine, its
            # other slices wait for a step that never comes: that must be known at once.
            failure = error
        is_given_up = getattr(failure, "reason", "") == GIVEN_UP
        told = gather_facts([str(failure or ""), is_given_up], self.world, _CPU)[0]
        if failure is not None:
            raise failure
        text, is_given_up = told
        if is_given_up:
            raise UnavailableError(text, reason=GIVEN_UP)
        if text:
            raise EnvironmentFailedError(text)
        return batch

    def close_endpoint(self) -> None:
        """Ends the endpoint with all its calls; nothing where there is none."""
        if self.endpoint is not None:
            self.endpoint.close()
            if self.source.agents is not None:
                self.source.agents.close()
                self.source.agents = None
            self.endpoint = None
        elif self.turns is not None:
            self.turns.calls.close(
                self.backend.engine, EndpointClosedError("the rank ends its endpoint")
            )
        self.turns = None
        self.has_agents = False
