"""Tests of what `rolemesh status` says of recoveries."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from rolemesh.coordinator.api.credentials import read_tokens
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.doors.known_doors import noted
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.run.attempts.recovery import told_of
from rolemesh.coordinator.run.folders.folder import print_status, read_status
from rolemesh.coordinator.run.folders.ownership import COORDINATOR_FILE
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState


def printed(directory: Path) -> str:
    stream = io.StringIO()
    print_status(Console(file=stream, width=400), [read_status(directory)])
    return stream.getvalue()


async def test_a_run_that_recovers_says_what_from_and_how_often_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = MemoryStateStore()
    record = RunRecord(
        run_id="r", name="n", num_steps=9, directory=str(tmp_path), created_at=1.0, updated_at=1.0,
        state=RunState.RECOVERING, activity="recovering: actor was killed", recoveries=2,
    )  # fmt: skip
    await store.create_run(record)
    tokens = read_tokens(ApiSpec(), {}, folder=tmp_path)
    server, port = await serve_coordinator(StoreOperations(store), tokens=tokens)
    address = f"127.0.0.1:{port}"
    # Whoever may write into the folder may name any file, whose content they want to be sent.
    facts = {"address": address, "pid": os.getpid(), "run_id": "r", "token_file": str(tokens.file)}
    (tmp_path / COORDINATOR_FILE).write_text(json.dumps(facts))
    try:
        refused = await asyncio.to_thread(read_status, tmp_path)
        assert "send the token" in refused.services["coordinator"]
        with noted(address, token_file=tokens.file, certificate=None):
            status = await asyncio.to_thread(read_status, tmp_path)
            text = await asyncio.to_thread(printed, tmp_path)
    finally:
        await server.stop(None)
    assert (status.state, status.recoveries) == ("recovering", 2)
    assert "recovering: actor was killed" in text
    assert "2 times" in text


async def test_a_run_says_where_its_policy_answers_while_its_services_are_there(
    tmp_path: Path,
) -> None:
    store = MemoryStateStore()
    facts = {"role": "actor", "address": "10.0.0.1:50051", "policy_version": 3}
    services = {
        "actor": {**facts, "endpoint": "http://127.0.0.1:8000/v1"},
        "critic": {**facts, "role": "critic"},
    }
    record = RunRecord(
        run_id="r", name="n", num_steps=9, directory=str(tmp_path), created_at=1.0, updated_at=1.0,
        state=RunState.RUNNING, services=services,
    )  # fmt: skip
    await store.create_run(record)
    server, port = await serve_coordinator(StoreOperations(store))
    told = {"address": f"127.0.0.1:{port}", "pid": os.getpid(), "run_id": "r"}
    (tmp_path / COORDINATOR_FILE).write_text(json.dumps(told))
    try:
        status = await asyncio.to_thread(read_status, tmp_path)
        text = await asyncio.to_thread(printed, tmp_path)
        found = []
        for state in (RunState.RECOVERING, RunState.RUNNING, RunState.FAILED):
            await store.update_run("r", state=state)
            found.append((await asyncio.to_thread(read_status, tmp_path)).endpoints)
    finally:
        await server.stop(None)
    assert status.endpoints == {"actor": "http://127.0.0.1:8000/v1"}
    assert "actor       answers at http://127.0.0.1:8000/v1" in text
    # A service that is started again may answer elsewhere.
    assert found == [{}, status.endpoints, {}]


def test_a_run_that_has_ended_says_how_often_it_recovered(tmp_path: Path) -> None:
    summary = {"state": "succeeded", "failure": "", "steps": 9, "recoveries": [{}, {}, {}]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_status(tmp_path).recoveries == 3
    assert "3 times" in printed(tmp_path)
    del summary["recoveries"]
    # The summary of an older version.
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_status(tmp_path).recoveries == 0


def test_a_failure_is_one_line_and_the_traceback_stays_in_the_log(tmp_path: Path) -> None:
    failure = "none\nof these; its log ends with:\n  | Traceback (most recent call last):\n  | more"
    summary = {"state": "failed", "failure": failure, "steps": 9}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_status(tmp_path).failure == failure
    text = printed(tmp_path)
    assert "none of these; its log ends with: ... (`rolemesh status DIR --json`" in text
    assert "Traceback" not in text
    assert told_of(RuntimeError(failure)) == "none of these; its log ends with:"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", '{"torn'),
        ("summary.json", "[]"),
        ("summary.json", '{"state": "failed"}'),
        ("config.yaml", "run: ["),
        ("config.yaml", "text"),
        ("coordinator.json", "{}"),
    ],
)
def test_a_damaged_run_is_told_among_the_others(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    status = read_status(tmp_path)
    assert status.state == "damaged"
    assert "\n" not in status.failure
    assert "damaged" in printed(tmp_path)
