"""The whole of which a decoder is the text part: its config, and the tensors of its tower.

What is trained is the text part. Beside it an exported folder has the tower as it was.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.layout.family_records import DEEPSTACK_LEVELS, RECORDS, TEXT_PARTS
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.model_folders.model_files import read_whole_config
from rolemesh.engine.models.parameter_files import FolderTensors

_IN_FILES = re.compile(r"(?:model\.)?visual\.(.+)")


def has_tower(folder: Path) -> bool:
    """Whether a folder's model is of images and text."""
    return read_whole_config(folder)["model_type"] in TEXT_PARTS


def whole_config(folder: Path, text: Any) -> tuple[Any, str]:
    """The config of a folder's whole model, with another text part; and the name of its class.

    Args:
        folder: Of a model of images and text.
        text: transformers config of the text part.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.text_config = copy.deepcopy(text)
    # A word between the parts here, which no config.json has.
    vars(config.text_config).pop(DEEPSTACK_LEVELS, None)
    config.tie_word_embeddings = text.tie_word_embeddings
    return config, AutoModelForImageTextToText._model_mapping[type(config)].__name__


def names_in_whole(folder: Path) -> tuple[str, str]:
    """With what names begin in files of a folder's whole model, as transformers writes them.

    Returns:
        Of the decoder, in the place of "model.", and of the tower.
    """
    family = TEXT_PARTS[read_whole_config(folder)["model_type"]]
    if RECORDS[family].is_nested:
        return "model.language_model.", "model.visual."
    return "model.", "visual."


def tower_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Shape of each of a tower's tensors, by its name in the tower."""
    with FolderTensors(folder) as files:
        return {name: files.shape(key) for name, key in _keys(files).items()}


def tower_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A tower's tensors, float32, one after another, in the order of `tower_shapes`."""
    with FolderTensors(folder) as files:
        for name, key in _keys(files).items():
            box: Box = tuple((0, size) for size in files.shape(key))
            yield name, files.read(key, box)


def _keys(files: FolderTensors) -> dict[str, str]:
    return {match[1]: key for key in files.names() if (match := _IN_FILES.fullmatch(key))}
