"""Published weights on their last way: from where they were fetched into the sampler.

Fetching goes on while the compute thread samples; loading is work of that thread, between two
decoding steps where a generation runs.
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.weights.published import Taking
from rolemesh.rpc.errors import AbortedError
from rolemesh.services.runtime.experience.published_weights import FetchedBoxes
from rolemesh.services.runtime.ranks.device import rank_device


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Weights that have been fetched and wait to be loaded, or why they could not be."""

    policy_version: int
    taking: Taking | None = None
    """What was fetched, and what becomes of it; None where the fetch failed."""
    fetched: Mapping[int, FetchedBoxes] = field(default_factory=dict)
    """By publishing rank."""
    error: Exception | None = None
    """What went wrong with the fetch on this rank."""
    loaded: concurrent.futures.Future[float] = field(default_factory=concurrent.futures.Future)
    """Done when the sampler has it: seconds that it took; or the error."""


class Deliveries:
    """Weights on their way into one rank's sampler. `put` from any thread, the rest as said.

    Invariant: deliveries are loaded in order, each wholly or not at all on all ranks alike. After
    one that failed, nothing new is sampled until a whole one; what runs goes on where the sampler
    still holds a whole set, and says with each token which one.

    Example: version 3 is loaded and a generation runs on one rank. `put` of version 4 returns at
    once; the next step draws its tokens from version 4, and `loaded` of the delivery is done.
    """

    def __init__(self, backend: RolloutBackend, mesh: RankMesh, *, are_shards: bool) -> None:
        """Connects the sampler.

        Args:
            backend: Takes the weights. On one rank its generations look here between steps; on
                several, ranks would have to agree on the step, so deliveries wait for the end.
            mesh: The service's ranks.
            are_shards: Whether each rank takes its own part.
        """
        self._backend = backend
        self._mesh = mesh
        self._are_shards = are_shards
        self._waiting: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._refusal = ""
        self.is_outdated = False
        """Whether what the sampler holds is of a lineage of the run that ended."""
        if mesh.world.size == 1:
            backend.between_steps = self.load

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._waiting.empty()

    def put(self, delivery: Delivery) -> None:
        """Leaves a delivery where the next decoding step, or `load`, finds it."""
        self._waiting.put(delivery)

    def load(self) -> None:
        """Loads what waits, in order. On the compute thread; all ranks together.

        A caller that waits for the delivery gets the error.
        """
        while True:
            try:
                delivery = self._waiting.get_nowait()
            except queue.Empty:
                return
            if not delivery.loaded.set_running_or_notify_cancel():
                continue  # given up before its turn came
            started = time.monotonic()
            try:
                self._load(delivery)
            except Exception as error:
                held = self._backend.policy_version
                self._refusal = (
                    f"the update to policy_version {delivery.policy_version} failed ({error}), "
                    + (
                        f"and the sampler still holds version {held}"
                        if held >= 0
                        else "and the sampler holds no whole set of weights"
                    )
                    + ": update it before it samples again"
                )
                delivery.loaded.set_exception(error)
            else:
                self._refusal = ""
                self.is_outdated = False
                delivery.loaded.set_result(time.monotonic() - started)

    def outdate(self) -> None:
        """Refuses to sample until new weights come, whatever their version. All ranks together."""
        self.is_outdated = True
        self._refusal = (
            "the run began anew from an earlier step since the sampler got its weights: call "
            "UpdateWeights with what the actor publishes now, then generate"
        )

    def check(self) -> None:
        """Refuses to begin a generation.

        Raises:
            WeightsStaleError: No weights came yet, or the newest update failed.
        """
        if self._refusal:
            raise WeightsStaleError(self._refusal)
        if self._backend.policy_version < 0:
            raise WeightsStaleError(
                "the rollout service holds no weights: call UpdateWeights with what the actor "
                "publishes, then generate"
            )

    def _load(self, delivery: Delivery) -> None:
        # One rank with other weights than its neighbours would sample nonsense.
        problem = "" if delivery.error is None else str(delivery.error)
        problems = gather_facts(problem, self._mesh.world, rank_device())
        if delivery.error is not None:
            raise delivery.error
        for rank, theirs in enumerate(problems):
            if theirs:
                raise AbortedError(
                    f"rank {rank} could not fetch the weights, so no rank takes them: {theirs}",
                    reason="WEIGHTS_STALE",
                )
        if delivery.taking is None:
            raise RuntimeError("a delivery without an error has weights")
        boxes = {source: found.boxes for source, found in delivery.fetched.items()}
        tensors = delivery.taking.tensors(boxes)
        if self._are_shards:
            self._backend.update_shard(tensors, delivery.policy_version)
        else:
            self._backend.update_weights(tensors, delivery.policy_version)
