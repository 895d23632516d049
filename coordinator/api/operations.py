"""Operations of the coordinator for others, the same over every protocol.

CoordinatorService (gRPC) and the REST routes are thin translations of this one class, so that both
say the same. Results are the messages of coordinator.proto.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rolemesh.v1 import coordinator_pb2


class Operations(Protocol):
    """The operations of one coordinator.

    Every method raises a RolemeshError with a reason of coordinator.proto: NotFoundError,
    InvalidRequestError, PreconditionError, OutOfRangeError, CapacityError, or UnavailableError
    (STORE_UNAVAILABLE). Owner: one asyncio loop; methods may be called concurrently on it.
    """

    async def create_run(
        self, run_id: str, recipe: str, overrides: Sequence[str] = ()
    ) -> coordinator_pb2.Run:
        """Starts a run of a recipe, given as YAML or JSON text."""

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        """A run."""

    async def list_runs(self, page_size: int = 0) -> list[coordinator_pb2.Run]:
        """Runs, newest first; 0 means 100 of them."""

    async def stop_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to end after the step in progress, with everything saved."""

    async def pause_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to make no further step until it is resumed."""

    async def resume_run(self, run_id: str) -> coordinator_pb2.Run:
        """Cancels the wish to pause."""

    async def checkpoint_run(self, run_id: str, request_id: str) -> coordinator_pb2.Run:
        """Asks it to save a checkpoint after the step in progress."""

    def watch_run(
        self, run_id: str, after_event_id: str = ""
    ) -> AsyncIterator[coordinator_pb2.RunEvent]:
        """Past and future events after the given one, to the end of the run."""

    async def get_metrics(
        self,
        run_id: str,
        names: Sequence[str] = (),
        from_step: int = 0,
        max_steps: int = 0,
        *,
        thin: bool = False,
    ) -> coordinator_pb2.GetMetricsResponse:
        """Metrics of steps, in columns."""

    async def get_dataflow(self, run_id: str, step: int = 0) -> coordinator_pb2.GetDataflowResponse:
        """The graph of a step; 0 for the step in progress, or else the newest."""

    async def list_samples(self, run_id: str, step: int = 0) -> coordinator_pb2.ListSamplesResponse:
        """Some trajectories of a step; 0 for the newest that has any."""

    async def get_device_use(
        self, run_id: str, since: float = 0.0
    ) -> coordinator_pb2.GetDeviceUseResponse:
        """How busy devices were since a Unix time in seconds."""

    async def list_alerts(self, run_id: str) -> coordinator_pb2.ListAlertsResponse:
        """Alerts, the most pressing first."""

    async def read_log(
        self, run_id: str, log: str, offset: int = 0, max_bytes: int = 0
    ) -> coordinator_pb2.ReadLogResponse:
        """A piece of a log; a negative offset counts from its end."""

    async def list_services(self) -> list[coordinator_pb2.RegisteredService]:
        """Services whose lease holds."""

    async def attach_run(self, run_id: str) -> coordinator_pb2.AttachRunResponse:
        """Gives a run of algorithm "external" to the caller, and fences off its earlier driver."""
