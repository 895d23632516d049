"""Files of a Hugging Face model folder, looked at in milliseconds: config, tokenizer, weights.

Of weights the headers are read. No torch, and nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rolemesh.engine.layout.families import (
    LM_HEAD,
    DecoderShape,
    Head,
    RefusedSettingError,
    has_plan,
    parameter_shape,
    stage_tensors,
)
from rolemesh.engine.layout.family_records import decoder_config
from rolemesh.engine.layout.file_names import FilePart, file_parts

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MOST_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file that the format allows."""

_LENGTH_BYTES = 8
"""The length of its header, with which a safetensors file begins."""

_POINTER = b"version "
"""Begins what Git LFS leaves in the place of a file that it has not brought."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
"""From any of these a tokenizer may be made."""

_SIZES = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"),
    "vocab_size",
)
"""Of a config that says what parameters its model has; without one, transformers' own apply."""

NOT_UPDATED_IN_VLLM = {
    "gpt_oss": "vLLM 0.32 computes NaN with weights of this family that come after its start",
}
"""Why vLLM cannot sample a family that is trained, by model_type."""

_AGAIN = "fetch it again"


class ModelFolderError(ValueError):
    """A model folder cannot be used: which field named it, what is wrong, what to do."""


def check_model_files(
    folder: Path,
    *,
    field: str = "model.path",
    num_layers: int | None = None,
    head: Head | None = None,
    has_weights: bool = True,
    has_tokenizer: bool = False,
) -> None:
    """Refuses a model folder from which no model could be loaded, as far as its files tell.

    Args:
        folder: The folder.
        field: What named it, for the error.
        num_layers: Layers that are kept; None for all.
        head: What has to stand on top; None: anything, or nothing.
        has_weights: Whether weights are read of it.
        has_tokenizer: Whether a tokenizer is read of it.

    Raises:
        ModelFolderError: It is missing, or a file of it is missing, damaged or not whole, or lacks
            a parameter of a family whose parameters are known here.
    """
    of = f"{field} {str(folder)!r}"
    config = read_config_file(folder, field=field)
    if has_weights:
        try:
            held = dict(_held(folder, of))
        except OSError as error:
            raise ModelFolderError(f"{of} cannot be read: {error}") from error
        if has_known_sizes(config):
            _check_parameters(config, held, of, num_layers, head)
    if has_tokenizer and not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
        raise ModelFolderError(
            f"{of} has no tokenizer.json, nor another file of a tokenizer: copy the model's "
            "tokenizer files into it"
        )


def check_sampled(folder: Path, sampler: str, *, field: str = "model.path") -> None:
    """Refuses a model of a family that a sampler cannot be given new weights of.

    Args:
        folder: Of the model.
        sampler: The type of rollout, e.g. "vllm".
        field: What named the folder, for the error.

    Raises:
        ModelFolderError: The family is such, or the folder has no config.json that names one.
    """
    family = read_config_file(folder, field=field)["model_type"]
    if sampler == "vllm" and family in NOT_UPDATED_IN_VLLM:
        raise ModelFolderError(
            f"{field} {str(folder)!r} has the model_type {family!r}, and rollout.type is "
            f"{sampler!r}: {NOT_UPDATED_IN_VLLM[family]}; take a model of another family"
        )


def read_config_file(folder: Path, *, field: str = "model.path") -> Mapping[str, Any]:
    """What the config.json of a folder says of the decoder; see `decoder_config`.

    Raises:
        ModelFolderError: There is none, or it is no object that names its model_type.
    """
    return decoder_config(read_whole_config(folder, field=field))


def read_whole_config(folder: Path, *, field: str = "model.path") -> Mapping[str, Any]:
    """The config.json of a folder, as it is; raises as `read_config_file` does."""
    of, remedy = f"{field} {str(folder)!r}", "give a local Hugging Face model folder"
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise ModelFolderError(
            f"{of} {found}: {remedy} (services fetch nothing, `rolemesh fetch` does)"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ModelFolderError(
            f"{of} has no {CONFIG_FILE}: {remedy} (services fetch nothing, `rolemesh fetch` does)"
        )
    config = _json_object(folder / CONFIG_FILE, of)
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(
            f"{of}: {CONFIG_FILE} names no model_type: give that of the model's family, e.g. "
            f'"llama", or {_AGAIN}'
        )
    return config


def names_in_files(name: str) -> tuple[str, ...]:
    """Names under which a folder may hold a tensor that is called so here.

    A folder that was saved from a bare backbone lacks the prefix; one of images and text may have
    another level of names.
    """
    bare = name.removeprefix("model.")
    return (name, bare) if bare == name else (name, bare, f"model.language_model.{bare}")


def has_known_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says which parameters its model has: of a family known here, and sizes.

    With quantized weights the names and shapes are others all the same.
    """
    return has_plan(config) and all(key in config for key in _SIZES)


def read_header(file: Path) -> Mapping[str, Any]:
    """The header of a safetensors file, which is as long as its header asks for.

    Raises:
        ModelFolderError: It is not; the text begins with the name of the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        # A shorter file says no length, and what it has may read as more than memory holds.
        length = int.from_bytes(start, "little") if size >= _LENGTH_BYTES else 0
        if start == _POINTER:
            raise ModelFolderError(
                f"{file.name} is what Git LFS leaves in the place of a file: run `git lfs pull` "
                "where the folder was cloned"
            )
        if length > MOST_HEADER_BYTES:
            raise ModelFolderError(
                f"{file.name} is no safetensors file: it begins with {length} as the bytes of its "
                f"header, which has {MOST_HEADER_BYTES} at most; {_AGAIN}"
            )
        text = stream.read(length)
    if len(start) + len(text) < _LENGTH_BYTES + length or not text:
        raise _not_whole(file, size, "header alone asks", _LENGTH_BYTES + max(length, 2))
    try:
        header = json.loads(text)
        end = _end_of_tensors(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFolderError(
            f"{file.name} is no safetensors file, or is damaged: its header cannot be read "
            f"({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    if size != _LENGTH_BYTES + length + end:
        raise _not_whole(file, size, "header asks", _LENGTH_BYTES + length + end)
    return header  # type: ignore[no-any-return]


def _not_whole(file: Path, size: int, asked: str, needed: int) -> ModelFolderError:
    what = "not whole" if size < needed else "damaged"
    return ModelFolderError(
        f"{file.name} has {size} bytes, but its {asked} for {needed}: it is {what}; {_AGAIN}"
    )


def _end_of_tensors(header: Mapping[str, Any]) -> int:
    """Bytes of all tensors, which lie one behind another.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: They do not, or are not described so.
    """
    end = 0
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    for tensor in tensors:
        if not all(isinstance(number, int) for number in tensor["shape"]):
            raise ValueError(f"a tensor has the shape {tensor['shape']!r}")
    for start, stop in sorted(tuple(tensor["data_offsets"]) for tensor in tensors):
        if start != end or stop < start:
            raise ValueError(f"a tensor lies at bytes {start} to {stop}, the one before to {end}")
        end = stop
    return end


def _held(folder: Path, of: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, after a look at every file that holds one."""
    shards: dict[str, set[str] | None]
    if (folder / WEIGHTS_FILE).is_file():
        shards = {WEIGHTS_FILE: None}
    elif (folder / INDEX_FILE).is_file():
        shards = _shards(folder, of)
    else:
        raise ModelFolderError(
            f"{of} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: "
            "give a folder with safetensors (other formats can run code and are not read)"
        )
    for shard, named in shards.items():
        try:
            header = read_header(folder / shard)
        except ModelFolderError as error:
            raise ModelFolderError(f"{of}: {error}") from error
        for name, tensor in header.items():
            if name != "__metadata__" and (named is None or name in named):
                yield name, tuple(tensor["shape"])


def _shards(folder: Path, of: str) -> dict[str, set[str] | None]:
    """The files that an index names, each with the tensors that it says are there."""
    index = _json_object(folder / INDEX_FILE, of).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ModelFolderError(
            f"{of}: {INDEX_FILE} has no weight_map that names a file for each tensor: {_AGAIN}"
        )
    shards: dict[str, set[str] | None] = {
        shard: {name for name, file in index.items() if file == shard}
        for shard in sorted(set(index.values()))
    }
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ModelFolderError(
            f"{of}: {INDEX_FILE} names {outside[0]!r}, which is no file of the "
            "folder: copy the folder again"
        )
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ModelFolderError(
            f"{of} lacks {absent[0]!r} ({len(absent)} of {len(shards)} shards "
            "are missing): copy the folder again"
        )
    return shards


def _json_object(file: Path, of: str) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{of} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{of}: {file.name} is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelFolderError(f"{of}: {file.name} holds no JSON object: {_AGAIN}")
    return found


def _check_parameters(
    config: Mapping[str, Any],
    held: Mapping[str, tuple[int, ...]],
    of: str,
    num_layers: int | None,
    head: Head | None,
) -> None:
    """Compares what a family needs with what the files hold."""
    if config.get("quantization_config") is not None:
        return  # its parameters have other names and shapes
    try:
        shape = DecoderShape.from_config(config, head=head or "lm_head")
    except RefusedSettingError as error:
        raise ModelFolderError(f"{of}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ModelFolderError(f"{of}: {CONFIG_FILE} cannot be right: {error}") from error
    if num_layers is not None:
        shape = replace(shape, num_layers=min(num_layers, shape.num_layers))
    needed = dict.fromkeys(name for _, name in stage_tensors(shape, pp=0, size=1))
    if head is None:
        needed.pop(LM_HEAD, None)

    def stored_as(name: str) -> str | None:
        return next((key for key in names_in_files(name) if key in held), None)

    # Of experts files hold each matrix by itself, or the stack.
    parts = [
        (part.name, part.shape)
        for name in needed
        for part in (
            file_parts(shape, name)
            if stored_as(name) is None
            else (FilePart(name, tuple((0, size) for size in parameter_shape(shape, name))),)
        )
    ]
    stored = {name: stored_as(name) for name, _ in parts}
    missing = [name for name, key in stored.items() if key is None]
    if missing:
        raise ModelFolderError(
            f"{of} lacks the weights {missing[:3]} ({len(missing)} in all): give the folder of a "
            f"whole {shape.family} model{_WITH[head]}"
        )
    for name, expected in parts:
        key = stored[name]
        # Of labels a config says more than one thing; who loads the head compares them.
        if key is not None and name != "score.weight" and held[key] != expected:
            raise ModelFolderError(
                f"{of} holds {key!r} with shape {list(held[key])}, but its config.json says "
                f"{list(expected)}: copy the folder again"
            )


_WITH: Mapping[Literal["lm_head", "score"] | None, str] = {
    None: "",
    "lm_head": " with its projection to the vocabulary",
    "score": " with a head that scores (AutoModelForSequenceClassification)",
}
