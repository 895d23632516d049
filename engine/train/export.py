"""Turns a policy's checkpoint into a Hugging Face folder, without a running mesh.

python -m rolemesh.engine.train.export --checkpoint DIR --model DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.layout.manifest import Parameter
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.specs import ComputeDtype, ModelSpec
from rolemesh.engine.train.state import check_fits
from rolemesh.engine.weights.checkpoint import CheckpointCorruptError, open_checkpoint
from rolemesh.engine.weights.export import write_model_folder


def export_policy(
    checkpoint: Path, model: Path, directory: Path, dtype: ComputeDtype = "bfloat16"
) -> int:
    """Writes the folder and returns the checkpoint's policy_version.

    Reads one parameter after another, whatever layout wrote them: it takes the memory of one file.

    Args:
        checkpoint: Folder that the actor wrote.
        model: Folder of the model that the run started from: config and tokenizer come from it.
        directory: The folder to write.
        dtype: Type of the saved weights.

    Raises:
        ValueError: A folder cannot be used, or they do not belong together.
        CheckpointCorruptError: A file of the checkpoint is missing, cut or changed.
    """
    reader = open_checkpoint(checkpoint)
    config = read_config(ModelSpec(path=model))
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    manifest = {
        name: Parameter(tuple(weight.shape), "float32") for name, weight in lm.named_parameters()
    }
    check_fits(reader, "policy", manifest)
    write_model_folder(
        directory,
        config=config,
        architecture=type(lm).__name__,
        manifest=manifest,
        parameters=reader.whole("weights", manifest),
        source=model,
        dtype=dtype,
    )
    return int(reader.state["policy_version"])


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.engine.train.export", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder the actor wrote")
    parser.add_argument("--model", type=Path, required=True, help="model the run started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=get_args(ComputeDtype), default="bfloat16", help="type of the weights"
    )
    options = parser.parse_args(arguments)
    try:
        version = export_policy(options.checkpoint, options.model, options.out, options.dtype)
    except (ValueError, CheckpointCorruptError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: policy_version {version}, {options.dtype}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
