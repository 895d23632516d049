"""Saved weights of clients: folders by their tinker paths, with what is known of them.

    FOLDER/weights/<owner>/<run>/<kind>/<name>/{adapter or model, state, about.json}

A run's id has characters that no folder has, so they stand quoted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.shapes import ModelShape

Kind = Literal["weights", "sampler_weights", "external_weights"]
_TYPES: Mapping[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""What clients call each kind. Weights alone have what training goes on from; the others are the
same files."""
_PATH = re.compile(rf"tinker://([^/]+)/({'|'.join(_TYPES)})/([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})")
_ABOUT = "about.json"


class UnknownPathError(LookupError):
    """There are no such weights, or they are another owner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Weights that were saved."""

    run: str
    """The model's id."""
    kind: Kind
    name: str
    base_model: str
    rank: int
    """Of the adapter; 0: it is a whole model."""
    targets: tuple[str, ...] | None
    seed: int
    saved_at: float
    """Unix seconds."""
    is_public: bool = False
    """Whether other owners may load them."""
    expires_at: float | None = None
    """Unix seconds; None: never."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    is_unnamed: bool = False
    """Whether it is there for a sampling session alone: it is not listed, and ends with that."""

    @property
    def shape(self) -> ModelShape:
        """What of the model was trained."""
        return ModelShape(rank=self.rank, seed=self.seed, targets=self.targets)

    @property
    def path(self) -> str:
        """By which clients know them."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def message(self, num_bytes: int) -> dict[str, Any]:
        """As a client gets it in a list."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": iso_time(self.saved_at),
            "tinker_path": self.path,
            "size_bytes": num_bytes,
            "public": self.is_public,
            "expires_at": None if self.expires_at is None else iso_time(self.expires_at),
            "user_metadata": dict(self.user_metadata) or None,
        }


def iso_time(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class WeightStore:
    """Folders of saved weights. Owner: the server's loop; what it writes is whole or absent."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, which need not exist yet."""
        self._root = folder / "weights"

    @staticmethod
    def check_name(saved: Saved) -> None:
        """Refuses a name that no folder can have, with a WireError."""
        if not _PATH.fullmatch(saved.path):
            raise WireError("path", saved.name, "give letters, digits, '.', '_' and '-'")

    def reserve(self, owner: str, saved: Saved, *, overwrite: bool = False) -> Path:
        """A folder to write to, beside the one that it will be; `commit` makes it that.

        Raises:
            WireError: The name cannot be, or is taken.
        """
        self.check_name(saved)
        place = self._folder(owner, saved)
        if _read(place) is not None and not overwrite:
            raise WireError("path", saved.name, "it is saved already: give another name")
        new = place.with_name(f".{place.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        return new

    def commit(self, owner: str, saved: Saved, new: Path) -> Saved:
        """Gives what was written its name."""
        (new / _ABOUT).write_text(json.dumps(asdict(saved)))
        place = self._folder(owner, saved)
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
        return saved

    @staticmethod
    def give_up(new: Path) -> None:
        """Removes a reserved folder that was not written whole."""
        shutil.rmtree(new, ignore_errors=True)

    def find(self, owner: str, path: str) -> tuple[Saved, Path]:
        """Weights of an owner, or public ones, and their folder.

        Raises:
            UnknownPathError: There are none.
        """
        match = _PATH.fullmatch(path)
        if match is not None:
            run, kind, name = match.groups()
            for place in self._places(run, kind, name, owner):
                saved = _read(place)
                if saved is not None and (
                    saved.is_public or place.parents[2].name == quoted(owner)
                ):
                    return saved, place
        raise UnknownPathError(f"{path}: there are no such weights, or they have expired")

    def of(self, owner: str, run: str | None = None) -> Iterator[tuple[Saved, Path]]:
        """All weights of an owner, the newest first; or those of one model."""
        found = []
        for place in (self._root / quoted(owner)).glob("*/*/*"):
            saved = _read(place)
            if saved is not None and not saved.is_unnamed and run in (None, saved.run):
                found.append((saved, place))
        yield from sorted(found, key=lambda one: -one[0].saved_at)

    def change(self, owner: str, path: str, **fields: Any) -> Saved:
        """Changes what is known of an owner's weights; raises UnknownPathError."""
        saved, place = self._own(owner, path)
        changed = replace(saved, **fields)
        new = place / f".{_ABOUT}"
        new.write_text(json.dumps(asdict(changed)))
        new.replace(place / _ABOUT)
        return changed

    def copy(
        self, owner: str, path: str, run: str, *, reader: str, expires_at: float | None
    ) -> Saved:
        """Has another run have the same weights; no file is there twice where links can be.

        Args:
            owner: Of the copy.
            path: Of what is copied.
            run: The copy's.
            reader: By whose right it is read.
            expires_at: Unix seconds; None: never.

        Raises:
            UnknownPathError: The reader has no such weights.
        """
        saved, place = self.find(reader, path)
        copied = replace(
            saved, run=run, saved_at=time.time(), expires_at=expires_at, is_public=False
        )
        new = self.reserve(owner, copied)
        try:
            shutil.copytree(place, new, copy_function=_linked, dirs_exist_ok=True)
            # A link: what is written to it would be written to the other one.
            (new / _ABOUT).unlink()
            return self.commit(owner, copied, new)
        except BaseException:
            self.give_up(new)
            raise

    def remove(self, owner: str, path: str) -> None:
        """Removes an owner's weights; raises UnknownPathError."""
        shutil.rmtree(self._own(owner, path)[1])

    def sweep(self, *, with_unnamed: bool = False) -> None:
        """Removes what has expired; with_unnamed also what an earlier one left half or unnamed."""
        if with_unnamed:
            for new in self._root.glob("*/*/*/.*.new"):
                self.give_up(new)
        for about in self._root.glob(f"*/*/*/*/{_ABOUT}"):
            saved = _read(about.parent)
            if saved is None or (with_unnamed and saved.is_unnamed):
                shutil.rmtree(about.parent, ignore_errors=True)

    def _own(self, owner: str, path: str) -> tuple[Saved, Path]:
        saved, place = self.find(owner, path)
        if place.parents[2].name != quoted(owner):
            raise UnknownPathError(f"{path}: these weights are another owner's")
        return saved, place

    def _places(self, run: str, kind: str, name: str, owner: str) -> Iterator[Path]:
        own = self._root / quoted(owner) / quoted(run) / kind / name
        yield own
        yield from (
            place for place in self._root.glob(f"*/{quoted(run)}/{kind}/{name}") if place != own
        )

    def _folder(self, owner: str, saved: Saved) -> Path:
        return self._root / quoted(owner) / quoted(saved.run) / saved.kind / saved.name


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def quoted(text: str) -> str:
    """As a name of a folder: nothing of a client leads out of it."""
    return urllib.parse.quote(text, safe="").replace(".", "%2E")


def _read(place: Path) -> Saved | None:
    """What is known of the weights in a folder; None where there are none, or no more."""
    try:
        fields = json.loads((place / _ABOUT).read_text())
    except FileNotFoundError:
        return None
    targets = fields.pop("targets")
    saved = Saved(**fields, targets=None if targets is None else tuple(targets))
    if saved.expires_at is not None and saved.expires_at <= time.time():
        return None
    return saved
