"""Folders of adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from rolemesh.engine.layout.adapters import adapted_parameter, factor_name, stored_shape
from rolemesh.engine.layout.families import known_shape
from rolemesh.engine.layout.manifest import Box, Manifest
from rolemesh.engine.model_folders.adapter_config import (
    PREFIX,
    WEIGHTS_FILE,
    AdapterFolderError,
    check_kind,
    has_other_shape,
    lacks,
    refuse_others,
)
from rolemesh.engine.model_folders.model_files import read_config_file
from rolemesh.engine.models.images.whole_models import has_tower
from rolemesh.engine.specs import AdapterSpec

TaskType = Literal["CAUSAL_LM", "TOKEN_CLS", "SEQ_CLS"]


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
        check_kind(path, spec, field=field)
        try:
            self._file: Any = safe_open(path / WEIGHTS_FILE, framework="pt")
            keys: list[str] = list(self._file.keys())  # type: ignore[no-untyped-call]
            self._names = {_own_name(key): key for key in keys}
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
            raise AdapterFolderError(lacks(self._of, name))
        stored = self._file.get_slice(self._names[name])
        if (found := tuple(stored.get_shape())) != (own := stored_shape(name, shape)):
            raise AdapterFolderError(has_other_shape(self._of, name, found, own))
        place = tuple(slice(start, stop) for start, stop in box)
        values: torch.Tensor = (
            _stacked(stored[:], name, shape)[place] if len(shape) > len(own) else stored[place]
        )
        return values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def refuse_others(self, expected: Iterable[str]) -> None:
        """Raises AdapterFolderError where it holds a parameter that this adapter does not have."""
        refuse_others(self._of, self._names, expected)


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
    shape = known_shape(read_config_file(base, field="model.path"))
    # PEFT 0.21 takes the modules gate_proj, up_proj and down_proj of a mixture for its experts, and
    # would leave dense MLPs and shared experts without factors. Parameters it takes as they are.
    parameters = [
        adapted_parameter(one)
        for one in targets
        if shape is not None and shape.experts is not None and one.startswith("mlp.")
    ]
    modules = [one for one in targets if adapted_parameter(one) not in parameters]
    names: list[str] | str = sorted({one.rpartition(".")[2] for one in modules})
    if has_tower(base):
        # Modules of the tower have some of these names, too.
        names = rf".*\.language_model\..*\.({'|'.join(names)})"
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": str(base),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "use_rslora": spec.scaling == "rslora",
        "use_dora": False,
        "target_modules": names,
        "target_parameters": parameters or None,
        "modules_to_save": None if task == "CAUSAL_LM" else ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def stored_manifest(manifest: Manifest, base: Path) -> Manifest:
    """Keys and shapes in adapter_model.safetensors of factors and of a score head.

    Args:
        manifest: Of these, by the names that they have here.
        base: Folder of the model beneath.
    """
    level = _level(base)
    return {
        _key(name, level): replace(one, shape=stored_shape(name, one.shape))
        for name, one in manifest.items()
    }


def as_stored(
    parameters: Iterable[tuple[str, torch.Tensor]], base: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Factors and a score head by their keys in adapter_model.safetensors, as it lays them."""
    level = _level(base)
    for name, tensor in parameters:
        is_b_of_experts = tensor.ndim == 3 and _is_b(name)
        laid = tensor.permute(1, 2, 0) if is_b_of_experts else tensor
        yield _key(name, level), laid.reshape(stored_shape(name, tensor.shape))


def _level(base: Path) -> str:
    """Where PEFT finds the decoder in the model of a folder."""
    return "model.language_model." if has_tower(base) else "model."


def _key(name: str, level: str) -> str:
    is_inside = name.startswith("model.")
    return PREFIX + (level + name.removeprefix("model.") if is_inside else name)


def _own_name(key: str) -> str:
    name = key.removeprefix(PREFIX)
    inside = name.removeprefix("model.language_model.")
    return name if inside == name else f"model.{inside}"


def _stacked(stored: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A factor of experts that a file lays side by side, as the stack of this shape; a view."""
    if _is_b(name):
        return stored.view(*shape[1:], shape[0]).permute(2, 0, 1)
    return stored.view(shape)


def _is_b(name: str) -> bool:
    return name.endswith(factor_name("", "B"))
