"""`rolemesh tinker` as a process, for clients that know of its address alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

START_S = 180.0
"""Loading vLLM and the model takes 15 s on a machine that does nothing else."""

KEY = "tml-" + "a" * 16


@contextlib.contextmanager
def served_tinker(
    folder: Path, model: Path, *flags: str, rollout: Mapping[str, Any], **section: Any
) -> Iterator[dict[str, str]]:
    """A server of a model, until the end of the block.

    Args:
        folder: For all its files.
        model: Folder of the base.
        flags: Further ones of the command.
        rollout: Section of the recipe.
        section: More fields of its section actor.model.

    Yields:
        Variables for programs with Tinker's SDK.
    """
    recipe = folder / "recipe.yaml"
    data = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 1, "held_out_size": 1}
    actor = {"model": {"path": str(model), **section}, "rollout": dict(rollout), "data": data}
    recipe.write_text(
        yaml.safe_dump(
            {"run": {"name": "tinker"}, "algorithm": {"type": "external"}, "actor": actor}
        )
    )
    command = [
        *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "tinker", str(recipe)),
        *("--json", "--port", "0", "--out", str(folder / "out"), *flags),
    ]
    log = folder / "server.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env={**os.environ}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said, f"the server has not started: {log.read_text()[-3000:]}"
            yield {
                "TINKER_BASE_URL": json.loads(said)["url"],
                "TINKER_API_KEY": KEY,
                "TINKER_TELEMETRY": "0",
                "TOKENIZERS_PARALLELISM": "false",
            }
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
