"""Published weights on their last way: from where they were fetched into the sampler.

Fetching goes on while the compute thread samples; loading is work of that thread, between two
decoding steps where a generation runs.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from rolemesh.engine.parallel.agreement import gather_facts, have_same_number
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.agreement.probe import ProbeScores, SamplerCheck, check_sampler
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.weights.exchanges.published import Taking
from rolemesh.rpc.errors import AbortedError
from rolemesh.services.runtime.experience.published_weights import FetchedBoxes

_CPU = torch.device("cpu")
"""Where messages of the ranks lie: a step must not wait for a GPU to hear that nothing came."""


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Weights that have been fetched and wait to be loaded, or why they could not be."""

    policy_version: int
    taking: Taking | None = None
    """What was fetched, and what becomes of it; None where nothing was."""
    fetched: dict[int, FetchedBoxes] = field(default_factory=dict)
    """By publishing rank. The compute thread's, which lets go of them once they are loaded."""
    fetched_bytes: Mapping[str, int] = field(default_factory=dict)
    """By transport."""
    received: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The rank's tensors, where an exchange brought them; in the place of `fetched`."""
    probe: ProbeScores | None = None
    """What the weights give a row, by which the sampler is checked."""
    exchange_failure: str = ""
    """Why this rank is no longer in the exchange that was to bring them."""
    error: Exception | None = None
    """What went wrong with the fetch on this rank."""
    loaded: concurrent.futures.Future[float] = field(default_factory=concurrent.futures.Future)
    """Done when the sampler has it: seconds that it took; or the error."""

    @property
    def failure(self) -> BaseException | None:
        """Why the sampler of this rank does not have it, as far as that is known."""
        is_refused = self.loaded.done() and not self.loaded.cancelled()
        return self.error or (self.loaded.exception() if is_refused else None)

    @property
    def is_held(self) -> bool:
        """Whether the sampler has it."""
        return self.loaded.done() and not self.loaded.cancelled() and not self.loaded.exception()

    def claim(self) -> bool:
        """Keeps it from being given up from here on; False where it was, or where it has ended."""
        if self.loaded.running():
            return True
        return not self.loaded.done() and self.loaded.set_running_or_notify_cancel()


class Deliveries:
    """Weights on their way into one rank's sampler. `put` from any thread, the rest as said.

    Invariant: the ranks of one sampler load a delivery before the same decoding step, or in the
    same turn of the service, each wholly or none at all. After one that failed, nothing new is
    sampled until a whole one; what runs goes on where the sampler still holds a whole set, and says
    with each token which one.

    Example: version 3 is loaded and a generation runs on two slices. `put` of version 4 returns at
    once. Once both ranks have theirs, the next step draws its tokens from version 4, and `loaded`
    of both deliveries is done.
    """

    def __init__(self, backend: RolloutBackend, mesh: RankMesh, *, are_shards: bool) -> None:
        """Connects the sampler.

        Args:
            backend: Takes the weights. Its generations look here between steps.
            mesh: The service's ranks.
            are_shards: Whether each rank takes its own part.
        """
        self._backend = backend
        self._mesh = mesh
        self._are_shards = are_shards
        self._waiting: Delivery | None = None
        self._unchecked: ProbeScores | None = None
        """Of the newest weights, unless the sampler was checked since it has them."""
        self._check = SamplerCheck()
        self._refusal = ""
        self.is_outdated = False
        """Whether what the sampler holds is of a lineage of the run that ended."""
        backend.between_steps = self.look

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._waiting is None

    def put(self, delivery: Delivery) -> None:
        """Leaves a delivery where the next decoding step finds it; one at a time."""
        self._waiting = delivery

    def give_up(self, delivery: Delivery) -> None:
        """Withdraws a delivery that `put` has left, unless it is being loaded. On put's thread."""
        delivery.loaded.cancel()
        if self._waiting is delivery:
            self._waiting = None

    def look(self) -> None:
        """Loads what waits, once all ranks of this sampler have it. They call it together.

        Called between two decoding steps, on the compute thread. A caller that waits for the
        delivery gets an error; the generation goes on if the sampler still holds a whole set.
        """
        delivery = self._waiting
        if delivery is not None and not delivery.claim():
            delivery = None
        version = -1 if delivery is None else delivery.policy_version
        if have_same_number(version, self._mesh.generate_tp, _CPU) and delivery is not None:
            with suppress(Exception):
                self._take(delivery, self._mesh.generate_tp)

    def load(self, delivery: Delivery) -> None:
        """Loads a delivery in its own turn, unless a generation has taken it.

        On the compute thread; all ranks of the service together.

        Raises:
            Exception: What kept this rank from it. It is also that of `delivery.loaded`.
            AbortedError: WEIGHTS_STALE: another rank has failed.
        """
        self._take(delivery, self._mesh.world)

    def outdate(self) -> None:
        """Refuses to sample until new weights come, whatever their version. All ranks together."""
        self._waiting = None
        self.is_outdated = True
        self._refusal = (
            "the run began anew from an earlier step since the sampler got its weights: call "
            "UpdateWeights with what the actor publishes now, then generate"
        )

    def check(self) -> None:
        """Refuses to begin a generation, on all ranks of the service, which call it together.

        Raises:
            WeightsStaleError: A rank has got no weights yet, or its newest update failed.
            SamplerStaleError: A rank's sampler does not compute with the weights that it took.
        """
        refusal = self._refusal
        if not refusal and self._backend.policy_version < 0:
            refusal = (
                "the rollout service holds no weights: call UpdateWeights with what the actor "
                "publishes, then generate"
            )
        # Samplers of one service take weights at steps of their own, and may differ until the turn
        # of the update: one that began alone would leave the ranks of the service at odds.
        refusals = gather_facts(refusal, self._mesh.world, _CPU)
        if refusal or any(refusals):
            raise WeightsStaleError(refusal or next(filter(None, refusals)))
        # Not when they came: a generation may have been under way.
        check_sampler(self._backend, self._check, self._unchecked, self._mesh.world, _CPU)
        self._unchecked = None

    def _take(self, delivery: Delivery, group: RankGroup) -> None:
        """Loads a delivery on all ranks of a group, and tells its caller how that went."""
        is_awaited = delivery.claim()
        # Before its caller is told, who may bring the next one then.
        self._waiting = None
        started = time.monotonic()
        try:
            self._load(delivery, group)
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
            if is_awaited:
                delivery.loaded.set_exception(error)
            raise
        else:
            self._refusal = ""
            self.is_outdated = False
            self._unchecked = delivery.probe
            if is_awaited:
                delivery.loaded.set_result(time.monotonic() - started)
        finally:
            delivery.fetched.clear()
            delivery.received.clear()

    def _load(self, delivery: Delivery, group: RankGroup) -> None:
        _check_all(delivery.failure, group, "could not take its weights, so the update has failed")
        failure: Exception | None = None
        if not delivery.is_held:
            try:
                self._update(delivery)
            except Exception as error:
                failure = error
        try:
            _check_all(failure, group, "could not take its weights, so no rank samples with them")
        except AbortedError as error:
            # Other weights than its neighbours': together they would sample nonsense.
            self._backend.drop_weights(str(error))
            raise

    def _update(self, delivery: Delivery) -> None:
        tensors: Iterable[tuple[str, torch.Tensor]] = _handed_over(delivery.received)
        if delivery.taking is not None:
            boxes = {source: found.boxes for source, found in delivery.fetched.items()}
            tensors = delivery.taking.tensors(boxes)
        elif not delivery.received:
            raise RuntimeError("a delivery without an error has weights")
        if self._are_shards:
            self._backend.update_shard(tensors, delivery.policy_version)
        else:
            self._backend.update_weights(tensors, delivery.policy_version)


def _handed_over(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in their order, each let go before the next one is given."""
    tensors.reverse()
    while tensors:
        name, tensor = tensors.pop()
        if tensor.is_cuda:
            # Made by another thread, whose stream would have its memory again at once.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        yield name, tensor


def _check_all(failure: BaseException | None, group: RankGroup, what: str) -> None:
    """Raises on every rank of a group if one of them has failed; all ranks call it.

    Raises:
        BaseException: This rank's failure.
        AbortedError: WEIGHTS_STALE: another rank's.
    """
    problem = "" if failure is None else str(failure) or type(failure).__name__
    problems = gather_facts(problem, group, _CPU)
    if failure is not None:
        raise failure
    for rank, theirs in zip(group.ranks, problems, strict=True):
        if theirs:
            raise AbortedError(f"rank {rank} {what}: {theirs}", reason="WEIGHTS_STALE")
