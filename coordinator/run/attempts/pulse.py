"""Exchange between a run and its store, once a second, beside the steps of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rolemesh.coordinator.api.messages import to_timestamp
from rolemesh.coordinator.dataflow.loop.clock import unix_time
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.steps.run_loop import RunLoop
from rolemesh.coordinator.state.store import RunStream
from rolemesh.v1 import coordinator_pb2, worker_pb2


class Pulse:
    """Reads wishes, and writes activity, the step in progress, device use and events.

    A value that has not changed is not written again. Owner: one asyncio loop.
    """

    def __init__(self, parts: RunParts, epoch: int | None, loop: RunLoop) -> None:
        """Prepares.

        Args:
            parts: Of the run.
            epoch: Epoch under which it writes; None when a client holds the newest one.
            loop: Says what the run does, and has the graph of the step in progress.
        """
        self._parts = parts
        self._epoch = epoch
        self._loop = loop
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
        parts = self._parts
        await parts.wishes.read()
        activity, flow = self._loop.activity, self._loop.step_in_progress
        if activity != self._told_activity:
            self._told_activity = activity
            await parts.store.update_run(parts.run_id, epoch=self._epoch, activity=activity)
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
        await parts.events.flush()

    async def _append(self, stream: RunStream, payload: bytes, step: int | None = None) -> None:
        store, run_id = self._parts.store, self._parts.run_id
        await store.append_entry(run_id, stream, payload, self._epoch, step=step)
