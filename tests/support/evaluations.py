"""Evaluations as users start them, and the process behind them that asks and scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import warm_processes

LONGEST_S = 500
"""Two policies of a real model are served one after another, where other tests share the cores."""

WAIT_S = 120.0
"""For the process that asks alone; what it asks runs already."""


def rolemesh(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of rolemesh in a folder; what it starts is forked from warm processes, too."""
    return subprocess.run(
        [sys.executable, "-m", "rolemesh", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **warm_processes.everything(), **variables},
        cwd=folder,
        timeout=LONGEST_S,
        check=False,
    )


def evaluated(folder: Path, *arguments: str, **variables: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `rolemesh evaluate`, and what it tells."""
    done = rolemesh(folder, "evaluate", *arguments, "--json", **variables)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return done.returncode, lines


def rows_beside(file: Path) -> list[dict[str, Any]]:
    """The completions of an evaluation's file, by row and sample."""
    text = file.with_name(file.name.replace(".json", ".rows.jsonl")).read_text()
    return by_row([json.loads(line) for line in text.splitlines()])


def told_of(question: str) -> list[dict[str, Any]]:
    """What the process of an evaluation tells."""
    process = subprocess.run(
        [sys.executable, "-m", "rolemesh.services.evaluation"],
        input=question,
        text=True,
        capture_output=True,
        env={**os.environ, **warm_processes.services()},
        timeout=WAIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def scored(question: str) -> list[dict[str, Any]]:
    """What it tells of its rows, by row and sample."""
    told = told_of(question)
    assert [one for one in told if one["type"] == "error"] == []
    return by_row([one for one in told if one["type"] == "row"])


def by_row(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows come in the order of their ends."""
    return sorted(rows, key=lambda one: (one["row"], one["sample"]))
