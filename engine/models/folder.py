"""Reads Hugging Face model folders: local files only, safetensors only, nothing executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.model_folders.model_files import ModelFolderError, check_model_files
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.decoder_config import load_decoder_config
from rolemesh.engine.parallel.stages import keep_layers
from rolemesh.engine.specs import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN_CHARACTERS = 300
"""Of what transformers says; it may list all of its families."""

MakeEmpty = Callable[[Sequence[int]], torch.Tensor]
"""Takes the sizes of a tensor and makes it, float32, without values."""

_make_empty: ContextVar[MakeEmpty | None] = ContextVar("make_empty", default=None)


@contextmanager
def without_values(make_empty: MakeEmpty) -> Iterator[None]:
    """Lets models be made of their config.json alone, of tensors that hold no values.

    For estimates of memory (`engine/fit`). Only families that can be spread over ranks.
    """
    token = _make_empty.set(make_empty)
    try:
        yield
    finally:
        _make_empty.reset(token)


def maker_without_values() -> MakeEmpty | None:
    """What makes the tensors of a model within `without_values`; None elsewhere."""
    return _make_empty.get()


def read_config(spec: ModelSpec) -> Any:
    """The folder's transformers config, cut to spec.num_layers.

    Raises:
        ModelFolderError: The folder is missing or not whole, or of no family that is known here.
        ValueError: num_layers exceeds the model's layers.
    """
    check_model_files(
        spec.path, num_layers=spec.num_layers, has_weights=maker_without_values() is None
    )
    config = load_decoder_config(spec.path)
    if spec.num_layers is not None:
        if spec.num_layers > config.num_hidden_layers:
            raise ValueError(
                f"model.num_layers is {spec.num_layers}, but the model in {str(spec.path)!r} has "
                f"{config.num_hidden_layers} layers: give at most that many"
            )
        keep_layers(config, range(spec.num_layers), of=config.num_hidden_layers)
    return config


def load_model(
    auto_class: Any, spec: ModelSpec, *, config: Any, may_miss: tuple[str, ...] = ()
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Loads float32 weights into a model of the given auto class, with dropout off.

    Args:
        auto_class: e.g. transformers.AutoModelForCausalLM.
        spec: Which folder.
        config: From `read_config`, possibly with another number of labels.
        may_miss: Prefixes of parameters that the folder may lack.

    Returns:
        The model in evaluation mode (dropout would make the log-probs of sampler and trainer
        differ), and the parameters that the folder lacked.

    Raises:
        ModelFolderError: A parameter is missing from the files, or no such model can be made.
    """
    from transformers.utils import logging as transformers_logging

    # The hub's newer files of images and text have another level of names.
    is_part = config.model_type in TEXT_PARTS.values()
    names = {"key_mapping": {r"^model\.language_model\.": "model."}} if is_part else {}
    # Bars are drawn with carriage returns, which make a role's log unreadable.
    transformers_logging.disable_progress_bar()
    try:
        model, info = auto_class.from_pretrained(
            spec.path,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **names,
        )
    except ValueError as error:
        raise ModelFolderError(
            f"model.path {str(spec.path)!r} cannot be loaded by {auto_class.__name__} "
            f"({on_one_line(str(error), _SHOWN_CHARACTERS)}): take a model of another family"
        ) from error
    missing = frozenset(info["missing_keys"])
    refuse_missing(missing, may_miss, spec.path, type(model).__name__)
    # torch drops the gradient of an embedding's padding row. Chat models pad with their
    # end-of-turn token, which is a token like any other in a prompt; our own pads reach no loss.
    model.get_input_embeddings().padding_idx = None
    _own_weights(model)
    model.eval()
    return model, missing


def refuse_missing(
    missing: frozenset[str], may_miss: tuple[str, ...], folder: Path, class_name: str
) -> None:
    """Raises ModelFolderError when a missing parameter begins with none of the prefixes."""
    fatal = sorted(name for name in missing if not name.startswith(may_miss or ("\0",)))
    if fatal:
        raise ModelFolderError(
            f"model.path {str(folder)!r} lacks the weights {fatal[:3]} ({len(fatal)} in all): "
            f"give a folder that was saved as {class_name}"
        )


def _own_weights(model: PreTrainedModel) -> None:
    """Copies weights out of the model file.

    The loader leaves float32 weights in a private mapping of the file (safetensors 0.8): pages
    not yet written to would follow a change of the file, a shorter file would kill the process,
    and the mapping is not aligned as tensors of our own are, which changes the last bits of
    products.
    """
    for _, weight in (*model.named_parameters(), *saved_buffers(model)):
        weight.data = weight.data.clone()
