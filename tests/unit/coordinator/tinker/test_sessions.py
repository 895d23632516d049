"""Sessions of clients, and the records that stay of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rolemesh.coordinator.tinker import sessions as module
from rolemesh.coordinator.tinker.sessions import Sessions, UnknownError


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path)


def test_what_belongs_to_a_session_is_known_also_by_a_later_server(
    sessions: Sessions, tmp_path: Path
) -> None:
    session = sessions.begin("ann", display_name="night", user_metadata={"a": "b"})
    sessions.add(session, run="s:train:0")
    sessions.add(session, sampler="s:sample:0")
    sessions.add(session, run="s:train:0")
    record = sessions.record("ann", session.session_id)
    assert (record.runs, record.samplers) == (("s:train:0",), ("s:sample:0",))
    assert (record.display_name, record.user_metadata) == ("night", {"a": "b"})
    assert record.status == {"type": "active"}
    # Nothing says how it ended, where its server was killed.
    later = Sessions(tmp_path)
    found = later.record("ann", session.session_id)
    assert found.status is None
    assert found.runs == record.runs
    with pytest.raises(UnknownError, match="has ended"):
        later.get("ann", session.session_id)


def test_an_ended_session_is_listed_and_not_there(sessions: Sessions) -> None:
    first, second = sessions.begin("ann"), sessions.begin("ann")
    status = {"type": "client_finished", "reason": {"type": "success"}, "detail": None}
    assert sessions.end(first.session_id, status) is first
    assert sessions.end(first.session_id) is None
    assert not sessions.has(first.session_id)
    assert [one.session_id for one in sessions.records("ann")] == [
        second.session_id,
        first.session_id,
    ]
    assert sessions.record("ann", first.session_id).status == status


def test_an_owner_sees_no_other_ones(sessions: Sessions) -> None:
    session = sessions.begin("ann")
    assert sessions.records("bob") == []
    for ask in (sessions.get, sessions.record):
        with pytest.raises(UnknownError):
            ask("bob", session.session_id)
    with pytest.raises(UnknownError):
        sessions.move("bob", session.session_id, "p")
    # No id leads out of the folder.
    with pytest.raises(UnknownError):
        sessions.record("bob", f"../ann/{session.session_id}")


def test_a_session_gets_another_project_also_after_its_end(sessions: Sessions) -> None:
    session = sessions.begin("ann", project_id="one")
    sessions.move("ann", session.session_id, "two")
    assert sessions.record("ann", session.session_id).project_id == "two"
    sessions.end(session.session_id)
    sessions.move("ann", session.session_id, "three")
    assert sessions.record("ann", session.session_id).project_id == "three"


def test_silent_sessions_are_told_the_longest_first(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    first, second = sessions.begin("ann"), sessions.begin("ann")
    second.heard_at, first.heard_at = -5.0, -9.0
    assert sessions.silent(4.0) == [first, second]
    assert sessions.silent(6.0) == [first]
    # Whoever asks for it has heard of its client.
    sessions.get("ann", first.session_id)
    assert sessions.silent(4.0) == [second]


def test_old_records_go(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 2)
    made = [sessions.begin("ann") for _ in range(4)]
    for at, one in enumerate(made):
        os.utime(tmp_path / "sessions" / "ann" / f"{one.session_id}.json", (at, at))
    sessions.sweep()
    kept = {one.session_id for one in sessions.records("ann")}
    assert kept == {one.session_id for one in made[2:]}
