"""Tokenizer of a model folder for a process that only looks: loaded without torch, in a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.model_folders.pretrained import NoTokenizerError, load_tokenizer


def import_light_transformers() -> None:
    """Imports the transformers library, and keeps torch out unless it is imported already.

    It imports torch where it finds one, which takes most of the time. Afterwards it has no models
    in this process, but configs and tokenizers: not for a process that computes.
    """
    is_hidden = "torch" not in sys.modules
    if is_hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
        # It would print that there is no PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    finally:
        if is_hidden:
            # A curriculum or a reward of the user's may want it.
            del sys.modules["torch"]


def load_light_tokenizer(folder: Path) -> ChatTokenizer:
    """Loads the tokenizer of a folder without torch; see `import_light_transformers`.

    Raises:
        NoTokenizerError: There is none, or it has no chat template.
    """
    import_light_transformers()
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise NoTokenizerError(
            f"model.path {str(folder)!r} has a tokenizer without a chat template, so that no "
            "prompt can be rendered: add chat_template.jinja to the folder, or take the model's "
            "chat version"
        )
    checked: ChatTokenizer = tokenizer
    return checked
