"""Failures that a run goes on after: told to people, kept in its record and its summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.observer import RECOVERING
from rolemesh.coordinator.run.attempts.recovery import told_of
from rolemesh.coordinator.run.reporting.events import EventLog, NotingObserver, Recovered
from rolemesh.coordinator.state.store import RunState, StateStore
from rolemesh.v1 import coordinator_pb2


class Recoveries:
    """Notes when a run begins to recover, and when it has. Owner: the run's loop.

    A failure while the run recovers belongs to the same recovery.
    """

    def __init__(
        self, store: StateStore, run_id: str, observer: NotingObserver, events: EventLog
    ) -> None:
        self.made: list[Recovered] = []
        """Those that have come to their end, oldest first."""
        self._store = store
        self._run_id = run_id
        self._observer = observer
        self._events = events
        self._failure: _Failure | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether services are not where the run is, after a failure."""
        return self._failure is not None

    async def begin(self, error: Exception, step: int, lost: str, epoch: int | None) -> None:
        """Says that the run recovers.

        Args:
            error: What ended the attempt.
            step: Steps made before.
            lost: What is done about lost services, in words.
            epoch: Of the attempt.

        Raises:
            StateStoreError: The store failed.
        """
        recoveries = (await self._store.get_run(self._run_id)).recoveries
        if self._failure is None:
            self._failure = _Failure(told_of(error), now(), step)
            recoveries += 1
        told = f"{told_of(error)}{lost}"
        self._observer.show(f"recovering after {step} steps: {told}")
        self._observer.on_phase(RECOVERING, told, 0, 0)
        self._events.state(coordinator_pb2.RUN_STATE_RECOVERING, told)
        await self._store.update_run(
            self._run_id,
            epoch=epoch,
            state=RunState.RECOVERING,
            activity=f"recovering: {told}",
            recoveries=recoveries,
        )
        await self._events.flush()

    def end(self, step: int, fresh: Iterable[str]) -> None:
        """Told that all services are where the run is.

        Args:
            step: Steps that count.
            fresh: Services that had to load their models.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            return
        recovered = Recovered(
            step=step,
            cause=failure.cause,
            seconds=now() - failure.at,
            restarted=tuple(sorted(fresh)),
            lost_steps=failure.step - step,
        )
        self._observer.on_phase(RECOVERING, "", 0, 0)
        self._note(
            recovered,
            f"step {recovered.step + 1} is made again"
            + (f", {recovered.lost_steps} before it are, too" if recovered.lost_steps else "")
            + f"; loaded anew: {', '.join(recovered.restarted) or 'no service'}",
        )

    def replaced(self, recovered: Recovered) -> None:
        """Told that a service was replaced while the attempt went on."""
        self._note(recovered, f"{', '.join(recovered.restarted)} was replaced, the step goes on")

    def went_on(self, recovered: Recovered) -> None:
        """Told that a service has died, and that others make its calls."""
        self._note(recovered, "others make its calls, the step goes on")

    def _note(self, recovered: Recovered, told: str) -> None:
        self.made.append(recovered)
        self._events.recovered(recovered)
        self._observer.show(f"recovered in {recovered.seconds:.1f} s: {told}")


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a run recovers from."""

    cause: str
    at: float
    """On the loop's clock."""
    step: int
    """Steps made before."""
