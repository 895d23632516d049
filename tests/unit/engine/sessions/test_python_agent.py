"""What functions of Python write, by trajectory, though they share a process and its loop."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest

from rolemesh.engine.sessions.python_agent import LOG_QUESTION, RunEnvironment

AGENT = """
import asyncio, logging, sys

logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)

async def run(task, client):
    for turn in range(3):
        print("turn", turn, "of", task["prompt_id"])
        await asyncio.sleep(0)
    logging.info("logged by %s", task["prompt_id"])
    await asyncio.to_thread(print, "a thread of", task["prompt_id"], file=sys.stderr)
    if task["prompt_id"] == "b":
        raise OSError("the tool is out of order")
    return 1.0
"""


async def test_each_trajectory_has_its_own_lines_also_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    printed = io.StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, printed)
    many = [RunEnvironment(f"{tmp_path / 'agent.py'}:run", keeps_log=True) for _ in range(2)]

    def asked(name: str) -> str:
        place = {"base_url": "http://127.0.0.1:1/v1", "api_key": "none"}
        return json.dumps({"task": {"prompt_id": name}, **place})

    said = await asyncio.gather(
        *(one.step(asked(name)) for one, name in zip(many, "ab", strict=True)),
        return_exceptions=True,
    )
    assert not isinstance(said[0], BaseException)
    assert json.loads(said[0].text) == 1.0
    assert isinstance(said[1], OSError)
    for one, name in zip(many, "ab", strict=True):
        lines = [f"turn {turn} of {name}" for turn in range(3)]
        lines += [f"logged by {name}", f"a thread of {name}"]
        assert (await one.step(LOG_QUESTION)).text.splitlines() == lines
    # The process prints all of it, as before.
    assert len(printed.getvalue().splitlines()) == 10
