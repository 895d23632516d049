"""Some trajectories of each step and evaluation for people, fetched from where they are held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from rolemesh.coordinator.dataflow.futures import ExperienceFuture
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.run.results.samples_file import SamplesFile
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.members.identity import Identity
from rolemesh.rpc.samples.rows import fetch_samples
from rolemesh.v1 import coordinator_pb2

TIMEOUT_S = 5.0
FAILURES_UNTIL_GIVEN_UP = 3

NUM_TOLD = 2
"""Held-out completions that the console shows of each evaluation, of the same prompts each time."""

_QUIET = (RolemeshError, StateStoreError, ValueError, TimeoutError, OSError)
"""What samples may fail of without harm to the run."""

_TOLD_CHARACTERS = 160
"""Of a text on the console the last of a prompt and the first of a completion are shown."""


class SampleTaker:
    """Takes rows of each step's and evaluation's experience, spread evenly over the batch.

    The run does not depend on them: a failure is reported once, and after some failures in a row no
    more samples are taken. Their traffic does not count as that of the step.

    Owner: one asyncio loop.
    """

    def __init__(
        self,
        store: StateStore,
        run_id: str,
        epoch: int | None,
        observer: RunObserver,
        num_rows: int,
        file: SamplesFile | None,
        identity: Identity | None = None,
    ) -> None:
        """Prepares.

        Args:
            store: Store that gets the samples of steps.
            run_id: Id of the run.
            epoch: Epoch under which they are appended.
            observer: Observer that is told of failures.
            num_rows: Rows of each step; 0 takes none.
            file: File of the run that gets all samples; None: none does.
            identity: Of the coordinator; None where the services speak in clear.
        """
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._observer = observer
        self._num_rows = num_rows
        self._file = file
        self._identity = identity
        self._num_failures = 0
        self._channels: dict[str, MeshChannel] = {}
        self._begun: asyncio.Task[coordinator_pb2.ListSamplesResponse] | None = None
        """Fetches samples of the step that is being made."""

    @property
    def _is_on(self) -> bool:
        return self._num_rows > 0 and self._num_failures < FAILURES_UNTIL_GIVEN_UP

    def begin(self, step: int, experience: ExperienceFuture) -> None:
        """Begins to fetch samples of a step as soon as its rows are there: beside its update.

        Args:
            step: Step that is being made. `take` has its samples told once it is made.
            experience: What it trains on.
        """
        self._drop_begun()
        if self._is_on:
            self._begun = asyncio.create_task(self._fetch(step, experience))
            # That of a step that fails has no reader.
            self._begun.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def take(self, step: int, experience: ExperienceFuture) -> None:
        """Takes samples of a step that was made and whose experience is still held."""
        if not self._is_on:
            return
        with self._failing_quietly(f"step {step}"):
            samples = await self._begun_of(step)
            if samples is None:
                samples = await self._fetch(step, experience)
            async with asyncio.timeout(TIMEOUT_S):
                await self._store.append_entry(
                    self._run_id,
                    RunStream.SAMPLES,
                    samples.SerializeToString(),
                    self._epoch,
                    step=step,
                )
            self._write(samples, is_held_out=False)

    async def take_held_out(self, step: int, experience: ExperienceFuture) -> None:
        """Takes samples of the evaluation after a step, and shows some of them on the console."""
        if not self._is_on:
            return
        with self._failing_quietly(f"the evaluation after step {step}"):
            samples = await self._fetch(step, experience)
            self._write(samples, is_held_out=True)
            for sample in samples.samples[:NUM_TOLD]:
                self._observer.on_event(told_of(sample))

    @contextlib.contextmanager
    def _failing_quietly(self, of_what: str) -> Iterator[None]:
        """Reports the first failure of some in a row."""
        try:
            yield
        except _QUIET as error:
            self._num_failures += 1
            if self._num_failures == 1:
                cause = str(error) or type(error).__name__
                self._observer.on_event(
                    f"samples of {of_what} cannot be shown: {cause} (run.samples: 0 switches "
                    "them off)"
                )
        else:
            self._num_failures = 0

    def _write(self, taken: coordinator_pb2.ListSamplesResponse, *, is_held_out: bool) -> None:
        if self._file is not None:
            self._file.write(taken.step, taken.samples, is_held_out=is_held_out)

    async def _begun_of(self, step: int) -> coordinator_pb2.ListSamplesResponse | None:
        """What was begun for a step; None if nothing was, or a service was lost on the way."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        with contextlib.suppress(*_QUIET):
            samples = await begun
            return samples if samples.step == step else None
        return None

    async def _fetch(
        self, step: int, experience: ExperienceFuture
    ) -> coordinator_pb2.ListSamplesResponse:
        reference = await experience.result()
        async with asyncio.timeout(TIMEOUT_S):
            samples = await fetch_samples(self._channel, reference, self._num_rows)
        return coordinator_pb2.ListSamplesResponse(step=step, samples=samples)

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self._begun.cancel()
            self._begun = None

    def _channel(self, address: str) -> MeshChannel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, identity=self._identity)
        return self._channels[address]

    async def close(self) -> None:
        """Closes the channels."""
        self._drop_begun()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


def told_of(sample: coordinator_pb2.Sample) -> str:
    """A held-out sample as a line for the console; long texts are cut."""
    prompt, completion = sample.prompt, sample.completion
    if len(prompt) > _TOLD_CHARACTERS:
        prompt = "..." + prompt[-_TOLD_CHARACTERS:]
    if len(completion) > _TOLD_CHARACTERS:
        completion = completion[:_TOLD_CHARACTERS] + "..."
    expected = f", expected {sample.answer[:_TOLD_CHARACTERS]!r}" if sample.answer else ""
    return f"held-out sample: {prompt!r} -> {completion!r} (reward {sample.reward:.3f}{expected})"
