"""Programs that use other people's packages, each in the environment of its client.

`make test-clients` makes the environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
from support.served_policy import Session

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / ".venv-clients"
PROGRAMS = REPOSITORY / "tests" / "clients" / "programs"
EXAMPLES = REPOSITORY / "examples" / "agents"
PAGE = (REPOSITORY / "docs" / "clients.md").read_text()

NEEDS_NEWER_PYTHON = {
    "nemo_gym": (
        " where it finds Python 3.12 or 3.13; elsewhere install one and run "
        "`make test-clients NEWER_PYTHON=/path/to/python3.12`"
    )
}
"""Why an environment may be missing though the others are there, by client; and the remedy."""

PROGRAM_S = 480.0
START_S = 120.0
"""Within which a server answers, and ends. That takes 3 s on a machine that does nothing else, and
12 s for a resources server of NeMo-Gym with its Ray."""


def program_of_page(heading: str) -> str:
    """The Python below a heading of the page on clients."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def python_of(client: str) -> Path:
    """The Python of a client's environment; the test is skipped where there is none."""
    python = ENVIRONMENTS / client / "bin" / "python"
    if not python.exists():
        remedy = NEEDS_NEWER_PYTHON.get(client, "")
        pytest.skip(f"{python} is not there: run `make test-clients`, which makes it{remedy}")
    return python


def run(
    client: str,
    *command: str,
    session: Session | None = None,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """What a command in a client's environment prints.

    Args:
        client: Names the environment.
        command: A program of its bin folder, or of ours with its arguments.
        session: Given to the program as OpenAI's SDK takes it.
        variables: More of them.
        folder: Where it runs.
    """
    bin_folder = python_of(client).parent
    program, *arguments = command
    ours = PROGRAMS / program
    start = (
        [str(bin_folder / "python"), str(ours)] if ours.exists() else [str(bin_folder / program)]
    )
    environment = _environment(bin_folder, session, variables)
    with tempfile.TemporaryDirectory() as own:
        made = subprocess.run(
            [*start, *arguments],
            cwd=folder or own,
            env={"HOME": own, "TMPDIR": own, **environment},
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
    ended = f"{command} ended with {made.returncode}"
    assert made.returncode == 0, f"{ended}: {made.stdout[-3000:]}\n{made.stderr[-5000:]}"
    return made.stdout


def seen(client: str, *command: str, **options: Any) -> Any:
    """The JSON on the last line that a command prints; see `run`."""
    return json.loads(run(client, *command, **options).strip().rpartition("\n")[2])


@contextlib.contextmanager
def example_server(
    client: str, example: str, *arguments: str, variables: Mapping[str, str]
) -> Iterator[str]:
    """One of our example servers of agents in a client's environment, until the end of the block.

    Args:
        client: Names the environment.
        example: File of the examples; its first argument is the port.
        arguments: Further ones.
        variables: Of its environment.

    Yields:
        Where it plays trajectories.
    """
    (port,) = free_ports(1)
    command = ("python", str(EXAMPLES / example), str(port), *arguments)
    with (
        tempfile.TemporaryDirectory() as own,
        serving(client, *command, ports=[port], folder=Path(own), variables=variables),
    ):
        yield f"http://127.0.0.1:{port}/play"


@contextlib.contextmanager
def serving(
    client: str,
    *command: str,
    ports: Sequence[int],
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server in a client's environment, from when it listens to the end of the block.

    Args:
        client: Names the environment.
        command: A program of its bin folder, with its arguments.
        ports: All those on which it will listen.
        folder: Where it runs; it is its home, too.
        variables: Of its environment.
    """
    bin_folder = python_of(client).parent
    own = {"HOME": str(folder), "TMPDIR": str(folder)}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [str(bin_folder / command[0]), *command[1:]],
            cwd=folder,
            env={**own, **_environment(bin_folder, None, variables)},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            for port in ports:
                _await_port(port, process, log)
            yield
        finally:
            process.terminate()
            process.wait(START_S)


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nothing listens."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]


def _await_port(port: int, process: subprocess.Popen[bytes], log: TextIO) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    log.seek(0)
    raise AssertionError(f"the server has not started: {log.read()[-3000:]}")


_PASSED_ON = ("SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "LANG")


def _environment(
    bin_folder: Path, session: Session | None, variables: Mapping[str, str] | None
) -> dict[str, str]:
    return {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        **_session_variables(session),
        **(variables or {}),
    }


def _session_variables(session: Session | None) -> dict[str, str]:
    if session is None:
        return {}
    return {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.key}
