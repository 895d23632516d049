"""Recipes of tinker-cookbook, each run to its end against a served SmolLM2."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.client_programs import REPOSITORY, run
from support.served_tinker import served_tinker

MODEL = REPOSITORY / ".models" / "SmolLM2-135M-Instruct"
NAME = "Qwen/Qwen3.5-9B-Base"
"""What the base is called: the cookbook looks its model up in a table."""

SAVING = {"micro_batch_tokens": 1024, "recompute": "full"}
"""With them the actor takes 4 GB for an agent's rows of 740 tokens; 6 GB with micro_batch_tokens
alone."""


@contextlib.contextmanager
def served_smol(folder: Path) -> Iterator[dict[str, str]]:
    """A server of SmolLM2 with the name of the cookbook's model; gives variables for programs."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is not there: run `make model`")
    rollout = {"type": "vllm", "max_model_len": 1024}
    with served_tinker(
        folder,
        MODEL,
        *("--name", NAME),
        rollout=rollout,
        **SAVING,
    ) as found:
        yield found


def run_recipe(
    variables: Mapping[str, str],
    folder: Path,
    recipe: str,
    program: str = "tinker_loops.py",
    **config: Any,
) -> list[dict[str, Any]]:
    """Runs a recipe to its end.

    Args:
        variables: Of a server.
        folder: Where it runs; it has the tokenizer.
        recipe: Its module.
        program: Ours that starts it.
        config: Its settings.

    Returns:
        The metrics of its steps.
    """
    config = {"log_path": folder / recipe, **config}
    options = [f"{name}={value}" for name, value in config.items()]
    run("tinker_cookbook", program, recipe, *options, variables=variables, folder=folder)
    return _lines(config["log_path"] / "metrics.jsonl")


def checkpoints(log_path: Path) -> list[dict[str, Any]]:
    """What a recipe has saved, the oldest first."""
    return _lines(log_path / "checkpoints.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
