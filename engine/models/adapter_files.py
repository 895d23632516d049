"""Folders of adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from rolemesh.engine.layout.adapters import split_factor
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.specs import AdapterSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

TaskType = Literal["CAUSAL_LM", "TOKEN_CLS", "SEQ_CLS"]

_PREFIX = "base_model.model."
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
    "target_parameters": (None, []),
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


class AdapterFolder:
    """An adapter on disk, read by boxes.

    Example::

        folder = AdapterFolder(Path("adapter"), AdapterSpec(rank=16))
        folder.read("model.layers.0.mlp.up_proj.lora_A.weight", (16, 576), ((0, 16), (0, 576)))
    """

    def __init__(self, path: Path, spec: AdapterSpec, *, field: str = "adapter.from") -> None:
        """Reads the config and the file's header.

        Args:
            path: The folder.
            spec: What the adapter is to be.
            field: What named the folder, for errors.

        Raises:
            AdapterFolderError: It is not whole, or of another kind, rank or scale.
        """
        self.path = path
        self._of = f"{field} {str(path)!r}"
        config = read_adapter_config(path, field=field)
        found = spec_of(config, field=field, path=path)
        for key, own, theirs in (
            ("rank", spec.rank, found.rank),
            ("alpha", spec.alpha, found.alpha),
            ("scaling", spec.scaling, found.scaling),
        ):
            if own != theirs:
                raise AdapterFolderError(
                    f"{self._of} has {key} {theirs}, but adapter.{key} is {own}: give "
                    f"adapter.{key} {theirs}, or leave from out"
                )
        try:
            self._file: Any = safe_open(path / WEIGHTS_FILE, framework="pt")
            keys: list[str] = list(self._file.keys())  # type: ignore[no-untyped-call]
            self._names = {key.removeprefix(_PREFIX): key for key in keys}
        except (OSError, SafetensorError) as error:
            raise AdapterFolderError(
                f"{self._of}: {WEIGHTS_FILE} cannot be read ({error}): copy the adapter again"
            ) from error

    def __contains__(self, name: str) -> bool:
        """Whether it holds a parameter of that Hugging Face name."""
        return name in self._names

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """A box of a parameter, float32, in memory of its own.

        Raises:
            AdapterFolderError: It lacks the parameter, or has it in another shape.
        """
        if name not in self._names:
            raise AdapterFolderError(
                f"{self._of} lacks {name!r}: it was made for other targets or for another base; "
                "give adapter.targets as there, or the base that it was made for"
            )
        stored = self._file.get_slice(self._names[name])
        if tuple(stored.get_shape()) != shape:
            raise AdapterFolderError(
                f"{self._of} holds {name!r} with the shape {stored.get_shape()}, but this base "
                f"takes {list(shape)}: give the base that the adapter was made for"
            )
        values: torch.Tensor = stored[tuple(slice(start, stop) for start, stop in box)]
        return values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def refuse_others(self, expected: Iterable[str]) -> None:
        """Raises AdapterFolderError where it holds a parameter that this adapter does not have."""
        if others := sorted(self._names.keys() - set(expected)):
            raise AdapterFolderError(
                f"{self._of} also holds {others[0]!r} ({len(others)} such): it was made for other "
                "targets or for another base; give adapter.targets as there, or the base that it "
                "was made for"
            )


def read_adapter_config(path: Path, *, field: str = "adapter.from") -> Mapping[str, Any]:
    """The adapter_config.json of a folder.

    Raises:
        AdapterFolderError: There is none, or it is no object.
    """
    of, file = f"{field} {str(path)!r}", path / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise AdapterFolderError(
            f"{of} has no {CONFIG_FILE}: give a folder that PEFT or rolemesh wrote"
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
    targets = config.get("target_modules")
    try:
        return AdapterSpec.model_validate(
            {
                "rank": config["r"],
                "alpha": config["lora_alpha"],
                "scaling": "rslora" if config.get("use_rslora") else "standard",
                "targets": "all_linear" if targets == "all-linear" else tuple(targets or ()),
                "from": path,
            }
        )
    except (KeyError, ValueError, TypeError) as error:
        raise AdapterFolderError(
            f"{of}: {CONFIG_FILE} has no usable r, lora_alpha and target_modules: {error}"
        ) from error


def adapter_config(
    spec: AdapterSpec, targets: Sequence[str], base: Path, task: TaskType
) -> dict[str, Any]:
    """What adapter_config.json says of a trained adapter.

    Args:
        spec: Of the adapter.
        targets: Its modules within a layer, e.g. "self_attn.q_proj".
        base: Folder of the base.
        task: What stands on top of the model.
    """
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": str(base),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "use_rslora": spec.scaling == "rslora",
        "use_dora": False,
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        "modules_to_save": None if task == "CAUSAL_LM" else ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def stored_name(name: str) -> str:
    """Key of a factor or of a score head in adapter_model.safetensors."""
    assert split_factor(name) is not None or name.startswith("score.")
    return _PREFIX + name
