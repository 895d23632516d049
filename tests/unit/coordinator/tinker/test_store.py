"""Folders of saved weights, by tinker paths."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.store import Saved, UnknownPathError, WeightStore, iso_time

RUN = "5e55:train:0"


def saved(name: str = "one", **fields: Any) -> Saved:
    given: dict[str, Any] = {
        "run": RUN,
        "kind": "weights",
        "name": name,
        "base_model": "tiny",
        "rank": 4,
        "targets": ("q_proj", "v_proj"),
        "seed": 1,
        "saved_at": 1000.0,
    }
    return Saved(**{**given, **fields})


def write(store: WeightStore, owner: str, about: Saved, text: str = "", **how: Any) -> Saved:
    """Saves weights that are a text."""
    new = store.reserve(owner, about, **how)
    (new / "adapter").write_text(text)
    return store.commit(owner, about, new)


def text(store: WeightStore, owner: str, path: str) -> str:
    return (store.find(owner, path)[1] / "adapter").read_text()


def files(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*")}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path)


def test_what_was_saved_is_found_as_it_was(store: WeightStore, tmp_path: Path) -> None:
    about = saved(user_metadata={"a": "b"}, expires_at=time.time() + 60)
    write(store, "ann", about, "weights")
    assert about.path == "tinker://5e55:train:0/weights/one"
    found, folder = store.find("ann", about.path)
    assert found == about
    assert (folder / "adapter").read_text() == "weights"
    # Another server on the same folder finds it, too.
    assert WeightStore(tmp_path).find("ann", about.path)[0] == about


def test_what_was_not_committed_is_not_there(store: WeightStore) -> None:
    about = saved()
    new = store.reserve("ann", about)
    (new / "adapter").write_text("half")
    with pytest.raises(UnknownPathError):
        store.find("ann", about.path)
    assert list(store.of("ann")) == []
    # What a save that failed has left is in nobody's way.
    write(store, "ann", about, "whole")
    assert text(store, "ann", about.path) == "whole"
    assert [one.name for one, _ in store.of("ann")] == ["one"]


def test_a_name_is_written_over_only_where_that_is_asked(store: WeightStore) -> None:
    write(store, "ann", saved(), "first")
    with pytest.raises(WireError, match="path: one: it is saved already: give another name"):
        store.reserve("ann", saved())
    assert text(store, "ann", saved().path) == "first"
    write(store, "ann", saved(rank=8), "second", overwrite=True)
    assert text(store, "ann", saved().path) == "second"
    assert store.find("ann", saved().path)[0].rank == 8
    # The same name of another kind, model or owner is another one.
    for owner, other in (
        ("ann", saved(kind="sampler_weights")),
        ("ann", saved(run="5e55:train:1")),
        ("bob", saved()),
    ):
        write(store, owner, other, "other")
    assert text(store, "ann", saved().path) == "second"


def test_the_old_weights_stay_until_the_new_ones_are_whole(store: WeightStore) -> None:
    write(store, "ann", saved(), "first")
    (store.reserve("ann", saved(), overwrite=True) / "adapter").write_text("half")
    assert text(store, "ann", saved().path) == "first"


def test_another_owner_sees_what_is_public_alone(store: WeightStore) -> None:
    path = write(store, "ann", saved(), "weights").path
    with pytest.raises(UnknownPathError):
        store.find("bob", path)
    store.change("ann", path, is_public=True)
    assert text(store, "bob", path) == "weights"
    # Seen, and no more.
    assert list(store.of("bob")) == []
    for change in (
        lambda: store.change("bob", path, is_public=False),
        lambda: store.remove("bob", path),
    ):
        with pytest.raises(UnknownPathError):
            change()
    assert store.find("ann", path)[0].is_public
    store.change("ann", path, is_public=False)
    with pytest.raises(UnknownPathError):
        store.find("bob", path)


def test_ones_own_weights_come_before_public_ones_of_others(store: WeightStore) -> None:
    write(store, "ann", saved(is_public=True), "ann's")
    write(store, "bob", saved(), "bob's")
    assert text(store, "bob", saved().path) == "bob's"
    store.remove("bob", saved().path)
    assert text(store, "bob", saved().path) == "ann's"


def test_weights_are_listed_by_owner_and_model_the_newest_first(store: WeightStore) -> None:
    for name, at, run in (("a", 3.0, RUN), ("b", 9.0, "x"), ("c", 5.0, RUN)):
        write(store, "ann", saved(name, saved_at=at, run=run))
    write(store, "bob", saved("d"))
    assert [one.name for one, _ in store.of("ann")] == ["b", "c", "a"]
    assert [one.name for one, _ in store.of("ann", RUN)] == ["c", "a"]
    assert list(store.of("carl")) == []


def test_what_has_expired_is_gone(store: WeightStore) -> None:
    path = write(store, "ann", saved(is_public=True), "weights").path
    store.change("ann", path, expires_at=time.time() + 60)
    assert text(store, "ann", path) == "weights"
    store.change("ann", path, expires_at=time.time() - 1)
    for owner in ("ann", "bob"):
        with pytest.raises(UnknownPathError):
            store.find(owner, path)
    assert list(store.of("ann")) == []
    with pytest.raises(UnknownPathError):
        store.change("ann", path, expires_at=None)
    # Its name is free again.
    write(store, "ann", saved(), "new")
    assert text(store, "ann", path) == "new"


def test_what_is_there_for_a_sampling_session_alone_is_not_listed(store: WeightStore) -> None:
    path = write(store, "ann", saved(is_unnamed=True), "weights").path
    assert list(store.of("ann")) == []
    assert text(store, "ann", path) == "weights"


def test_what_a_server_left_half_is_swept_away_at_the_next_start(
    store: WeightStore, tmp_path: Path
) -> None:
    write(store, "ann", saved(), "whole")
    new = store.reserve("ann", saved(), overwrite=True)
    store.sweep()
    assert new.exists()
    store.sweep(with_unnamed=True)
    assert not new.exists()
    assert text(store, "ann", saved().path) == "whole"


def test_what_has_expired_is_swept_away(store: WeightStore, tmp_path: Path) -> None:
    write(store, "ann", saved("expired", expires_at=time.time() - 1))
    write(store, "ann", saved("unnamed", is_unnamed=True))
    write(store, "bob", saved("kept", expires_at=time.time() + 60))

    def names() -> set[str]:
        return {Path(one).parent.name for one in files(tmp_path) if one.endswith("adapter")}

    assert names() == {"expired", "unnamed", "kept"}
    store.sweep()
    assert names() == {"unnamed", "kept"}
    # An earlier server's sampling sessions are gone.
    store.sweep(with_unnamed=True)
    assert names() == {"kept"}


def test_what_was_removed_is_gone(store: WeightStore, tmp_path: Path) -> None:
    path = write(store, "ann", saved(), "weights").path
    store.remove("ann", path)
    assert not [one for one in files(tmp_path) if one.endswith("adapter")]
    with pytest.raises(UnknownPathError):
        store.find("ann", path)
    with pytest.raises(UnknownPathError):
        store.remove("ann", path)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../one", "a/b", "/tmp/a", ".hidden", "a\0b", "a\n", "-a", "ä", "a" * 129],
    ids=repr,
)
def test_names_that_lead_out_of_the_folder_are_refused(
    store: WeightStore, tmp_path: Path, name: str
) -> None:
    with pytest.raises(WireError, match=r"^path: (?s:.*)give letters, digits"):
        store.reserve("ann", saved(name))
    assert files(tmp_path) == set()
    write(store, "ann", saved())
    with pytest.raises(UnknownPathError):
        store.find("ann", f"tinker://{RUN}/weights/{name}")


@pytest.mark.parametrize("run", [".", "..", "...", "*", "[a-z]", "%2E%2E", "~", "\\..\\.."])
@pytest.mark.parametrize("owner", ["..", "../..", "/", "/tmp/a", "*", "a/b", "ann/../bob"])
def test_runs_and_owners_of_any_name_stay_inside(
    store: WeightStore, tmp_path: Path, run: str, owner: str
) -> None:
    about = saved(run=run)
    write(store, owner, about, "weights")
    places = [one for one in files(tmp_path) if one.endswith("adapter")]
    assert len(places) == 1
    # weights / owner / run / kind / name / adapter: each is one folder.
    assert places[0].count(os.sep) == 5
    assert ".." not in places[0].split(os.sep)
    assert text(store, owner, about.path) == "weights"
    assert [one.run for one, _ in store.of(owner)] == [run]
    # Neither is it a pattern that fits others'.
    write(store, "ann", saved(is_public=True), "ann's")
    with pytest.raises(UnknownPathError):
        store.find(owner, f"tinker://{run}/weights/other")
    assert [one.run for one, _ in store.of(owner)] == [run]


@pytest.mark.parametrize(
    "path",
    [
        "one",
        "tinker://",
        f"tinker://{RUN}/weights",
        f"tinker://{RUN}/other/one",
        f"tinker://{RUN}/weights/one/adapter",
        f"tinker://{RUN}/weights/*",
        "tinker://*/weights/one",
        f"tinker://../{RUN}/weights/one",
        f"tinker://{RUN}/weights/../weights/one",
        f" tinker://{RUN}/weights/one",
    ],
)
def test_paths_of_another_form_are_unknown(store: WeightStore, path: str) -> None:
    write(store, "ann", saved(is_public=True))
    for owner in ("ann", "bob"):
        with pytest.raises(UnknownPathError):
            store.find(owner, path)


def test_weights_are_told_as_clients_read_them() -> None:
    about = saved(kind="sampler_weights", saved_at=0.0, expires_at=86400.5)
    assert about.message(17) == {
        "checkpoint_id": "sampler_weights/one",
        "checkpoint_type": "sampler",
        "time": "1970-01-01T00:00:00Z",
        "tinker_path": f"tinker://{RUN}/sampler_weights/one",
        "size_bytes": 17,
        "public": False,
        "expires_at": "1970-01-02T00:00:00Z",
        "user_metadata": None,
    }
    assert saved().message(0)["checkpoint_type"] == "training"
    assert saved().message(0)["expires_at"] is None
    assert iso_time(1e9) == "2001-09-09T01:46:40Z"


def test_a_copy_belongs_to_another_run_and_takes_no_room(store: WeightStore) -> None:
    about = write(store, "ann", saved(user_metadata={"a": "b"}, is_public=True), "weights")
    copied = store.copy("bob", about.path, "other:train:1", reader="ann", expires_at=None)
    assert copied.path == "tinker://other:train:1/weights/one"
    assert (copied.is_public, copied.user_metadata, copied.rank) == (False, {"a": "b"}, 4)
    found, folder = store.find("bob", copied.path)
    assert found == copied
    assert (folder / "adapter").read_text() == "weights"
    _, original = store.find("ann", about.path)
    assert os.path.samefile(folder / "adapter", original / "adapter")
    # What is known of the one is not what is known of the other.
    store.change("bob", copied.path, expires_at=0.0)
    assert store.find("ann", about.path)[0] == about
    store.remove("ann", about.path)
    assert (folder / "adapter").read_text() == "weights"


def test_a_copy_is_refused_that_cannot_be_made(store: WeightStore) -> None:
    about = write(store, "ann", saved())
    with pytest.raises(UnknownPathError):
        store.copy("bob", about.path, "other", reader="bob", expires_at=None)
    store.copy("bob", about.path, "other", reader="ann", expires_at=None)
    with pytest.raises(WireError, match="it is saved already"):
        store.copy("bob", about.path, "other", reader="ann", expires_at=None)
