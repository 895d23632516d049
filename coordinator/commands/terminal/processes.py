"""Processes that commands ask or become: modules that need what the coordinator must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.engine.messages import said_last
from rolemesh.engine.specs.variables import OWN_SECRETS


class PreviewError(RuntimeError):
    """A process that was asked could not work; says why."""


def told_by(
    *command: str, work: str, environment: Mapping[str, str], question: str = ""
) -> Iterator[dict[str, Any]]:
    """Runs a module, and gives the JSON objects that it prints, one a line, as they come.

    Args:
        command: The module and its arguments.
        work: What it does, for the error: "measures".
        environment: Its variables beside those that every child gets.
        question: What it reads from its standard input.

    Raises:
        PreviewError: The process failed.
    """
    # The current directory must not shadow a package, and nothing is fetched.
    fixed = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    # A file takes its errors: a pipe that nothing reads meanwhile could fill up.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**child_environment(os.environ), **fixed, **environment},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.close()
            for line in process.stdout:
                yield json.loads(line)
            if process.wait():
                errors.seek(0)
                raise PreviewError(f"the process that {work} failed: {said_last(errors.read())}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def become(*command: str) -> NoReturn:
    """Turns this process into a module, with its arguments."""
    # They are the coordinator's, and what is run there may be a user's function.
    for name in OWN_SECRETS:
        os.environ.pop(name, None)
    # The current directory must not shadow a package.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command])
