"""Writes a model as one GGUF file, a parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from rolemesh.engine.layout.manifest import Manifest
from rolemesh.engine.llama_cpp.architecture import ROPE_FACTORS, Decoder, UnwritableModelError
from rolemesh.engine.llama_cpp.vocabulary import read_vocabulary
from rolemesh.engine.specs import GgufType
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_file

_TYPES: Mapping[GgufType, gguf.GGMLQuantizationType] = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FILE_TYPES: Mapping[GgufType, gguf.LlamaFileType] = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

_MAGIC = b"GGUF"

DRAWN_FROM_ALL = {
    gguf.Keys.General.SAMPLING_TEMP: 1.0,
    gguf.Keys.General.SAMPLING_TOP_K: 0,
    gguf.Keys.General.SAMPLING_TOP_P: 1.0,
    gguf.Keys.General.SAMPLING_MIN_P: 0.0,
}
"""How a server draws that is asked for nothing else: from the policy as it is. llama.cpp's own
usual cuts off unlikely tokens."""


class GgufFile:
    """A file to be written. Refuses what llama.cpp would compute otherwise before any is read."""

    def __init__(
        self,
        path: Path,
        file_type: GgufType,
        *,
        config: Any,
        manifest: Manifest,
        source: Path,
        stop_tokens: Sequence[int],
    ) -> None:
        """Plans the file.

        Args:
            path: Of the file; an older GGUF file there is replaced.
            file_type: Of the matrices.
            config: transformers config of the whole model.
            manifest: The model's parameters by Hugging Face name, tied ones once.
            source: Folder of the model, with its tokenizer.
            stop_tokens: Ids that end an answer.

        Raises:
            UnwritableModelError: llama.cpp would compute something else; says what to do.
            NoTokenizerError: The folder has no tokenizer.
            FolderExistsError: Something is there that is no GGUF file.
        """
        self._path = path
        self._decoder = Decoder(config)
        _check_replaceable(path)
        vocabulary = read_vocabulary(source, int(config.vocab_size), stop_tokens)
        self._settings: dict[str, Any] = {
            gguf.Keys.General.TYPE: "model",
            gguf.Keys.General.FILE_TYPE: int(_FILE_TYPES[file_type]),
            gguf.Keys.General.QUANTIZATION_VERSION: int(gguf.GGML_QUANT_VERSION),
            **DRAWN_FROM_ALL,
            **self._decoder.settings(),
            **vocabulary.settings(),
        }
        self._types: dict[str, gguf.GGMLQuantizationType] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in manifest.items():
            kind = _TYPES[file_type] if len(parameter.shape) > 1 else _TYPES["f32"]
            block = gguf.GGML_QUANT_SIZES[kind][0]
            if parameter.shape[-1] % block:
                raise UnwritableModelError(
                    f"--gguf is {file_type}, which takes rows in blocks of {block}, and {name!r} "
                    f"has rows of {parameter.shape[-1]}: give f16 or bf16"
                )
            self._decoder.stored_name(name)
            self._types[name], self._shapes[name] = kind, parameter.shape

    def write(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes the file, whole or not at all.

        Args:
            parameters: Names and whole tensors, floating [global shape], in the manifest's order.

        Raises:
            UnwritableModelError: A weight is too large for the type.
            FolderExistsError: Something is there meanwhile that is no GGUF file.
        """
        with whole_file(self._path) as temporary:
            writer = gguf.GGUFWriter(temporary, self._decoder.architecture.name)
            try:
                self._write(writer, parameters)
            finally:
                writer.close()
            _check_replaceable(self._path)

    def _write(
        self, writer: gguf.GGUFWriter, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        for key, value in self._settings.items():
            _add(writer, key, value)
        factors = self._decoder.rope_factors
        if factors is not None:
            _announce(writer, ROPE_FACTORS, tuple(factors.shape), _TYPES["f32"])
        for name, shape in self._shapes.items():
            _announce(writer, self._decoder.stored_name(name), shape, self._types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for name, tensor in parameters:
            stored = self._decoder.as_stored(name, tensor).to(torch.float32).contiguous()
            writer.write_tensor_data(_in_type(name, stored.numpy(), self._types[name]))


def _announce(
    writer: gguf.GGUFWriter,
    name: str,
    shape: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
) -> None:
    num_bytes = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
    writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)


def _in_type(name: str, values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Values float32 [shape] in the file's type: of the same shape, or bytes of its blocks."""
    if kind == gguf.GGMLQuantizationType.F16:
        largest = float(np.abs(values).max())
        if largest > float(np.finfo(np.float16).max):
            raise UnwritableModelError(
                f"--gguf is f16, which ends at 65504, and {name!r} has a weight of {largest:g}: "
                "give bf16"
            )
    return gguf.quantize(values, kind)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a setting in the type in which llama.cpp reads it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif key == gguf.Keys.General.SAMPLING_TOP_K:
        writer.add_int32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _check_replaceable(path: Path) -> None:
    """Refuses to replace anything but a GGUF file."""
    if not path.exists() and not path.is_symlink():
        return
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return
    raise FolderExistsError(
        f"{str(path)!r} exists and is no GGUF file, which alone is replaced: give a fresh name"
    )
