"""Decoders of models of images as models of vLLM, which are shown what a tower has made of images.

Imports vLLM, so it is itself imported late. They stand for vLLM's own classes, which have
the tower inside and a processor beside it. Here both are the trainer's (`engine/images`), and that
has four consequences: the sampler sees the numbers that the trainer sees, expanded prompts come as
they are, parameters have the names of a plain decoder, and nothing imports torchvision, which
vLLM's classes do. Not verified on a GPU.

Shape letters: F tokens of an image, T of a pass, D width, W of all sets of features side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    _merge_multimodal_embeddings,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)

from rolemesh.engine.images.positions import mrope_positions
from rolemesh.engine.images.prompt_images import Grid

MODALITY = "image"
"""What vLLM calls the kind of input."""

FEATURES = "features"
"""Name of the tower's output among what vLLM hands on: [F, W] of each image."""

GRID = "grid"
"""Name of an image's grid there: int64 [3]."""

_NAMES = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "model.visual.": None,
        "visual.": None,
    }
)
"""From those of files, older ones included."""

_REFUSAL = (
    "this endpoint takes images in chat messages alone, as image_url parts with data URLs: send "
    "text or these"
)


class _Limits(BaseProcessingInfo):  # type: ignore[misc]
    """What vLLM asks before there is any image."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        # By this vLLM bounds what it keeps of features; a longer image fits no prompt.
        return {MODALITY: seq_len}

    def validate_num_items(self, modality: str, num_items: int) -> NoReturn:
        # Asked before vLLM opens an address or reads a tensor that a client of an endpoint sends.
        raise VLLMValidationError(_REFUSAL, parameter=modality)


class _NoInputs(BaseDummyInputsBuilder[_Limits]):  # type: ignore[misc]
    """What vLLM would measure memory with."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {}


class _NoProcessor(BaseMultiModalProcessor[_Limits]):  # type: ignore[misc]
    """Requests come with features: there is nothing to process."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *_: object) -> NoReturn:
        raise VLLMValidationError(_REFUSAL)

    def _get_prompt_updates(self, *_: object) -> NoReturn:
        raise VLLMValidationError(_REFUSAL)


class _ImageDecoder:
    """Has features stand for placeholders, and tokens turn in three dimensions.

    Stands before vLLM's class of the decoder.
    """

    merge: int
    """So many patches, squared, are one token."""

    def embed_multimodal(self, **given: Any) -> Sequence[torch.Tensor]:
        """Hands the features of images on: [F, W] each."""
        return list(given[FEATURES])

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeds tokens, with features in the places of images."""
        # The decoders have a method of this name too, which knows of no images.
        embedded: torch.Tensor = SupportsMultiModal.embed_input_ids(
            self, input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )
        return embedded

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions int64 [3, T], and how far those of further tokens are behind their places."""
        shown = sorted(mm_features, key=lambda one: one.mm_position.offset)
        grids: list[Grid] = [tuple(one.data[GRID].data.tolist()) for one in shown]
        starts = [one.mm_position.offset for one in shown]
        positions_3T = mrope_positions(len(input_tokens), starts, grids, self.merge)
        return positions_3T, int(positions_3T.max()) + 1 - len(input_tokens)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the decoder's weights, by its own names or those of files; leaves the tower's."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=_NAMES)
        return loaded


@MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_Limits, dummy_inputs=_NoInputs)
class Qwen2ImageDecoder(_ImageDecoder, Qwen2ForCausalLM, SupportsMultiModal, SupportsMRoPE):  # type: ignore[misc]
    """The decoder of Qwen2.5-VL."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.merge = vllm_config.model_config.hf_config.vision_config.spatial_merge_size


@MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_Limits, dummy_inputs=_NoInputs)
class Qwen3ImageDecoder(_ImageDecoder, Qwen3ForCausalLM, SupportsMultiModal, SupportsMRoPE):  # type: ignore[misc]
    """The decoder of Qwen3-VL, to whose first layers' outputs further features are added.

    vLLM hands a pass the embedding alone. So what is added waits in a buffer of each of those
    layers, at one address, as graphs of CUDA want it; each embedding writes it anew.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        whole = vllm_config.model_config.hf_config
        super().__init__(vllm_config=vllm_config.with_hf_config(whole.text_config), prefix=prefix)
        self.merge = whole.vision_config.spatial_merge_size
        num_levels = len(whole.vision_config.deepstack_visual_indexes)
        self._width = whole.text_config.hidden_size
        self._num_written = 0
        # vLLM has no pipeline stages here (`ranks.py`): these layers are on every rank.
        self._levels: list[Any] = list(self.model.layers[:num_levels])
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        for layer in self._levels:
            layer.register_buffer("added", torch.zeros(num_tokens, self._width), persistent=False)
            layer.register_forward_hook(_add)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeds tokens, and keeps what is added behind the first layers of the pass."""
        shown = list(multimodal_embeddings or ())
        for layer in self._levels:
            layer.added[: self._num_written].zero_()
        self._num_written = len(input_ids) if shown else 0
        for level, layer in enumerate(self._levels if shown else (), start=1):
            columns = slice(level * self._width, (level + 1) * self._width)
            _merge_multimodal_embeddings(
                layer.added[: len(input_ids)], [one[:, columns] for one in shown], is_multimodal
            )
        first = [one[:, : self._width] for one in shown]
        return super().embed_input_ids(input_ids, first, is_multimodal=is_multimodal)


def _add(layer: Any, _: Any, made: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    hidden_TD, residual_TD = made
    return hidden_TD + layer.added[: len(hidden_TD)], residual_TD


_CLASSES: Mapping[str, type] = MappingProxyType(
    {"qwen2_5_vl_text": Qwen2ImageDecoder, "qwen3_vl_text": Qwen3ImageDecoder}
)
"""By model_type of the text part."""

ENGINE_ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {
        # There is no tower whose memory vLLM would have to measure.
        "skip_mm_profiling": True,
        # Images are processed outside.
        "mm_processor_cache_gb": 0,
    }
)
"""What vLLM's EngineArgs need more for a model of images and text."""


def config_overrides(config: Any) -> dict[str, Any]:
    """Over the fields of such a folder's config.json.

    Args:
        config: Of the decoder, transformers'.
    """
    # Whether the embedding is tied is said of the whole model, and vLLM asks the text part.
    text = {"tie_word_embeddings": config.tie_word_embeddings}
    if config.model_type == "qwen3_vl_text":
        # transformers' class interleaves whatever a config says; without these words vLLM's does
        # not.
        rotations = {"mrope_section": [24, 20, 20], **config.rope_parameters}
        text["rope_parameters"] = {**rotations, "mrope_interleaved": True}
    return {"architectures": [_architecture(config.model_type)], "text_config": text}


def register_image_model() -> None:
    """Makes the classes known to vLLM in this process."""
    for family, model in _CLASSES.items():
        ModelRegistry.register_model(_architecture(family), model)


def _architecture(family: str) -> str:
    """Name of a class in vLLM's registry."""
    return f"Rolemesh{_CLASSES[family].__name__}"
