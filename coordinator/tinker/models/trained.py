"""A model that a client trains: weights and their optimizer, in a run of the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rolemesh.coordinator.sdk import AsyncMesh
from rolemesh.coordinator.sdk.async_role import AsyncRole
from rolemesh.coordinator.tinker.batches import GradientBatch, logprobs_of
from rolemesh.coordinator.tinker.forms.forms import GradientResult
from rolemesh.coordinator.tinker.models.actor_place import ROLE, ActorPlace
from rolemesh.rpc.errors import PreconditionError, RolemeshError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 3
"""How often an operation is made whose service was lost."""


@dataclass(slots=True)
class _Progress:
    """What a lost process is brought back to."""

    version: int = 0
    """Steps of the optimizer that the newest cut has; 0: none was made."""
    gradients: list[GradientBatch] = field(default_factory=list)
    """What was accumulated since, in order."""


class TrainedModel:
    """One run of the actor service. Owner: the server's loop; operations exclude each other.

    Invariant: after each operation the state is that of all operations so far, also where the
    service was killed within one: it goes back to the newest cut and makes again what followed.
    """

    def __init__(
        self,
        place: ActorPlace,
        run_id: str,
        spec: Mapping[str, Any],
        *,
        seed: int = 0,
        first_version: int = 0,
    ) -> None:
        """Prepares; `open` loads.

        Args:
            place: Of the service.
            run_id: The run's name at the service.
            spec: Section of the actor, with what the client trains.
            seed: Of its draws that have none of a client's.
            first_version: What its versions are counted from.
        """
        self.run_id = run_id
        self.lock = asyncio.Lock()
        """Held while the weights must stay, or change."""
        self._place = place
        self._address = place.address
        """Of the process that has the run."""
        self._spec = dict(spec)
        self._first_version = first_version
        self._mesh: AsyncMesh | None = None
        self._progress = _Progress()
        # What a client's seed draws depends on the weights alone; other draws differ by model.
        self._draws = seed % 2**20 * 2**40

    @property
    def version(self) -> int:
        """Number of the weights: grows with each step of the optimizer."""
        return self._first_version + self._progress.version

    @property
    def is_open(self) -> bool:
        """Whether it has a place at the service."""
        return self._mesh is not None

    @property
    def mesh(self) -> AsyncMesh:
        """Client of the run, of the process as it is now."""
        if self._mesh is None:
            raise RuntimeError(f"{self.run_id} is not open")
        return self._mesh

    @property
    def actor(self) -> AsyncRole:
        """The service."""
        return self.mesh[ROLE]

    async def open(self) -> None:
        """Loads it; raises a RolemeshError where they cannot be."""
        try:
            await self.making(self._initialized)
        except BaseException:
            # The service does not hold a run that it refused.
            if self._mesh is not None:
                await self._mesh.close()
                self._mesh = None
            raise

    async def close(self) -> None:
        """Gives its place at the service free, with its cuts."""
        async with self.lock:
            if self._mesh is None:
                return
            try:
                await self.actor.drop_cuts()
                await self.actor.drain()
            except RolemeshError as error:
                logger.warning("%s could not be ended: %s", self.run_id, error)
            await self._mesh.close()
            self._mesh = None

    async def gradient(self, batch: GradientBatch, *, forward_only: bool) -> GradientResult:
        """Log-probs of the targets, and the loss; adds the gradient unless forward_only."""

        async def work() -> GradientResult:
            try:
                result = await self._gradient(batch, forward_only=forward_only)
            except RolemeshError as error:
                if not forward_only and not _is_loss(error):
                    await self._accumulate_again()
                raise
            if not forward_only:
                self._progress.gradients.append(batch)
            return result

        async with self.lock:
            return await self.making(work)

    async def step(self, learning_rate: float, adamw: Mapping[str, float]) -> dict[str, float]:
        """Applies the gradients."""

        async def work() -> dict[str, float]:
            try:
                update = await self.actor.optim_step(learning_rate=learning_rate, adamw=adamw)
            except RolemeshError as error:
                if error.reason == "LOSS_NOT_FINITE":
                    # The service has dropped them.
                    self._progress.gradients.clear()
                raise
            self.mesh.begin_step(self._progress.version + 1)
            await self.actor.save_cut()
            self._progress = _Progress(self._progress.version + 1)
            return dict(update.report.metrics)

        async with self.lock:
            return await self.making(work)

    async def save(self, folder: Path, name: str, *, with_state: bool) -> None:
        """Writes weights as others load them, and with_state all that training goes on from.

        Args:
            folder: Of what is saved.
            name: Of the weights' folder in it: an adapter in PEFT's format, or a whole model.
            with_state: Whether training can go on from it.

        Raises:
            PreconditionError: Gradients wait for a step, and with_state would not have them.
        """

        async def work() -> None:
            if with_state and self._progress.gradients:
                raise PreconditionError(
                    "gradients are accumulated, and saved weights would not have them: call "
                    "optim_step before save_state"
                )
            if with_state:
                await self.actor.save_state(str(folder / "state"))
            await self.actor.export(str(folder / name))

        async with self.lock:
            await self.making(work)

    async def load_state(self, folder: Path) -> None:
        """Takes weights and optimizer of what `save` wrote with_state."""

        async def work() -> None:
            await self.actor.load_state(str(folder / "state"))
            self.mesh.begin_step(self._progress.version + 1)
            await self.actor.save_cut()
            self._progress = _Progress(self._progress.version + 1)

        async with self.lock:
            await self.making(work)

    def next_draw(self) -> int:
        """A number that no sampling of this model had before."""
        self._draws += 1
        return self._draws

    async def making(self, work: Callable[[], Awaitable[T]]) -> T:
        """What a piece of work gives, made again where the service was lost within it."""
        is_lost = False
        for number in range(_TRIES):
            try:
                if is_lost:
                    await self._recover()
                return await work()
            except RolemeshError as error:
                if not _is_loss(error) or number == _TRIES - 1:
                    raise
                logger.warning("%s: the service was lost (%s); going back", self.run_id, error)
                is_lost = True
        raise AssertionError

    async def _initialized(self) -> None:
        if self._mesh is not None:
            await self._mesh.close()
        self._mesh = self._place.mesh(self.run_id)
        self._address = self._place.address
        await self.actor.initialize(self._spec, 0)

    async def _recover(self) -> None:
        """Brings a new process to where the lost one was."""
        await self._place.restored(self._address)
        await self._initialized()
        progress = self._progress
        self.mesh.begin_step(progress.version)
        if progress.version:
            await self.actor.restore_cut(progress.version)
        for batch in progress.gradients:
            await self._gradient(batch, forward_only=False)

    async def _accumulate_again(self) -> None:
        """Has the service accumulate what came before a call that failed, which may be dropped."""
        progress = self._progress
        if not progress.gradients:
            return
        if progress.version:
            await self.actor.restore_cut(progress.version)
        else:
            await self.actor.drain()
            await self._initialized()
        for batch in progress.gradients:
            await self._gradient(batch, forward_only=False)

    async def _gradient(self, batch: GradientBatch, *, forward_only: bool) -> GradientResult:
        rows = await self.actor.put(batch.columns)
        try:
            made = await self.actor.forward_backward(
                rows, batch.loss, without_gradients=forward_only
            )
            outputs = await self.mesh.fetch(made.outputs, [batch.reads])
        finally:
            await self.mesh.release([rows])
        await self.mesh.release([made.outputs])
        told = made.report.metrics
        own = {
            name: told[name] / (batch.num_data if name.endswith(":mean") else 1)
            for name in batch.metrics
        }
        return GradientResult(
            logprobs=logprobs_of(batch, outputs),
            metrics={"loss:sum": told["loss"], **own},
        )


def _is_loss(error: RolemeshError) -> bool:
    """Whether the process has ended, or a new one stands in its place that knows of nothing."""
    if isinstance(error, UnavailableError):
        return True
    return isinstance(error, PreconditionError) and error.reason in (
        "NOT_INITIALIZED",
        "RUN_MISMATCH",
    )
