"""What a trainer's checkpoint holds, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.train.optimizer import STATE_NAMES, Optimizer
from rolemesh.engine.train.randomness import capture_random_state, restore_random_state
from rolemesh.engine.weights.checkpoint import (
    CheckpointMismatchError,
    CheckpointReader,
    open_checkpoint,
    write_checkpoint,
)


def save(
    directory: Path,
    *,
    kind: str,
    weights: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    policy_version: int,
    extra: Mapping[str, Any],
) -> None:
    """Writes a trainer's checkpoint.

    Args:
        directory: must not exist.
        kind: "policy" or "critic".
        weights: float32, by Hugging Face name.
        optimizer: its moments, step counts and schedule.
        policy_version: version of the weights.
        extra: JSON-able state of the caller.
    """
    random_tensors, random_state = capture_random_state()
    groups = {"weights": weights, "random": random_tensors}
    for name in STATE_NAMES:
        groups[f"optimizer-{name}"] = optimizer.state(name)
    write_checkpoint(
        directory,
        groups,
        {
            "kind": kind,
            "policy_version": policy_version,
            # The schedule is a function of the spec and this count.
            "optimizer_steps": optimizer.num_steps,
            "optimizer": optimizer.spec.model_dump(mode="json"),
            "random": random_state,
            "extra": dict(extra),
        },
    )


def load(
    directory: Path,
    *,
    kind: str,
    weights: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
) -> tuple[int, dict[str, Any]]:
    """Puts a checkpoint back, in place; everything is checked before anything changes.

    Args:
        directory: that `save` wrote.
        kind: "policy" or "critic", which must be the checkpoint's.
        weights: the model's own, written in place.
        optimizer: gets moments and counts. Its spec stays: a run may go on with another rate.

    Returns:
        policy_version and extra.

    Raises:
        ValueError: no checkpoint, or another model's.
        CheckpointCorruptError: a file is missing, cut or changed.
    """
    checkpoint = open_checkpoint(directory)
    state = checkpoint.state
    if state["kind"] != kind:
        raise CheckpointMismatchError(
            f"checkpoint {str(directory)!r} is of a {state['kind']}, not of a {kind}: "
            "give the one of this role"
        )
    _check_shapes(checkpoint, weights)
    random_tensors = dict(checkpoint.tensors("random"))
    optimizer_state = {name: dict(checkpoint.tensors(f"optimizer-{name}")) for name in STATE_NAMES}
    with torch.no_grad():
        for name, tensor in checkpoint.tensors("weights"):
            weights[name].copy_(tensor)
    optimizer.restore(optimizer_state, state["optimizer_steps"])
    restore_random_state(random_tensors, state["random"])
    return int(state["policy_version"]), dict(state["extra"])


def _check_shapes(checkpoint: CheckpointReader, weights: Mapping[str, torch.Tensor]) -> None:
    own = {name: tuple(weight.shape) for name, weight in weights.items()}
    saved = checkpoint.shapes("weights")
    if saved != own:
        different = sorted(
            name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)
        )
        name = different[0]
        raise CheckpointMismatchError(
            f"checkpoint {str(checkpoint.directory)!r} is of another model: {name!r} has shape "
            f"{saved.get(name)}, but the model's is {own.get(name)} ({len(different)} differ): "
            "give the model folder that the run began with"
        )
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, shape in checkpoint.shapes(f"optimizer-{moment}").items():
            if own.get(name) != shape:
                raise CheckpointMismatchError(
                    f"checkpoint {str(checkpoint.directory)!r}: {moment} of {name!r} has shape "
                    f"{shape}, but the model's is {own.get(name)}: write a new checkpoint"
                )
