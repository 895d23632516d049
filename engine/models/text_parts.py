"""Text parts of models of images and text, as transformers' classes of decoders.

transformers has the whole model under one head. Here its decoder is a decoder as any other, with
the names that the hub's files have; what its tower makes of images comes in at the embedding
(`engine/images`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel

_TOWER = [r"^(model\.)?visual\."]
"""Of a folder's tensors, those of the tower."""


class _TextPart(Qwen2_5_VLPreTrainedModel):  # type: ignore[misc]
    config_class = Qwen2_5_VLTextConfig
    config: Qwen2_5_VLTextConfig
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar = _TOWER


class Qwen2_5_VLForCausalLM(_TextPart, GenerationMixin):  # type: ignore[misc]
    """The decoder of Qwen2.5-VL with its projection to the vocabulary."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Qwen2_5_VLTextConfig) -> None:
        """Random weights."""
        super().__init__(config)
        self.model = Qwen2_5_VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocabulary], of the last `logits_to_keep` places alone if that is not 0."""
        outputs = self.model(input_ids, **inputs)
        hidden: torch.Tensor = outputs.last_hidden_state
        return CausalLMOutputWithPast(
            logits=self.lm_head(hidden[:, -logits_to_keep or None :]),
            past_key_values=outputs.past_key_values,
        )


class Qwen2_5_VLForTokenClassification(GenericForTokenClassification, _TextPart):  # type: ignore[misc]
    """With a score of each token."""


class Qwen2_5_VLForSequenceClassification(GenericForSequenceClassification, _TextPart):  # type: ignore[misc]
    """With a score of the last token."""


@functools.cache
def register_text_parts() -> None:
    """Lets transformers' auto classes find them by their configs."""
    for auto, model in (
        (AutoModelForCausalLM, Qwen2_5_VLForCausalLM),
        (AutoModelForTokenClassification, Qwen2_5_VLForTokenClassification),
        (AutoModelForSequenceClassification, Qwen2_5_VLForSequenceClassification),
    ):
        # Without this word a model for a config of its own is left out, and nothing said.
        auto.register(Qwen2_5_VLTextConfig, model, exist_ok=True)
