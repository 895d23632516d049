"""Loads what transformers makes of a model folder beside the model: its config and its tokenizer.

Local files only, and nothing executed. The transformers library is imported with the first call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolemesh.engine.layout.family_records import DEEPSTACK_LEVELS, TEXT_PARTS
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.model_folders.model_files import (
    CONFIG_FILE,
    ModelFolderError,
    read_config_file,
)


class NoTokenizerError(ValueError):
    """A folder holds no tokenizer that can be read."""


def load_config(folder: Path, *, field: str = "model.path") -> Any:
    """The transformers config of a folder's decoder: of images and text, that of the text part.

    Args:
        folder: Of a model.
        field: What named it, for the error.

    Raises:
        ModelFolderError: There is no config.json, it is of no family that transformers knows, or no
            model can be made of it.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, of = read_config_file(folder, field=field), f"{field} {str(folder)!r}"
    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        code = (
            ", and the custom code that it comes with is never run" if "auto_map" in config else ""
        )
        raise ModelFolderError(
            f"{of} has the model_type {family!r}, which transformers {transformers.__version__} "
            f"does not know{code}: correct {CONFIG_FILE}, or take a model of another family"
        )
    try:
        found = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Each class of config has checks of its own, and raises what it likes.
        raise ModelFolderError(
            f"{of}: {CONFIG_FILE} is none of a {family} model ({_said(error)}): correct it, or "
            "fetch it again"
        ) from error
    if family not in TEXT_PARTS.values():
        return found
    text = found.get_text_config()
    text.tie_word_embeddings = config["tie_word_embeddings"]
    if levels := config.get(DEEPSTACK_LEVELS):
        setattr(text, DEEPSTACK_LEVELS, levels)
    return text


def load_tokenizer(folder: Path, *, field: str = "model.path") -> Any:
    """The tokenizer of a folder.

    Args:
        folder: Of a model.
        field: What named it, for the error.

    Raises:
        NoTokenizerError: There is none, or it cannot be read.
    """
    if not folder.is_dir():
        raise NoTokenizerError(
            f"{field} is {str(folder)!r}, which is no folder: give a local Hugging Face model "
            "folder (services fetch nothing, `rolemesh fetch` does)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The tokenizers library raises Exception itself, and its callers whatever a file lacks.
        raise NoTokenizerError(
            f"{field} {str(folder)!r} has no tokenizer that can be read ({_said(error)}): copy the "
            "model's tokenizer files into it"
        ) from error


def stop_tokens_of(path: Path, config: Any) -> tuple[int, ...]:
    """Token ids that end a completion, ascending.

    Args:
        path: Folder of the model, with generation_config.json if it has one.
        config: Its transformers config.

    Raises:
        ValueError: It names none, or one outside the vocabulary.
    """
    # A chat model's end of turn stands in generation_config.json; config.json may still name the
    # base model's end of text.
    named: Any = None
    generation_config = path / "generation_config.json"
    if generation_config.is_file():
        named = json.loads(generation_config.read_text()).get("eos_token_id")
    if named is None:
        named = getattr(config, "eos_token_id", None)
    tokens = tuple(sorted({named} if isinstance(named, int) else set(named or ())))
    if not tokens:
        raise ValueError(
            f"model path {str(path)!r} names no stop token: set eos_token_id in "
            "generation_config.json"
        )
    outside = [token for token in tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(
            f"eos_token_id of {str(path)!r} has {outside}, outside the vocabulary of "
            f"{config.vocab_size} tokens: correct generation_config.json"
        )
    return tokens


def _said(error: Exception) -> str:
    # Of a KeyError the message is the key alone.
    said = on_one_line(str(error))
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"
