"""The config of a folder's decoder, for who makes a model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.model_folders.pretrained import load_config


def load_decoder_config(folder: Path) -> Any:
    """See `load_config`. transformers' auto classes then know the decoder, whatever its family."""
    config = load_config(folder)
    if config.model_type in TEXT_PARTS.values():
        # Here: other families need none of it.
        from rolemesh.engine.models.images.text_parts import register_text_parts

        register_text_parts()
    return config
