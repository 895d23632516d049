"""A run whose steps a client makes: services are started, initialised and held for it.

What the client logs of its steps comes through the journal and is written as that of any run.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.journal import LOG_OPERATION
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.steps.run_loop import RunLoop
from rolemesh.coordinator.state.store import (
    REWIND_OPERATION,
    JournalEntry,
    RunState,
    RunStream,
)
from rolemesh.v1 import coordinator_pb2

_LOOK_S: Final = 0.5
"""Pause between two looks for logged steps."""


class ExternalLoop(RunLoop):
    """Takes the place of a TrainingLoop, and waits for a wish to stop the run.

    AttachRun raises the epoch of the run. This fences off all earlier drivers of the services, also
    this coordinator. Its own writes about the run therefore carry no epoch.

    Owner: one asyncio loop.
    """

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts)
        self._read_id = ""
        """The journal was read up to this entry."""

    async def run(self) -> None:
        """Holds the services until a wish to stop, and writes what is logged."""
        parts = self.parts
        self.activity = "driven by a client"
        # What stands there now, this run has reached. More comes from a client that attaches.
        for entry in await parts.store.read_journal(parts.run_id):
            self._read_id = entry.entry_id
        parts.events.step = self.step
        await parts.store.update_run(parts.run_id, state=RunState.RUNNING)
        parts.events.state(coordinator_pb2.RUN_STATE_RUNNING)
        await parts.events.flush()
        while not self.wishes.is_stop_wanted:
            await self._write_logged()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.wishes.change()
        # A client logs its last step, and then stops the run.
        await self._write_logged()

    async def _write_logged(self) -> None:
        for entry in await self.parts.store.read_journal(self.parts.run_id, self._read_id):
            if entry.operation == REWIND_OPERATION:
                await self._go_back(entry.step)
            elif entry.operation == LOG_OPERATION and self.progress.logged(entry.result["record"]):
                await self._write(entry)
            self._read_id = entry.entry_id

    async def _go_back(self, step: int) -> None:
        """Takes back what was logged of later steps; the store has done so."""
        parts = self.parts
        self.progress.rewind(min(step, self.step))
        parts.writer.rewind(self.step, self.progress.records)
        parts.events.resumed(self.step, "the client that drives the run: it has gone back")
        await parts.events.flush()

    async def _write(self, entry: JournalEntry) -> None:
        parts = self.parts
        record = dict(entry.result["record"])
        if entry.result["num_samples"]:
            await self._write_samples(entry.step)
        await parts.writer.write_step(record)
        parts.events.step = self.step
        parts.events.step_made(record)
        await parts.events.flush()
        await parts.store.update_run(parts.run_id, step=self.step, metrics=record)
        parts.observer.on_step(record)

    async def _write_samples(self, step: int) -> None:
        """Writes the samples of a step to samples.jsonl; the store keeps those of the newest."""
        parts = self.parts
        for kept in reversed(await parts.store.read_entries(parts.run_id, RunStream.SAMPLES)):
            found = coordinator_pb2.ListSamplesResponse.FromString(kept.payload)
            if found.step == step:
                parts.writer.samples.write(step, found.samples, is_held_out=False)
                return
        parts.observer.on_event(
            f"samples of step {step} were logged faster than they could be written: they are not "
            "kept"
        )

    def running(self, service: str) -> list[Node]:
        """No call of the coordinator is in flight."""
        return []
