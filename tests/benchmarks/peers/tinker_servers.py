"""Servers of Tinker's protocol as processes: ours, and SkyRL's with its JAX backend on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from peers.side_by_side import REPOSITORY, environment
from safetensors.torch import load_file, save_file

START_S = 600.0
END_S = 60.0


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    pid: int
    """Of the process that has started all others."""


def write_model(source: Path, folder: Path, dtype: str) -> Path:
    """A copy of a model whose weights and config have a type: SkyRL computes in its config's."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
            continue
        weights = {name: one.to(getattr(torch, dtype)) for name, one in load_file(file).items()}
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return folder


@contextlib.contextmanager
def our_server(
    folder: Path, model: Path, dtype: str, numerics: str, threads: int
) -> Iterator[Served]:
    """`rolemesh tinker` with recipes/tinker.yaml, but for the model, types and the threads."""
    recipe: dict[str, Any] = yaml.safe_load((REPOSITORY / "recipes" / "tinker.yaml").read_text())
    recipe["actor"]["model"] |= {"path": str(model), "compute_dtype": dtype}
    recipe["actor"]["rollout"]["dtype"] = dtype
    recipe["run"]["numerics"] = numerics
    recipe["services"] = {"actor": {"threads": threads}}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    command = [
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "tinker", str(file)),
        *("--json", "--port", "0", "--out", str(folder / "out")),
    ]
    # Absolute, since the server runs elsewhere.
    paths = [str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(":") if one]
    kept = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    with _started(command, folder, '{"type": "serving"', **kept) as (process, line):
        yield Served(json.loads(line)["url"], process.pid)


@contextlib.contextmanager
def skyrl_server(
    python: Path, folder: Path, model: Path, settings: Mapping[str, Any], compiled: Path
) -> Iterator[Served]:
    """SkyRL's server; it reads of its parent's command line how `uv run` is to start its engine.

    Args:
        python: Of an environment that has it, and uv.
        folder: Where it runs.
        model: Folder of the base, which is its name, too.
        settings: Its --backend-config.
        compiled: Folder of what JAX has compiled, which later servers need not do again.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(str(python.parent / "uv"), "run", "--no-project", "--python", str(python)),
        *("-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(port)),
        *("--base-model", str(model), "--backend", "jax"),
        *("--backend-config", json.dumps(settings)),
        *("--database-url", f"sqlite:///{folder / 'tinker.db'}"),
        *("--checkpoints-base", str(folder / "checkpoints")),
    ]
    variables = {
        "VIRTUAL_ENV": str(python.parents[1]),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "UV_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(compiled)),
    }
    with _started(command, folder, "Starting background engine...", **variables) as (process, _):
        yield Served(f"http://127.0.0.1:{port}", process.pid)


@contextlib.contextmanager
def _started(
    command: Sequence[str], folder: Path, sign: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server once its output has a line with a sign, and that line; ended with its children."""
    log = folder / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process, _awaited(process, log, sign)
        finally:
            # The group: uv passes on to its child what it is sent, and that one has a uv, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _awaited(process: subprocess.Popen[bytes], log: Path, sign: str) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if sign in line:
                return line
        time.sleep(0.2)
    raise SystemExit(f"{process.args!r} has not started:\n{log.read_text()[-3000:]}")
