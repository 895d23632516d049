"""What clients of Tinker's protocol ask for, apart from how it travels."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.tinker.actor_place import ActorPlace
from rolemesh.coordinator.tinker.batches import batch_of
from rolemesh.coordinator.tinker.bodies import AdamParams, CreateModel, LoadWeights, SaveWeights
from rolemesh.coordinator.tinker.forms import GradientCall, SampleCall, WireError
from rolemesh.coordinator.tinker.futures import Promises
from rolemesh.coordinator.tinker.held_models import HeldModel, HeldModels, Snapshot
from rolemesh.coordinator.tinker.sampling import check_sample_call
from rolemesh.coordinator.tinker.store import Saved, UnknownPathError, WeightStore
from rolemesh.coordinator.tinker.trained import AdapterShape

SESSION_S = 300.0
"""A session whose client was silent for so long ends, with its models. Clients tell every 10 s."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class UnknownError(LookupError):
    """There is no such session, model or sampler, or it is another owner's."""


@dataclass(slots=True, eq=False)
class Session:
    """A client's session."""

    session_id: str
    owner: str
    heard_at: float = field(default_factory=time.monotonic)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    """Of its sampling sessions, by their ids."""


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
            session_s: How long a session lasts whose client is silent.
        """
        self.name = name
        self.longest = longest
        self.tokenizer = str(Path(recipe.section("actor").model.path).absolute())  # type: ignore[attr-defined]
        self.promises = Promises()
        self.store = WeightStore(folder)
        self.models = HeldModels(place, recipe, runs=places, longest=longest)
        self._most_rank = most_rank
        self._session_s = session_s
        self._sessions: dict[str, Session] = {}
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TinkerServer:
        """Begins to look after sessions."""
        self.store.sweep(with_unnamed=True)
        self._watch = asyncio.create_task(self._end_silent())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends all work."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.promises.close()
        await self.models.close()

    # --- sessions ---

    def create_session(self, owner: str) -> str:
        """Begins a session, and gives its id."""
        session = Session(secrets.token_hex(8), owner)
        self._sessions[session.session_id] = session
        return session.session_id

    def heard(self, owner: str, session_id: str) -> None:
        """Told that a client is there."""
        self._session(owner, session_id)

    async def finish(self, owner: str, session_id: str) -> None:
        """Ends a session with its models; what was saved stays."""
        self._session(owner, session_id)
        await self._end(session_id)

    # --- models ---

    def create_model(self, owner: str, asked: CreateModel) -> str:
        """Promises a model; gives the promise's id."""
        session = self._session(owner, asked.session_id)
        self._check_base(asked.base_model)
        shape = self._shape(asked)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"

        async def work() -> dict[str, Any]:
            held = await self.models.create(
                model_id, session.session_id, owner, shape, metadata=asked.user_metadata
            )
            await self._keep(held)
            return {"type": "create_model", "model_id": model_id}

        return self.promises.make(owner, work(), ("model", model_id))

    def model(self, owner: str, model_id: str) -> HeldModel:
        """A model of an owner; raises UnknownError."""
        held = self.models.by_id.get(model_id)
        if held is None or held.owner != owner:
            raise UnknownError(f"model {model_id!r}: there is none: create it, or load its weights")
        self._session(owner, held.session_id)
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
        batch = batch_of(call, self.longest)

        async def work() -> Any:
            return await held.turns.take(
                call.seq_id,
                lambda: held.trained.gradient(batch, forward_only=call.forward_only),
            )

        return self._in_turn(owner, held, call.seq_id, work())

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
        session = self._session(owner, held.session_id)
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
            try:
                await held.trained.save(new, with_state=saved.kind == "weights")
            except BaseException:
                self.store.give_up(new)
                raise
            # A load before it may have brought an adapter of another shape.
            shape = held.shape
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

    def load(self, owner: str, asked: LoadWeights) -> str:
        """Promises a model with saved weights: a new one of a session, or one that there is."""
        saved, folder = self._found(owner, asked.path)
        if asked.optimizer and saved.kind != "weights":
            raise WireError("path", asked.path, "it has no optimizer: leave optimizer out")
        shape = AdapterShape(rank=saved.rank, seed=saved.seed, targets=saved.targets)
        metadata = saved.user_metadata if asked.user_metadata is None else asked.user_metadata
        if asked.model_id is not None:
            held = self.model(owner, asked.model_id)
            session_id, model_id = held.session_id, held.model_id
        else:
            session_id = self._session(owner, asked.session_id or "").session_id
            model_id = f"{session_id}:train:{asked.model_seq_id}"

        async def work() -> dict[str, Any]:
            start = None if asked.optimizer else folder / "adapter"
            if asked.model_id is not None:
                held = self.model(owner, asked.model_id)
                await self.models.reload(held, shape, start)
            else:
                held = await self.models.create(
                    model_id, session_id, owner, shape, start=start, metadata=metadata
                )
                await self._keep(held)
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

    # --- samples ---

    def create_sampler(
        self, owner: str, session_id: str, number: int, model_path: str | None, base: str | None
    ) -> str:
        """Begins a sampling session of saved weights, or of the base; gives its id."""
        session = self._session(owner, session_id)
        sampler_id = f"{session_id}:sample:{number}"
        session.snapshots[sampler_id] = self._snapshot(owner, model_path, base)
        return sampler_id

    def snapshot(self, owner: str, sampler_id: str) -> Snapshot:
        """What a sampling session samples; raises UnknownError."""
        session = self._session(owner, sampler_id.partition(":")[0])
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
        key = None
        if call.sampling_session_id is not None and call.seq_id is not None:
            key = ("sample", call.sampling_session_id, call.seq_id)
        return self.promises.make(owner, self.models.sample(snapshot, call), key)

    # --- parts ---

    def _in_turn(self, owner: str, held: HeldModel, seq_id: int, work: Any) -> str:
        key = ("turn", held.model_id, seq_id) if seq_id else None
        return self.promises.make(owner, work, key)

    def _snapshot(self, owner: str, path: str | None, base: str | None) -> Snapshot:
        if path is None:
            self._check_base(base or "")
            return Snapshot()
        saved, folder = self._found(owner, path)
        shape = AdapterShape(rank=saved.rank, seed=saved.seed, targets=saved.targets)
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
        return saved, folder

    def _check_base(self, base: str) -> None:
        if base != self.name:
            raise WireError("base_model", base, f"this server has {self.name}")

    def _shape(self, asked: CreateModel) -> AdapterShape:
        lora = asked.lora_config
        if lora.rank > self._most_rank:
            raise WireError(
                "lora_config.rank", lora.rank, f"this server takes {self._most_rank} at most"
            )
        targets = (*(_ATTENTION if lora.train_attn else ()), *(_MLP if lora.train_mlp else ()))
        if not targets:
            raise WireError(
                "lora_config", "train_attn and train_mlp are false", "one of them must be true"
            )
        return AdapterShape(
            rank=lora.rank,
            seed=lora.seed or 0,
            targets=None if lora.train_attn and lora.train_mlp else targets,
        )

    def _session(self, owner: str, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownError(f"session {session_id!r}: there is none, or it has ended")
        session.heard_at = time.monotonic()
        return session

    async def _keep(self, held: HeldModel) -> None:
        """Ends a model again whose session ended while it was loaded."""
        if held.session_id not in self._sessions:
            await self.models.unload(held.model_id)
            raise WireError("session_id", held.session_id, "it has ended: begin another one")

    async def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        for held in list(self.models.by_id.values()):
            if held.session_id == session_id:
                await self.models.unload(held.model_id)
        if session is None:
            return
        # Weights that were there for a sampling session alone.
        for snapshot in session.snapshots.values():
            if snapshot.is_unnamed and snapshot.folder is not None:
                await self.models.drop_sampler(snapshot.folder)
                with contextlib.suppress(UnknownPathError):
                    self.store.remove(session.owner, snapshot.path)

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(self._session_s / 10)
            old = time.monotonic() - self._session_s
            for session in list(self._sessions.values()):
                if session.heard_at < old:
                    await self._end(session.session_id)
            self.store.sweep()
