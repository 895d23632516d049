"""What clients of Tinker's protocol ask for, apart from how it travels."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.tinker.batches import batch_of
from rolemesh.coordinator.tinker.bodies import (
    AdamParams,
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    LoadWeights,
    SaveWeights,
)
from rolemesh.coordinator.tinker.downloads import Downloads
from rolemesh.coordinator.tinker.forms.forms import GradientCall, SampleCall, WireError
from rolemesh.coordinator.tinker.futures import Promises
from rolemesh.coordinator.tinker.models.actor_place import ActorPlace
from rolemesh.coordinator.tinker.models.fair_turns import Client
from rolemesh.coordinator.tinker.models.held_models import (
    HeldModel,
    HeldModels,
    Snapshot,
)
from rolemesh.coordinator.tinker.models.sampling import check_sample_call
from rolemesh.coordinator.tinker.own_losses import MOST_LOSSES, loss_of
from rolemesh.coordinator.tinker.sessions import Sessions, UnknownError
from rolemesh.coordinator.tinker.store import Saved, WeightStore
from rolemesh.coordinator.tinker.tenants import SESSION_S, Tenants

T = TypeVar("T")

CLONE_CALLS = 1_000_000_000
"""Calls of one copy of a sampling client: its numbers begin at a multiple."""


def sampling_group(sampler_id: str, clone: int) -> tuple[str, str, int]:
    """Names the calls of one copy of a sampling client."""
    return "sampler", sampler_id, clone


class TinkerServer:
    """Sessions, models and samplers of clients on one actor service. Owner: one asyncio loop.

    Calls of a model are made in the order of its client's numbers; all else is checked, and
    refused, when the call comes.
    """

    def __init__(
        self,
        place: ActorPlace,
        recipe: Recipe,
        folder: Path,
        *,
        name: str,
        places: int,
        longest: int,
        most_rank: int,
        trains_whole: bool = False,
        session_s: float = SESSION_S,
    ) -> None:
        """Prepares.

        Args:
            place: Of the actor service.
            recipe: Its section actor says what models are made of.
            folder: For saved weights.
            name: What clients call the base.
            places: Runs that the service takes.
            longest: Most tokens of a sequence.
            most_rank: Largest rank of an adapter.
            trains_whole: Whether clients train all weights, and no adapters.
            session_s: How long a session lasts whose client is silent.
        """
        self.name = name
        self.longest = longest
        self.tokenizer = str(Path(recipe.section("actor").model.path).absolute())  # type: ignore[attr-defined]
        self.promises = Promises()
        self.store = WeightStore(folder)
        self.sessions = Sessions(folder)
        self.downloads = Downloads()
        self.models = HeldModels(place, recipe, runs=places, longest=longest)
        self._most_rank = 0 if trains_whole else most_rank
        self._tenants = Tenants(self.sessions, self.models, self.store, session_s=session_s)

    async def __aenter__(self) -> TinkerServer:
        """Begins to look after sessions."""
        await self._tenants.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends all work."""
        await self._tenants.__aexit__()
        await self.promises.close()
        await self.models.close()

    async def finish(
        self, owner: str, session_id: str, status: Mapping[str, Any] | None = None
    ) -> None:
        """Ends a session with its models; what was saved stays.

        Args:
            owner: Whose it is.
            session_id: Its id.
            status: How it ended, as clients get it.

        Raises:
            UnknownError: There is none.
        """
        self.sessions.get(owner, session_id)
        await self._tenants.end(session_id, status)

    # --- models ---

    def create_model(self, owner: str, asked: CreateModel) -> str:
        """Promises a model; gives the promise's id."""
        session = self.sessions.get(owner, asked.session_id)
        self._check_base(asked.base_model)
        shape = asked.lora_config.shape(self._most_rank)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"

        async def work() -> dict[str, Any]:
            await self._tenants.create(session, model_id, shape, metadata=asked.user_metadata)
            return {"type": "create_model", "model_id": model_id}

        return self.promises.make(owner, work(), ("model", model_id))

    def model(self, owner: str, model_id: str) -> HeldModel:
        """A model of an owner; raises UnknownError."""
        held = self.models.by_id.get(model_id)
        if held is None or held.owner != owner:
            raise UnknownError(f"model {model_id!r}: there is none: create it, or load its weights")
        self.sessions.get(owner, held.session_id)
        held.used_at = time.time()
        return held

    async def refused(self, owner: str, model_id: str, seq_id: int) -> None:
        """Told that a call of a model was refused, so that the next one does not wait for it."""
        held = self.models.by_id.get(model_id)
        if held is not None and held.owner == owner:
            await held.turns.refused(seq_id)

    def unload(self, owner: str, model_id: str) -> str:
        """Promises the end of a model."""
        self.model(owner, model_id)

        async def work() -> dict[str, Any]:
            await self.models.unload(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return self.promises.make(owner, work())

    def gradient(self, owner: str, call: GradientCall) -> str:
        """Promises the loss of a call, and adds its gradient unless it is forward_only."""
        held = self.model(owner, call.model_id)
        session = self.sessions.get(owner, held.session_id)
        batch = batch_of(call, self.longest, session.losses)

        async def work() -> Any:
            return await held.turns.take(
                call.seq_id,
                lambda: self._fairly(
                    held,
                    batch.num_tokens,
                    lambda: held.trained.gradient(batch, forward_only=call.forward_only),
                ),
            )

        return self._in_turn(owner, held, call.seq_id, work())

    def create_loss(self, owner: str, asked: CreateCustomLoss) -> str:
        """Takes a loss for the calls of a session, and promises its id."""
        session = self.sessions.get(owner, asked.session_id)
        loss_id = f"{session.session_id}:loss:{asked.custom_loss_seq_id}"
        if len(session.losses) >= MOST_LOSSES and loss_id not in session.losses:
            raise WireError("session_id", session.session_id, f"it has {MOST_LOSSES} losses")
        session.losses[loss_id] = loss_of(asked)

        async def work() -> dict[str, Any]:
            return {"type": "create_custom_loss", "loss_id": loss_id}

        return self.promises.make(owner, work())

    def optim_step(self, owner: str, model_id: str, seq_id: int, params: AdamParams) -> str:
        """Promises a step of the optimizer."""
        held = self.model(owner, model_id)

        async def work() -> dict[str, Any]:
            metrics = await held.turns.take(
                seq_id, lambda: held.trained.step(params.learning_rate, params.numbers())
            )
            return {"metrics": metrics}

        return self._in_turn(owner, held, seq_id, work())

    # --- saved weights ---

    def save(self, owner: str, asked: SaveWeights) -> str:
        """Promises that weights are saved, for training or for samplers."""
        held = self.model(owner, asked.model_id)
        session = self.sessions.get(owner, held.session_id)
        seq = asked.sampling_session_seq_id
        sampler_id = None if seq is None else f"{session.session_id}:sample:{seq}"
        # No name that a client would give.
        unnamed = f"sampler-{session.session_id}-{seq}"
        name = asked.path if asked.path is not None else unnamed
        saved = Saved(
            run=held.model_id,
            kind=asked.kind_of_weights,
            name=name,
            base_model=self.name,
            rank=held.shape.rank,
            targets=held.shape.targets,
            seed=held.shape.seed,
            saved_at=time.time(),
            expires_at=None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds,
            user_metadata=asked.user_metadata or {},
            is_unnamed=sampler_id is not None,
        )
        self.store.check_name(saved)

        async def write() -> dict[str, Any]:
            # In its turn: a save before it may have the name, and a call that was sent again is
            # made once.
            new = self.store.reserve(
                owner, saved, overwrite=asked.overwrite or sampler_id is not None
            )
            version = held.trained.version
            # A load before it may have brought another one.
            shape = held.shape
            try:
                await held.trained.save(new, shape.files, with_state=saved.kind == "weights")
            except BaseException:
                self.store.give_up(new)
                raise
            self.store.commit(
                owner,
                replace(saved, rank=shape.rank, targets=shape.targets, seed=shape.seed),
                new,
            )
            _, folder = self.store.find(owner, saved.path)
            # One of weights that were written over.
            await self.models.drop_sampler(folder)
            if sampler_id is None:
                return {"type": asked.answer_type, "path": saved.path}
            self.sessions.add(session, sampler=sampler_id)
            session.snapshots[sampler_id] = Snapshot(
                folder=folder,
                shape=shape,
                model_id=held.model_id,
                version=version,
                path=saved.path,
                is_unnamed=True,
            )
            return {"type": asked.answer_type, "sampling_session_id": sampler_id}

        work = held.turns.take(asked.seq_id, write)
        return self._in_turn(owner, held, asked.seq_id, work)

    def load(self, owner: str, asked: LoadWeights, *, reader: str | None = None) -> str:
        """Promises a model with saved weights: a new one of a session, or one that there is.

        Args:
            owner: Whose the model is.
            asked: What is loaded.
            reader: The owner by whose right the weights are read; None: that of the model.
        """
        saved, folder = self._found(reader or owner, asked.path)
        if asked.optimizer and saved.kind != "weights":
            raise WireError("path", asked.path, "it has no optimizer: leave optimizer out")
        shape = saved.shape
        metadata = saved.user_metadata if asked.user_metadata is None else asked.user_metadata
        if asked.model_id is not None:
            held = self.model(owner, asked.model_id)
            session_id, model_id = held.session_id, held.model_id
        else:
            session_id = self.sessions.get(owner, asked.session_id or "").session_id
            model_id = f"{session_id}:train:{asked.model_seq_id}"

        async def work() -> dict[str, Any]:
            start = None if asked.optimizer else folder
            if asked.model_id is not None:
                held = self.model(owner, asked.model_id)
                await self.models.reload(held, shape, start)
            else:
                session = self.sessions.get(owner, session_id)
                held = await self._tenants.create(
                    session, model_id, shape, start=start, metadata=metadata
                )
            if asked.optimizer:
                await held.trained.load_state(folder)
            return {"type": "load_weights", "path": saved.path, "model_id": model_id}

        if asked.model_id is None:
            return self.promises.make(owner, work(), ("model", model_id))
        turns = self.model(owner, model_id).turns
        turns.begin_at(asked.seq_id)
        return self.promises.make(
            owner, turns.take(asked.seq_id, work), ("turn", model_id, asked.seq_id)
        )

    def copy(self, owner: str, asked: CopyWeights, *, reader: str) -> Saved:
        """Saved weights as those of another run, which cannot be trained.

        Args:
            owner: Of the copy.
            asked: What is copied, and where to.
            reader: The owner by whose right it is read.

        Raises:
            UnknownPathError: The reader has no such weights.
            UnknownError: There is no such session.
            WireError: That run has weights of this name.
        """
        if asked.session_id is not None:
            session = self.sessions.get(owner, asked.session_id)
        else:
            session = self.sessions.begin(owner, project_id=asked.destination_project_id)
        run = f"{session.session_id}:train:{asked.model_seq_id or 0}"
        expires_at = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
        try:
            copied = self.store.copy(
                owner, asked.source_path, run, reader=reader, expires_at=expires_at
            )
            self.sessions.add(session, run=run)
        finally:
            if asked.session_id is None:
                self.sessions.end(session.session_id)
        return copied

    # --- samples ---

    def create_sampler(
        self, owner: str, session_id: str, number: int, model_path: str | None, base: str | None
    ) -> str:
        """Begins a sampling session of saved weights, or of the base; gives its id."""
        session = self.sessions.get(owner, session_id)
        sampler_id = f"{session_id}:sample:{number}"
        session.snapshots[sampler_id] = self._snapshot(owner, model_path, base)
        self.sessions.add(session, sampler=sampler_id)
        return sampler_id

    def snapshot(self, owner: str, sampler_id: str) -> Snapshot:
        """What a sampling session samples; raises UnknownError."""
        session = self.sessions.get(owner, sampler_id.partition(":")[0])
        try:
            return session.snapshots[sampler_id]
        except KeyError:
            raise UnknownError(f"sampling session {sampler_id!r}: there is none") from None

    def sample(self, owner: str, call: SampleCall) -> str:
        """Promises samples."""
        check_sample_call(call, self.longest)
        if call.sampling_session_id is not None:
            snapshot = self.snapshot(owner, call.sampling_session_id)
        else:
            snapshot = self._snapshot(owner, call.model_path, call.base_model)
        key, seq_id = None, call.seq_id or 0
        if call.sampling_session_id is not None and call.seq_id is not None:
            key = ("sample", call.sampling_session_id, call.seq_id)
        group = sampling_group(call.sampling_session_id or "", seq_id // CLONE_CALLS)
        work = self._tenants.sample(owner, snapshot, call)
        return self.promises.make(owner, work, key, group=group)

    def join(self, owner: str, sampler_id: str) -> int:
        """Gives a copy of a sampling client its number: its calls are numbered behind it."""
        self.snapshot(owner, sampler_id)
        session = self.sessions.get(owner, sampler_id.partition(":")[0])
        session.clones[sampler_id] = session.clones.get(sampler_id, 0) + 1
        return session.clones[sampler_id]

    # --- parts ---

    async def _fairly(self, held: HeldModel, tokens: int, work: Callable[[], Awaitable[T]]) -> T:
        async with self.models.fair_turns.turn(Client(held.owner, held.session_id), tokens):
            return await work()

    def _in_turn(self, owner: str, held: HeldModel, seq_id: int, work: Any) -> str:
        key = ("turn", held.model_id, seq_id) if seq_id else None
        return self.promises.make(owner, work, key)

    def _snapshot(self, owner: str, path: str | None, base: str | None) -> Snapshot:
        if path is None:
            self._check_base(base or "")
            return Snapshot()
        saved, folder = self._found(owner, path)
        shape = saved.shape
        return Snapshot(folder=folder, shape=shape, path=path)

    def _found(self, owner: str, path: str) -> tuple[Saved, Path]:
        """Saved weights and their folder; refuses those of another base."""
        saved, folder = self.store.find(owner, path)
        if saved.base_model != self.name:
            raise WireError(
                "path",
                path,
                f"it has weights of {saved.base_model}, and this server has {self.name}: where "
                "that is the same model, start the server with --name",
            )
        if bool(saved.rank) != bool(self._most_rank):
            is_whole, has = (
                ("a whole model", "with") if not saved.rank else ("an adapter", "without")
            )
            raise WireError("path", path, f"it is {is_whole}: start the server {has} --whole")
        return saved, folder

    def _check_base(self, base: str) -> None:
        if base != self.name:
            raise WireError("base_model", base, f"this server has {self.name}")
