"""One run of an agent's program, in a process of its own within a sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.bounds import Output
from rolemesh.engine.sandbox.host import MAY_BE_SANDBOX, Sandbox
from rolemesh.engine.sessions.logs import AgentLog
from rolemesh.engine.sessions.results import AgentFailedError, AgentWork
from rolemesh.engine.specs import ProgramAgentSpec

_MODULE = "rolemesh.engine.sessions.program_worker"
_MOST_READ_BYTES = 1 << 16
_LOOK_S = 0.5
"""How often a program that says nothing is looked after."""
_LAST_LINE_BYTES = 1 << 16


def run_program(
    spec: ProgramAgentSpec,
    sandbox: Sandbox,
    port: int,
    work: AgentWork,
    stopped: threading.Event,
) -> str:
    """Runs the program to its end; returns the last line that it printed.

    Args:
        spec: Which program, and its bounds.
        sandbox: Where it runs.
        port: Of the endpoint, to which it may connect.
        work: Its trajectory, whose log gets all that the program prints.
        stopped: When it is set, the program is ended.

    Raises:
        AgentFailedError: It cannot be started, took too long, printed too much, or ended with
            another exit code than 0.
    """
    command = [_resolved(word, number) for number, word in enumerate(spec.command)]
    # What it can import lies beside the program, or the script of an interpreter.
    own = command[command[0] == sys.executable :] or command
    shown = next((word for word in own if os.path.isfile(word)), command[0])
    name = Path(shown).name
    try:
        view = sandbox.show(f"{shown}:main", spec.readable, network=spec.network, ports=(port,))
    except ValueError as error:
        raise AgentFailedError(f"environment has {error}") from error
    folder = tempfile.mkdtemp(prefix="rolemesh-agent-") if view is None else view.folder
    try:
        task = Path(folder, "task.json")
        task.write_text(json.dumps(work.task()))
        order = {
            "command": command,
            "environment": {
                "OPENAI_BASE_URL": work.base_url,
                "OPENAI_API_KEY": work.api_key,
                "ROLEMESH_SESSION": work.session_url,
                "ROLEMESH_MODEL": work.model,
                "ROLEMESH_TASK": str(task),
            },
            "memory_bytes": None if spec.memory_mib is None else spec.memory_mib << 20,
            "sandbox": None if view is None else sandbox.order(view),
        }
        try:
            process, connection = sandbox.start(_MODULE, view, spec.variables)
        except OSError as error:
            raise AgentFailedError(f"no process for {name!r} ({error})") from error
        with connection:
            connection.sendall(frames.encode(order, frames.MAX_CALL_BYTES))
            return _watched(process, name, spec, work.log, stopped, is_confined=view is not None)
    finally:
        if view is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            view.close()


def _resolved(word: str, number: int) -> str:
    """A word of the command: the interpreter by its path, a file that is there by its own."""
    if number == 0 and word in ("python", "python3"):
        return sys.executable
    return os.path.abspath(word) if os.path.exists(word) else word


def _watched(
    process: subprocess.Popen[bytes],
    name: str,
    spec: ProgramAgentSpec,
    log: AgentLog,
    stopped: threading.Event,
    *,
    is_confined: bool,
) -> str:
    """Waits for the end of a program; returns its last line."""
    assert process.stdout is not None
    printed = Output(name, spec.max_output_bytes)
    printed.begin_call()
    deadline = time.monotonic() + spec.timeout_s
    tail = b""
    why = ""
    try:
        with process.stdout as pipe:
            while not why and (part := _next_part(pipe, deadline)) != b"":
                if stopped.is_set():
                    why = "the generation has ended"
                elif part is not None:
                    printed.take(part)
                    log.take(part)
                    tail = (tail + part)[-_LAST_LINE_BYTES:]
                    if printed.is_too_much:
                        why = (
                            f"printed more than {spec.max_output_bytes} bytes: print less, or "
                            "raise environment.max_output_bytes"
                        )
                elif time.monotonic() >= deadline:
                    why = (
                        f"took more than {spec.timeout_s:g} s: make it faster, or raise "
                        "environment.timeout_s"
                    )
        printed.end()
        code = None if why else process.wait(max(0.0, deadline - time.monotonic()) + _LOOK_S)
    except subprocess.TimeoutExpired:
        code, why = None, "closed its output and went on: let it end"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if why:
        raise AgentFailedError(f"the program {name!r} {why}")
    if code != 0:
        hint = f" ({MAY_BE_SANDBOX})" if is_confined else ""
        raise AgentFailedError(f"the program {name!r} ended with exit code {code}{hint}")
    return tail.decode(errors="replace").rstrip().rpartition("\n")[2].strip()


def _next_part(pipe: IO[bytes], deadline: float) -> bytes | None:
    """What the program prints next; empty at its end, None where nothing came for a while."""
    left = max(0.0, min(_LOOK_S, deadline - time.monotonic()))
    ready, _, _ = select.select([pipe], [], [], left)
    return os.read(pipe.fileno(), _MOST_READ_BYTES) if ready else None
