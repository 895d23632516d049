"""A model folder for tests that load no model: files that are whole, and hold nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_empty_model(folder: Path, **config: Any) -> Path:
    """Writes config, weights without a tensor, and the file of a tokenizer; returns the folder.

    The family is one whose parameters are not known before transformers makes the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox", **config}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder
