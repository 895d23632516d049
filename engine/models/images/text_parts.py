"""Text parts of models of images and text, as transformers' classes of decoders.

transformers has the whole model under one head. Here its decoder is a decoder as any other, with
the names that the hub's older files have; what its tower makes of images comes in at the embedding
and behind first layers (`engine/models/images/shown_images.py`).
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
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel

_TOWER = [r"^(model\.)?visual\."]
"""Of a folder's tensors, those of the tower."""


class _Qwen25Part(Qwen2_5_VLPreTrainedModel):  # type: ignore[misc]
    config_class = Qwen2_5_VLTextConfig
    config: Qwen2_5_VLTextConfig
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar = _TOWER


class _Qwen3Part(Qwen3VLPreTrainedModel):  # type: ignore[misc]
    config_class = Qwen3VLTextConfig
    config: Qwen3VLTextConfig
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected: ClassVar = _TOWER


class _CausalLm(nn.Module):
    """A decoder with its projection to the vocabulary; stands before a family's part."""

    decoder_class: ClassVar[type[nn.Module]]
    post_init: Any
    """transformers' own."""
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        """Random weights."""
        super().__init__(config)
        self.model = self.decoder_class(config)
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


class Qwen2_5_VLForCausalLM(_CausalLm, _Qwen25Part, GenerationMixin):  # type: ignore[misc]
    """The decoder of Qwen2.5-VL with its projection to the vocabulary."""

    decoder_class = Qwen2_5_VLTextModel


class Qwen2_5_VLForTokenClassification(GenericForTokenClassification, _Qwen25Part):  # type: ignore[misc]
    """With a score of each token."""


class Qwen2_5_VLForSequenceClassification(GenericForSequenceClassification, _Qwen25Part):  # type: ignore[misc]
    """With a score of the last token."""


class Qwen3VLForCausalLM(_CausalLm, _Qwen3Part, GenerationMixin):  # type: ignore[misc]
    """The decoder of Qwen3-VL with its projection to the vocabulary."""

    decoder_class = Qwen3VLTextModel


class Qwen3VLForTokenClassification(GenericForTokenClassification, _Qwen3Part):  # type: ignore[misc]
    """With a score of each token."""


class Qwen3VLForSequenceClassification(GenericForSequenceClassification, _Qwen3Part):  # type: ignore[misc]
    """With a score of the last token."""


_AUTO = (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoModelForSequenceClassification,
)
_CLASSES = {
    Qwen2_5_VLTextConfig: (
        Qwen2_5_VLForCausalLM,
        Qwen2_5_VLForTokenClassification,
        Qwen2_5_VLForSequenceClassification,
    ),
    Qwen3VLTextConfig: (
        Qwen3VLForCausalLM,
        Qwen3VLForTokenClassification,
        Qwen3VLForSequenceClassification,
    ),
}


@functools.cache
def register_text_parts() -> None:
    """Lets transformers' auto classes find them by their configs."""
    for config, models in _CLASSES.items():
        for auto, model in zip(_AUTO, models, strict=True):
            # Without this word a model for a config of its own is left out, and nothing said.
            auto.register(config, model, exist_ok=True)
