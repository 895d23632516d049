"""What llama.cpp has to know of a decoder: its settings, and names and order of its weights.

Source of names and keys: the format's own description,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and its package `gguf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

AS_A_FOLDER = "export it as a Hugging Face folder, without --gguf"
"""What a model is exported as that llama.cpp would not compute as transformers does."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor float32 [head_dim / 2] by which llama.cpp divides the frequencies of its rotation."""


class UnwritableModelError(ValueError):
    """A model, or its tokenizer, that is not written as GGUF; says what to do."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp computes a family."""

    name: str
    """What llama.cpp calls it."""
    rotates_neighbours: bool
    """Whether its rotation pairs the elements 2i and 2i + 1 of a head, where transformers pairs i
    and i + head_dim / 2: the rows of queries and keys then stand in that order."""
    has_rope_factors: bool
    """Whether it reads ROPE_FACTORS."""
    has_head_size: bool = True
    """Whether heads may have another size than the width divided by their number."""


_LLAMA = Architecture("llama", rotates_neighbours=True, has_rope_factors=True)

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture(
        "qwen2", rotates_neighbours=False, has_rope_factors=False, has_head_size=False
    ),
    "qwen3": Architecture("qwen3", rotates_neighbours=False, has_rope_factors=False),
}
"""By model_type of transformers."""


class Decoder:
    """A decoder of a known family, as llama.cpp sees it."""

    def __init__(self, config: Any) -> None:
        """Reads a config of transformers.

        Raises:
            UnwritableModelError: llama.cpp would compute something else; names the field.
        """
        family = config.model_type
        if family not in ARCHITECTURES:
            raise UnwritableModelError(
                f"--gguf: the model is of the family {family!r}, and known are "
                f"{', '.join(sorted(ARCHITECTURES))}: {AS_A_FOLDER}"
            )
        self.architecture = ARCHITECTURES[family]
        self._config = config
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        (number,) = (
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name
        )
        self._names = gguf.get_tensor_name_map(number, int(config.num_hidden_layers))
        self._check()
        self.rope_factors = self._rope_factors()
        """Float32 [head_dim / 2], or None where frequencies stay as they are."""

    def _check(self) -> None:
        config = self._config
        if config.hidden_act != "silu":
            raise UnwritableModelError(
                f"--gguf: hidden_act of the model is {config.hidden_act!r}, and llama.cpp computes "
                f"silu for {config.model_type}: {AS_A_FOLDER}"
            )
        size = config.hidden_size // self._heads
        if not self.architecture.has_head_size and self._head_dim != size:
            raise UnwritableModelError(
                f"--gguf: head_dim of the model is {self._head_dim}, and llama.cpp has {size} for "
                f"{config.model_type}, hidden_size / num_attention_heads: {AS_A_FOLDER}"
            )
        kind = self._rope("rope_type", "default")
        known = ("default", "llama3") if self.architecture.has_rope_factors else ("default",)
        if kind not in known:
            raise UnwritableModelError(
                f"--gguf: rope_type of the model is {kind!r}, and known for {config.model_type} "
                f"are {', '.join(known)}: {AS_A_FOLDER}"
            )
        turned = float(self._rope("partial_rotary_factor", 1.0))
        if turned != 1.0:
            raise UnwritableModelError(
                f"--gguf: partial_rotary_factor of the model is {turned:g}, and known is 1: "
                f"{AS_A_FOLDER}"
            )

    def _rope(self, key: str, usual: Any) -> Any:
        found = (self._config.rope_parameters or {}).get(key)
        return usual if found is None else found

    def _rope_factors(self) -> torch.Tensor | None:
        if self._rope("rope_type", "default") == "default":
            return None
        scaled: torch.Tensor
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self._config, torch.device("cpu"))
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        plain = float(self._rope("rope_theta", None)) ** -exponents
        return (plain / scaled.double()).float()

    @property
    def context_length(self) -> int:
        """Tokens up to which llama.cpp computes as transformers does.

        It has no window over these families, so a model with one sees no further than that.
        """
        seen = int(self._config.max_position_embeddings)
        window = getattr(self._config, "sliding_window", None)
        return seen if window is None else min(seen, int(window))

    def settings(self) -> dict[str, int | float]:
        """Values by GGUF key."""
        config, llm = self._config, gguf.Keys.LLM
        attention, rope = gguf.Keys.Attention, gguf.Keys.Rope
        found: dict[str, int | float] = {
            llm.CONTEXT_LENGTH: self.context_length,
            llm.EMBEDDING_LENGTH: int(config.hidden_size),
            llm.BLOCK_COUNT: int(config.num_hidden_layers),
            llm.FEED_FORWARD_LENGTH: int(config.intermediate_size),
            llm.VOCAB_SIZE: int(config.vocab_size),
            attention.HEAD_COUNT: self._heads,
            attention.HEAD_COUNT_KV: self._kv_heads,
            attention.KEY_LENGTH: self._head_dim,
            attention.VALUE_LENGTH: self._head_dim,
            attention.LAYERNORM_RMS_EPS: float(config.rms_norm_eps),
            rope.DIMENSION_COUNT: self._head_dim,
            rope.FREQ_BASE: float(self._rope("rope_theta", None)),
        }
        return {key.format(arch=self.architecture.name): value for key, value in found.items()}

    def stored_name(self, name: str) -> str:
        """What a file calls a parameter.

        Args:
            name: Of transformers, e.g. "model.layers.0.self_attn.q_proj.weight".

        Raises:
            UnwritableModelError: llama.cpp has no such parameter in this family.
        """
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnwritableModelError(
                f"--gguf: llama.cpp has no parameter {name!r} in a {self.architecture.name}: "
                f"{AS_A_FOLDER}"
            )
        return str(found)

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter with its rows in llama.cpp's order.

        Args:
            name: Of transformers.
            tensor: Floating [rows] or [rows, inputs].

        Returns:
            The same type and shape.
        """
        module = name.rpartition(".")[0]
        heads = {"q_proj": self._heads, "k_proj": self._kv_heads}.get(module.rpartition(".")[2])
        if heads is None or not self.architecture.rotates_neighbours:
            return tensor
        halves = tensor.reshape(heads, 2, self._head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
