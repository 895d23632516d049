"""Tokenizer of a model folder for a process that only looks: loaded without torch, in a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rolemesh.engine.data.rendering import ChatTokenizer


class NoTokenizerError(ValueError):
    """A folder holds no tokenizer that can be read."""


def load_light_tokenizer(folder: Path) -> ChatTokenizer:
    """Loads the tokenizer of a folder, and keeps torch out unless it is imported already.

    The transformers library imports torch where it finds one, which takes most of the time.
    Afterwards it has no models in this process: not for a process that computes.

    Raises:
        NoTokenizerError: There is none, or it has no chat template.
    """
    if not folder.is_dir():
        raise NoTokenizerError(
            f"model.path is {str(folder)!r}, which is no folder: give a local Hugging Face model "
            "folder (nothing is ever downloaded)"
        )
    is_hidden = "torch" not in sys.modules
    if is_hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
        # It would print that there is no PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    finally:
        if is_hidden:
            # A curriculum or a reward of the user's may want it.
            del sys.modules["torch"]
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise NoTokenizerError(
            f"model.path {str(folder)!r} has no tokenizer that can be read ({error}): copy the "
            "model's tokenizer files into it"
        ) from error
    if not tokenizer.chat_template:
        raise NoTokenizerError(
            f"model.path {str(folder)!r} has a tokenizer without a chat template, so that no "
            "prompt can be rendered: add chat_template.jinja to the folder, or take the model's "
            "chat version"
        )
    checked: ChatTokenizer = tokenizer
    return checked
