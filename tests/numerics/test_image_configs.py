"""Configs of public models of images and text, of which no weights are needed."""

from __future__ import annotations

import math
from pathlib import Path

from support.public_models import config_folder

from rolemesh.engine.images.processing import ImageTokens, image_tokens_of
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.model_folders.model_files import read_config_file
from rolemesh.engine.model_folders.pretrained import load_config
from rolemesh.engine.models.images.image_tower import tower_bytes


def test_a_config_of_the_hubs_older_form_is_read(tmp_path: Path) -> None:
    """Sizes of Qwen2.5-VL-3B: 3.09 billion parameters of text, 668.7 million of the tower."""
    path = config_folder(tmp_path, "Qwen2.5-VL-3B-Instruct")
    config = load_config(path)
    assert (config.model_type, config.tie_word_embeddings) == ("qwen2_5_vl_text", True)
    assert config.rope_parameters["mrope_section"] == [16, 24, 24]
    shapes = (DecoderShape.from_config(one) for one in (config.to_dict(), read_config_file(path)))
    for shape in shapes:
        manifest = shape.manifest("bfloat16")
        assert sum(math.prod(one.shape) for one in manifest.values()) == 3_085_938_688
    assert tower_bytes(path, "cuda") == 2 * 668_684_288
    assert image_tokens_of(path) == ImageTokens(151655, 2)


def test_a_config_with_a_part_for_the_text_is_read(tmp_path: Path) -> None:
    """Sizes of Qwen3-VL-4B, whose text part is as large as Qwen3-4B."""
    path = config_folder(tmp_path, "Qwen3-VL-4B-Instruct")
    config = load_config(path)
    assert (config.model_type, config.tie_word_embeddings) == ("qwen3_vl_text", True)
    assert config.rope_parameters["mrope_section"] == [24, 20, 20]
    shapes = (DecoderShape.from_config(one) for one in (config.to_dict(), read_config_file(path)))
    for shape in shapes:
        assert shape.num_deepstack_levels == 3
        manifest = shape.manifest("bfloat16")
        assert sum(math.prod(one.shape) for one in manifest.values()) == 4_022_468_096
    assert image_tokens_of(path) == ImageTokens(151655, 2)
