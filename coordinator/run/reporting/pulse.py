"""Exchange between a run and its store, once a second, beside the steps of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rolemesh.coordinator.api.messages import to_timestamp
from rolemesh.coordinator.dataflow.clock import unix_time
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.wishes import Wishes
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.v1 import coordinator_pb2, worker_pb2


class Pulse:
    """Reads wishes, and writes activity, the step in progress, device use and events.

    A value that has not changed is not written again. Owner: one asyncio loop.
    """

    def __init__(
        self,
        store: StateStore,
        run_id: str,
        epoch: int | None,
        wishes: Wishes,
        events: EventLog,
        *,
        activity: Callable[[], str],
        flow: Callable[[], StepGraph | None],
    ) -> None:
        """Prepares.

        Args:
            store: Store of the run.
            run_id: Id of the run.
            epoch: Epoch under which it writes; None when a client holds the newest one.
            wishes: Wishes, which each beat reads from the store.
            events: Events, which each beat appends.
            activity: Returns what the run does.
            flow: Returns the graph of the step in progress, None between steps.
        """
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._wishes = wishes
        self._events = events
        self._activity = activity
        self._flow = flow
        self._told_activity = ""
        self._told_flow: list[object] = []
        """What the flow was that was written last, as far as it changes."""
        self._devices: list[coordinator_pb2.DeviceUseSeries] = []

    def on_devices(self, service: str, devices: Sequence[worker_pb2.DeviceUse]) -> None:
        """Takes the device use of a service; the next beat writes it."""
        if not devices:
            return
        now = to_timestamp(unix_time())
        self._devices += [
            coordinator_pb2.DeviceUseSeries(
                service=service,
                rank=use.rank,
                device=use.device,
                times=[now],
                busy=[use.busy],
                memory_bytes=[use.memory_bytes],
                memory_total_bytes=use.memory_total_bytes,
            )
            for use in devices
        ]

    async def beat(self) -> None:
        """Reads and writes once; raises the errors of the store."""
        await self._wishes.read()
        activity = self._activity()
        if activity != self._told_activity:
            self._told_activity = activity
            await self._store.update_run(self._run_id, epoch=self._epoch, activity=activity)
        flow = self._flow()
        if flow is not None:
            # A graph of a thousand services takes a tenth of a second to write, for which no call
            # is sent: so it is written when it is another one.
            found: list[object] = [flow]
            found += [(n.state, n.ready_at, n.started_at, n.ended_at) for n in flow.nodes]
            if found != self._told_flow:
                self._told_flow = found
                nodes = [node.to_dict() for node in flow.nodes]
                graph = json.dumps({"step": flow.step, "nodes": nodes}).encode()
                await self._append(RunStream.FLOW, graph, flow.step)
        if self._devices:
            look = coordinator_pb2.GetDeviceUseResponse(devices=self._devices)
            self._devices = []
            await self._append(RunStream.DEVICES, look.SerializeToString())
        await self._events.flush()

    async def _append(self, stream: RunStream, payload: bytes, step: int | None = None) -> None:
        await self._store.append_entry(self._run_id, stream, payload, self._epoch, step=step)
