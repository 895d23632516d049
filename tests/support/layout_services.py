"""Services with layouts, in processes that outlive a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support import warm_processes
from support.services import wait_for_announcement

Start = Callable[[str, str], str]
"""Starts a role with a layout and returns its address."""


@contextmanager
def layout_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Every service must end well: nothing broke it."""
    processes = []

    def begin(role: str, layout: str) -> str:
        announce = tmp_path_factory.mktemp(role) / "announce.json"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", f"rolemesh.services.{role}"),
                *("--layout", layout, "--announce", str(announce)),
            ],
            env={**os.environ, **warm_processes.services(), "PYTHONSAFEPATH": "1"},
            stderr=subprocess.DEVNULL,
        )
        processes.append(process)
        return str(wait_for_announcement(process, announce)["address"])

    yield begin
    for process in processes:
        process.terminate()
    assert [process.wait(30) for process in processes] == [0] * len(processes)
