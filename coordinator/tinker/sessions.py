"""Sessions of clients: those that are there, and a record of each one, which stays.

FOLDER/sessions/<owner>/<session>.json
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rolemesh.coordinator.tinker.models.held_models import Snapshot
from rolemesh.coordinator.tinker.own_losses import OwnLoss
from rolemesh.coordinator.tinker.store import quoted

MOST_RECORDS = 1000
"""Records of an owner that are kept, the newest."""

_ACTIVE: Mapping[str, Any] = {"type": "active"}


class UnknownError(LookupError):
    """There is no such session, model or sampler, or it is another owner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a session, also after its end."""

    session_id: str
    owner: str
    created_at: float
    """Unix seconds."""
    display_name: str | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    project_id: str | None = None
    """A label that its client gave it."""
    runs: tuple[str, ...] = ()
    """Ids of its models."""
    samplers: tuple[str, ...] = ()
    """Ids of its sampling sessions."""
    status: Mapping[str, Any] | None = None
    """As clients know it; None: it has ended, and its client did not say how."""


@dataclass(slots=True, eq=False)
class Session:
    """A session that is there."""

    record: Record
    heard_at: float = field(default_factory=time.monotonic)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    """Of its sampling sessions, by their ids."""
    losses: dict[str, OwnLoss] = field(default_factory=dict)
    """Losses that its client brought, by their ids."""
    clones: dict[str, int] = field(default_factory=dict)
    """Copies of its sampling clients that have joined, by sampling session."""

    @property
    def session_id(self) -> str:
        """Its id."""
        return self.record.session_id

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.record.owner


class Sessions:
    """All sessions of a server. Owner: the server's loop."""

    def __init__(self, folder: Path) -> None:
        """Takes the server's folder, which need not exist yet."""
        self._root = folder / "sessions"
        self._live: dict[str, Session] = {}

    def begin(self, owner: str, **fields: Any) -> Session:
        """Begins a session; fields are those of its `Record`."""
        record = Record(
            session_id=secrets.token_hex(8),
            owner=owner,
            created_at=time.time(),
            status=_ACTIVE,
            **fields,
        )
        session = Session(record)
        self._live[record.session_id] = session
        self._write(record)
        return session

    def get(self, owner: str, session_id: str) -> Session:
        """A session that is there, whose client is heard by that; raises UnknownError."""
        session = self._live.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownError(f"session {session_id!r}: there is none, or it has ended")
        session.heard_at = time.monotonic()
        return session

    def has(self, session_id: str) -> bool:
        """Whether a session is there."""
        return session_id in self._live

    def silent(self, seconds: float) -> list[Session]:
        """Sessions whose clients were not heard for so long, the longest first."""
        old = time.monotonic() - seconds
        found = [one for one in self._live.values() if one.heard_at < old]
        return sorted(found, key=lambda one: one.heard_at)

    def add(self, session: Session, *, run: str | None = None, sampler: str | None = None) -> None:
        """Notes a model or a sampling session of a session."""
        record = session.record
        runs = dict.fromkeys([*record.runs, *([] if run is None else [run])])
        samplers = dict.fromkeys([*record.samplers, *([] if sampler is None else [sampler])])
        self._change(session, runs=tuple(runs), samplers=tuple(samplers))

    def end(self, session_id: str, status: Mapping[str, Any] | None = None) -> Session | None:
        """Ends a session; None where it is not there."""
        session = self._live.pop(session_id, None)
        if session is not None:
            self._change(session, status=status)
        return session

    def move(self, owner: str, session_id: str, project_id: str) -> None:
        """Gives a session another label, also one that has ended; raises UnknownError."""
        session = self._live.get(session_id)
        if session is not None and session.owner == owner:
            self._change(session, project_id=project_id)
        else:
            self._write(replace(self.record(owner, session_id), project_id=project_id))

    def record(self, owner: str, session_id: str) -> Record:
        """What is known of a session; raises UnknownError."""
        try:
            return self._known(_read(self._place(owner, session_id)))
        except FileNotFoundError:
            raise UnknownError(f"session {session_id!r}: there is none") from None

    def records(self, owner: str) -> list[Record]:
        """Of all sessions of an owner, the newest first."""
        places = (self._root / quoted(owner)).glob("*.json")
        found = [self._known(_read(place)) for place in places]
        return sorted(found, key=lambda one: (-one.created_at, one.session_id))

    def sweep(self) -> None:
        """Removes records beyond those that are kept."""
        for folder in self._root.glob("*"):
            files = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime)
            for old in files[:-MOST_RECORDS]:
                old.unlink()

    def _known(self, record: Record) -> Record:
        """Of one that was active when its server was killed nothing is known."""
        is_over = record.status == _ACTIVE and record.session_id not in self._live
        return replace(record, status=None) if is_over else record

    def _change(self, session: Session, **fields: Any) -> None:
        session.record = replace(session.record, **fields)
        self._write(session.record)

    def _place(self, owner: str, session_id: str) -> Path:
        return self._root / quoted(owner) / f"{quoted(session_id)}.json"

    def _write(self, record: Record) -> None:
        place = self._place(record.owner, record.session_id)
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_suffix(".new")
        new.write_text(json.dumps(asdict(record)))
        new.replace(place)


def _read(place: Path) -> Record:
    fields = json.loads(place.read_text())
    fields |= {name: tuple(fields[name]) for name in ("runs", "samplers")}
    return Record(**fields)
