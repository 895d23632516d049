"""Reads Hugging Face model folders: local files only, safetensors only, nothing executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rolemesh.engine.specs import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


MakeEmpty = Callable[[Sequence[int]], torch.Tensor]
"""Takes the sizes of a tensor and makes it, float32, without values."""

_make_empty: ContextVar[MakeEmpty | None] = ContextVar("make_empty", default=None)


class ModelFolderError(ValueError):
    """A model folder cannot be used: which field named it, what is wrong, what to do."""


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


def check_model_folder(path: Path) -> None:
    """Raises ModelFolderError unless the folder has a config and all of its safetensors."""
    remedy = "give a local Hugging Face model folder (nothing is ever downloaded)"
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise ModelFolderError(f"model.path {str(path)!r} {found}: {remedy}")
    if not (path / "config.json").is_file():
        raise ModelFolderError(f"model.path {str(path)!r} has no config.json: {remedy}")
    if maker_without_values() is not None or (path / WEIGHTS_FILE).is_file():
        return
    if not (path / INDEX_FILE).is_file():
        raise ModelFolderError(
            f"model.path {str(path)!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: "
            "give a folder with safetensors (other formats can run code and are not read)"
        )
    shards = sorted(set(json.loads((path / INDEX_FILE).read_text())["weight_map"].values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ModelFolderError(
            f"model.path {str(path)!r}: {INDEX_FILE} names {outside[0]!r}, which is no file of the "
            "folder: copy the folder again"
        )
    absent = [shard for shard in shards if not (path / shard).is_file()]
    if absent:
        raise ModelFolderError(
            f"model.path {str(path)!r} lacks {absent[0]!r} ({len(absent)} of {len(shards)} shards "
            "are missing): copy the folder again"
        )


def read_config(spec: ModelSpec) -> Any:
    """The folder's transformers config, cut to spec.num_layers.

    Raises:
        ModelFolderError: The folder is missing or not whole.
        ValueError: num_layers exceeds the model's layers.
    """
    # Here, as below: who only looks at a folder waits for no model's code.
    from transformers import AutoConfig

    check_model_folder(spec.path)
    config = AutoConfig.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    if spec.num_layers is not None:
        if spec.num_layers > config.num_hidden_layers:
            raise ValueError(
                f"model.num_layers is {spec.num_layers}, but the model in {str(spec.path)!r} has "
                f"{config.num_hidden_layers} layers: give at most that many"
            )
        config.num_hidden_layers = spec.num_layers
        # Families with several kinds of attention list one kind a layer.
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[: spec.num_layers]
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
        ModelFolderError: A parameter is missing from the files.
    """
    from transformers.utils import logging as transformers_logging

    # Bars are drawn with carriage returns, which make a role's log unreadable.
    transformers_logging.disable_progress_bar()
    model, info = auto_class.from_pretrained(
        spec.path,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
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
    for weight in model.parameters():
        weight.data = weight.data.clone()
