"""What a folder in PEFT's format says of its adapter, and whether a base can have an adapter.

Files are looked at, and of weights the headers are read. No torch, and nothing is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolemesh.engine.layout.adapters import ALL_LINEAR, EXPERTS, STACKS, stored_shape
from rolemesh.engine.layout.families import DecoderShape, Head, UnsupportedFamilyError
from rolemesh.engine.model_folders.model_files import (
    ModelFolderError,
    has_known_sizes,
    read_config_file,
    read_header,
)
from rolemesh.engine.specs import AdapterSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Before the model's own names in a file."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "arrow_config": (None,),
}
"""Entries of PEFT 0.21 that would make an adapter compute something else, and their values here;
the first of them is PEFT's own default."""


class AdapterFolderError(ValueError):
    """A folder that is no adapter, or not one that fits: names the folder, what, and the remedy."""


def read_adapter_config(path: Path, *, field: str = "adapter.from") -> Mapping[str, Any]:
    """The adapter_config.json of a folder.

    Raises:
        AdapterFolderError: There is none, or it is no object.
    """
    of, file = f"{field} {str(path)!r}", path / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        found = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a folder"
        raise AdapterFolderError(
            f"{of} {found}: give a folder that PEFT or rolemesh wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise AdapterFolderError(f"{of}: {CONFIG_FILE} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise AdapterFolderError(f"{of}: {CONFIG_FILE} is no JSON object")
    return config


def spec_of(config: Mapping[str, Any], *, field: str, path: Path) -> AdapterSpec:
    """The adapter that a folder's config describes, to begin with that folder.

    Raises:
        AdapterFolderError: It is of another kind, or has something that is not served.
    """
    of = f"{field} {str(path)!r}"
    for key, served in _PLAIN.items():
        value = config.get(key, served[0])
        if value not in served:
            raise AdapterFolderError(
                f"{of} has {key} {value!r} in {CONFIG_FILE}: only plain LoRA is served "
                f"({key} {served[0]!r})"
            )
    if config.get("modules_to_save") not in (None, [], ["score"]):
        raise AdapterFolderError(
            f"{of} has modules_to_save {config['modules_to_save']!r}: only a score head is "
            "trained beside an adapter"
        )
    linear = config.get("target_modules") or ()
    targets = (ALL_LINEAR,) if linear == "all-linear" else tuple(linear)
    parameters = tuple(config.get("target_parameters") or ())
    # PEFT takes them by the end of their names.
    stacks = {one.rpartition(".")[2] for one in parameters if not one.endswith(".weight")}
    targets += tuple(one.removesuffix(".weight") for one in parameters if one.endswith(".weight"))
    if stacks == {stack.rpartition(".")[2] for stack in STACKS.values()}:
        targets += (EXPERTS,)
    elif stacks:
        raise AdapterFolderError(
            f"{of} has target_parameters {list(parameters)} in {CONFIG_FILE}: an adapter of "
            f"experts has factors beside {' and '.join(STACKS.values())}; give one that was made "
            "for both"
        )
    try:
        return AdapterSpec.model_validate(
            {
                "rank": config["r"],
                "alpha": config["lora_alpha"],
                "scaling": "rslora" if config.get("use_rslora") else "standard",
                "targets": ALL_LINEAR if targets == (ALL_LINEAR,) else targets,
                "from": path,
            }
        )
    except (KeyError, ValueError, TypeError) as error:
        raise AdapterFolderError(
            f"{of}: {CONFIG_FILE} has no usable r, lora_alpha and target_modules: {error}"
        ) from error


def check_kind(path: Path, spec: AdapterSpec, *, field: str = "adapter.from") -> None:
    """Refuses a folder whose adapter is of another kind, rank or scale.

    Args:
        path: The folder.
        spec: What the adapter is to be.
        field: What named the folder, for errors.

    Raises:
        AdapterFolderError: It is, or it has no usable config.
    """
    found = spec_of(read_adapter_config(path, field=field), field=field, path=path)
    for key, own, theirs in (
        ("rank", spec.rank, found.rank),
        ("alpha", spec.alpha, found.alpha),
        ("scaling", spec.scaling, found.scaling),
    ):
        if own != theirs:
            raise AdapterFolderError(
                f"{field} {str(path)!r} has {key} {theirs}, but adapter.{key} is {own}: give "
                f"adapter.{key} {theirs}, or leave from out"
            )


def check_adapter(
    base: Path,
    spec: AdapterSpec,
    *,
    field: str = "model.adapter",
    num_layers: int | None = None,
    head: Head = "lm_head",
) -> None:
    """Refuses an adapter that a base cannot have, as far as files tell.

    Args:
        base: Folder of the base, which `check_model_files` has passed.
        spec: Of the adapter.
        field: What describes the adapter, for errors.
        num_layers: Layers of the base that are kept; None for all.
        head: What stands on top; a score head is trained beside the adapter.

    Raises:
        ModelFolderError: A target is no matrix of the base, or too small for the rank.
        AdapterFolderError: The folder that it begins with is no adapter, not this one, or one of
            another base.
    """
    shape = adapted_shape(base, spec, field=field, num_layers=num_layers, head=head)
    if spec.start is not None:
        named = f"{field}.from"
        check_kind(spec.start, spec, field=named)
        _check_weights(spec.start, shape, f"{named} {str(spec.start)!r}")


def adapted_shape(
    base: Path,
    spec: AdapterSpec,
    *,
    field: str = "model.adapter",
    num_layers: int | None = None,
    head: Head = "lm_head",
) -> DecoderShape | None:
    """Sizes of a base with an adapter; None for families whose parameters are not known here.

    Arguments and errors are those of `check_adapter`.
    """
    config = read_config_file(base, field=f"{field.removesuffix('.adapter')}.path")
    if not has_known_sizes(config):
        return None
    try:
        shape = DecoderShape.from_config(config, head=head)
    except UnsupportedFamilyError:  # quantized: its parameters have other names and shapes
        return None
    if num_layers is not None:
        shape = replace(shape, num_layers=min(num_layers, shape.num_layers))
    try:
        return shape.with_adapter(spec.rank, spec.targets)
    except ValueError as error:
        raise ModelFolderError(f"{field.removesuffix('adapter')}{error}") from error


def num_trained(shape: DecoderShape) -> int:
    """Elements of all that training changes in a model with an adapter."""
    return sum(math.prod(one.shape) for one in shape.trained_manifest("float32").values())


def _check_weights(path: Path, shape: DecoderShape | None, of: str) -> None:
    """Compares the header of a folder's weights with the factors of an adapter."""
    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise AdapterFolderError(
            f"{of} has no {WEIGHTS_FILE} (other formats can run code and are not read): give a "
            "folder that PEFT or rolemesh wrote"
        )
    try:
        header = read_header(file)
    except (OSError, ModelFolderError) as error:
        raise AdapterFolderError(f"{of}: {error}") from error
    if shape is None:
        return
    held = {
        name.removeprefix(PREFIX): list(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }
    needed = shape.trained_manifest("float32")
    # Of a head that only some kinds of model have, its loader knows more.
    own_head = ("score.weight", "score.bias") if shape.head == "score" else ()
    refuse_others(of, held, (*needed, *own_head))
    for name, parameter in needed.items():
        if name.startswith("score."):
            continue  # a new one is made where the folder lacks it
        if name not in held:
            raise AdapterFolderError(lacks(of, name))
        if held[name] != list(own := stored_shape(name, parameter.shape)):
            raise AdapterFolderError(has_other_shape(of, name, held[name], own))


def refuse_others(of: str, held: Iterable[str], expected: Iterable[str]) -> None:
    """Raises AdapterFolderError where a folder holds a parameter that an adapter does not have.

    Args:
        of: Field and folder, for the error.
        held: Hugging Face names in the folder.
        expected: Those of the adapter.
    """
    others = sorted(set(held) - set(expected))
    if others:
        raise AdapterFolderError(
            f"{of} also holds {others[0]!r} ({len(others)} such): it was made for other "
            "targets or for another base; give adapter.targets as there, or the base that it "
            "was made for"
        )


def lacks(of: str, name: str) -> str:
    """Says that a folder lacks a factor."""
    return (
        f"{of} lacks {name!r}: it was made for other targets or for another base; give "
        "adapter.targets as there, or the base that it was made for"
    )


def has_other_shape(of: str, name: str, found: Iterable[int], expected: Iterable[int]) -> str:
    """Says that a folder has a factor in another shape."""
    return (
        f"{of} holds {name!r} with the shape {list(found)}, but this base takes "
        f"{list(expected)}: give the base that the adapter was made for"
    )
