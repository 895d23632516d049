"""The decoder of Qwen2.5-VL as a model of vLLM, which is shown what a tower has made of images.

Imports vLLM, so it is itself imported late. It stands for vLLM's own class of that model, which has
the tower inside and a processor beside it. Here both are the trainer's (`engine/images`), and that
has four consequences: the sampler sees the numbers that the trainer sees, expanded prompts come as
they are, parameters have the names of a plain decoder, and nothing imports torchvision, which
vLLM's class does. Not verified on a GPU.
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
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)

from rolemesh.engine.images.positions import mrope_positions
from rolemesh.engine.images.prompt_images import Grid

ARCHITECTURE = "RolemeshImageDecoder"
"""Name of the class below in vLLM's registry."""

MODALITY = "image"
"""What vLLM calls the kind of input."""

FEATURES = "features"
"""Name of the tower's output among what vLLM hands on: [F, D] of each image."""

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


@MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_Limits, dummy_inputs=_NoInputs)
class ImageDecoder(Qwen2ForCausalLM, SupportsMultiModal, SupportsMRoPE):  # type: ignore[misc]
    """Qwen2 whose tokens turn in three dimensions, and where features stand for placeholders."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._merge = int(vllm_config.model_config.hf_config.vision_config.spatial_merge_size)

    def embed_multimodal(self, **given: Any) -> Sequence[torch.Tensor]:
        """Hands the features of images on: [F, D] each."""
        return list(given[FEATURES])

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeds tokens, with features in the places of images."""
        # Qwen2ForCausalLM has a method of this name too, which knows of no images.
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
        positions_3T = mrope_positions(len(input_tokens), starts, grids, self._merge)
        return positions_3T, int(positions_3T.max()) + 1 - len(input_tokens)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the decoder's weights, by its own names or those of files; leaves the tower's."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=_NAMES)
        return loaded


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
    return {"architectures": [ARCHITECTURE], "text_config": text}


def register_image_model() -> None:
    """Makes the class known to vLLM in this process."""
    ModelRegistry.register_model(ARCHITECTURE, ImageDecoder)
