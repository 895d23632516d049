"""Writes a trained model as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from rolemesh.engine.specs import ComputeDtype
from rolemesh.engine.weights.folders import FolderExistsError, whole_folder

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model folder that training leaves as they are."""


def write_model_folder(
    directory: Path,
    lm: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    dtype: ComputeDtype = "bfloat16",
) -> None:
    """Writes config, weights and tokenizer; replaces an older folder of that name whole.

    Args:
        directory: the folder to write.
        lm: the transformers model: its config and class are saved.
        weights: by Hugging Face name, tied ones once.
        source: folder that the model came from; tokenizer and generation config are copied.
        dtype: type of the saved weights.

    Raises:
        FolderExistsError: something is there that is not an older export.
    """
    _check_replaceable(directory)
    saved_dtype: torch.dtype = getattr(torch, dtype)
    with whole_folder(directory, replace=True) as temporary:
        save_torch_state_dict(
            {name: tensor.detach().to("cpu", saved_dtype) for name, tensor in weights},
            temporary,
            metadata={"format": "pt"},
        )
        config = copy.deepcopy(lm.config)
        config.architectures = [type(lm).__name__]
        config.save_pretrained(temporary)
        # transformers writes the type that the weights were loaded with, which is our float32;
        # samplers allocate by this entry.
        path = temporary / "config.json"
        entries = json.loads(path.read_text())
        path.write_text(json.dumps({**entries, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
        for name in COMPANION_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)


def _check_replaceable(directory: Path) -> None:
    """Refuses to replace anything but an empty folder or a flat folder of one model."""
    if not directory.exists():
        return
    entries = list(directory.iterdir()) if directory.is_dir() else []
    is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    if directory.is_dir() and (not entries or (is_model and all(e.is_file() for e in entries))):
        return
    raise FolderExistsError(
        f"directory {str(directory)!r} exists and is not the folder of one exported model, which "
        "alone is replaced: give a fresh folder"
    )
