"""Which models hold the places of the actor service: those that clients train, and samplers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.tinker.forms.forms import SampleCall, SampleResult
from rolemesh.coordinator.tinker.models.actor_place import ActorPlace, actor_spec
from rolemesh.coordinator.tinker.models.fair_turns import Client, FairTurns
from rolemesh.coordinator.tinker.models.sampling import Sampling, WeightsMovedError
from rolemesh.coordinator.tinker.models.trained import TrainedModel
from rolemesh.coordinator.tinker.models.turns import Turns
from rolemesh.coordinator.tinker.shapes import ModelShape

_BASE = ModelShape(rank=1, seed=0)
"""An adapter that was never trained adds nothing: it samples as the base does."""

_FIRST_SAMPLER = 2**19
"""Seeds of samplers' draws count from here, so that a sampler draws as no other and no model."""


class NoPlaceError(RuntimeError):
    """All places of the service are taken."""


@dataclass(eq=False)
class HeldModel:
    """A model of a client."""

    model_id: str
    session_id: str
    owner: str
    shape: ModelShape
    trained: TrainedModel
    sampling: Sampling
    metadata: Mapping[str, str] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    used_at: float = field(default_factory=time.time)
    """Unix seconds of the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights that samples are drawn from."""

    folder: Path | None = None
    """Of what was saved; None: the base."""
    shape: ModelShape = _BASE
    model_id: str = ""
    """The model that had them; empty: none that is known."""
    version: int = -1
    """Its version then."""
    path: str = ""
    """Tinker path."""
    is_unnamed: bool = False
    """Whether the folder is there for one sampling session alone."""


@dataclass(eq=False)
class _Sampler:
    model: TrainedModel
    sampling: Sampling
    users: int = 0
    used_at: float = 0.0


class HeldModels:
    """Gives places of the actor service to models and samplers. Owner: the server's loop.

    A snapshot is sampled by the model that has these weights still, else by a sampler that loads
    them; the sampler that was unused for longest gives way to another one, or to a model.
    """

    def __init__(self, place: ActorPlace, recipe: Recipe, *, runs: int, longest: int) -> None:
        """Prepares.

        Args:
            place: Of the service.
            recipe: Its section actor says what each model is made of.
            runs: Places of the service.
            longest: Most tokens of prompt and sample together.
        """
        self.by_id: dict[str, HeldModel] = {}
        self.fair_turns = FairTurns()
        """Of calls that compute."""
        self._place = place
        self._recipe = recipe
        self._runs = runs
        self._longest = longest
        self._samplers: dict[Path | None, _Sampler] = {}
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()

    async def create(
        self,
        model_id: str,
        session_id: str,
        owner: str,
        shape: ModelShape,
        *,
        start: Path | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> HeldModel:
        """Loads a model for a client.

        Args:
            model_id: Its id.
            session_id: Of the session that it ends with.
            owner: Whose it is.
            shape: What of it is trained.
            start: Folder of what was saved, whose weights it begins with; None: of nothing.
            metadata: What the client says of it.

        Raises:
            NoPlaceError: There is no place, and no sampler that could give way.
            RolemeshError: The service refuses it.
        """
        async with self._opening:
            await self._make_room()
            trained = self._new(model_id, shape.changes(start), seed=shape.seed)
            await trained.open()
            held = HeldModel(
                model_id=model_id,
                session_id=session_id,
                owner=owner,
                shape=shape,
                trained=trained,
                sampling=Sampling(trained, self._longest, self.fair_turns),
                metadata=dict(metadata or {}),
            )
            self.by_id[model_id] = held
            return held

    async def reload(self, held: HeldModel, shape: ModelShape, start: Path | None) -> None:
        """Has a model begin anew, with other weights in its place; see `create`.

        Its later operations wait for their turns with `held`, whose parts are replaced.
        """
        async with self._opening:
            # Snapshots of the old weights are none of the new ones.
            version = held.trained.version + 1
            await held.trained.close()
            trained = self._new(
                held.model_id, shape.changes(start), seed=shape.seed, first_version=version
            )
            try:
                await trained.open()
            except BaseException:
                self.by_id.pop(held.model_id, None)
                raise
            held.shape, held.trained = shape, trained
            held.sampling = Sampling(trained, self._longest, self.fair_turns)

    async def unload(self, model_id: str) -> None:
        """Ends a model; what was saved of it stays."""
        held = self.by_id.get(model_id)
        if held is not None:
            # Its place is free once it has ended, and not before.
            async with self._opening:
                self.by_id.pop(model_id, None)
                await held.trained.close()

    async def sample(self, snapshot: Snapshot, call: SampleCall, client: Client) -> SampleResult:
        """Samples of a snapshot, for a client.

        Raises:
            NoPlaceError: Nothing that could sample has a place.
            RolemeshError: The service refuses the call.
        """
        while True:
            held = self.by_id.get(snapshot.model_id)
            is_there = held is not None and held.trained.is_open
            if held is not None and is_there and held.trained.version == snapshot.version:
                try:
                    return await held.sampling.sample(call, snapshot.version, client)
                except WeightsMovedError:
                    continue
            sampler = await self._sampler(snapshot)
            sampler.users += 1
            try:
                return await sampler.sampling.sample(call, 0, client)
            except WeightsMovedError:
                continue
            finally:
                sampler.users -= 1
                sampler.used_at = time.monotonic()

    async def drop_sampler(self, folder: Path) -> None:
        """Gives a sampler's place free; samples that it is at are still drawn."""
        async with self._opening:
            sampler = self._samplers.pop(folder, None)
            if sampler is not None:
                await sampler.model.close()

    async def close(self) -> None:
        """Ends all of them."""
        models = [one.trained for one in self.by_id.values()]
        models += [one.model for one in self._samplers.values()]
        await asyncio.gather(*(model.close() for model in models), return_exceptions=True)

    async def _sampler(self, snapshot: Snapshot) -> _Sampler:
        async with self._opening:
            known = self._samplers.get(snapshot.folder)
            if known is not None:
                return known
            await self._make_room()
            changes = snapshot.shape.changes(snapshot.folder)
            number = next(self._numbers)
            model = self._new(f"sampler-{number}", changes, seed=_FIRST_SAMPLER + number)
            await model.open()
            sampler = _Sampler(
                model, Sampling(model, self._longest, self.fair_turns), used_at=time.monotonic()
            )
            self._samplers[snapshot.folder] = sampler
            return sampler

    def _new(
        self, name: str, changes: Mapping[str, Any], *, seed: int, first_version: int = 0
    ) -> TrainedModel:
        return TrainedModel(
            self._place,
            f"tinker-{name}",
            actor_spec(self._recipe, changes),
            seed=seed,
            first_version=first_version,
        )

    async def _make_room(self) -> None:
        """Has a place be free."""
        if len(self.by_id) + len(self._samplers) < self._runs:
            return
        idle = [(one.used_at, folder) for folder, one in self._samplers.items() if not one.users]
        if not idle:
            raise NoPlaceError(
                f"all {self._runs} places are taken by {len(self.by_id)} models and "
                f"{len(self._samplers)} samplers: close a client, or start the server with more "
                "--places"
            )
        _, folder = min(idle, key=lambda one: one[0])
        await self._samplers.pop(folder).model.close()
