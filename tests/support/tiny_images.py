"""Tiny random models of images and text, with tokenizer and processor; and pictures drawn here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with an image where a part is one."""

SPECIAL = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens 256 to 263; those below are bytes."""

IMAGE_PAD = 256 + SPECIAL.index("<|image_pad|>")


_TEXT = {
    "qwen2_5_vl": {
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    },
    "qwen3_vl": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "rope_theta": 10000.0,
        },
    },
}
_VISION = {
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "fullatt_block_indexes": [1],
        "patch_size": 14,
        "window_size": 112,
    },
    "qwen3_vl": {
        "depth": 3,
        # Unlike the text's, so that no feature is taken for another.
        "hidden_size": 48,
        "patch_size": 16,
        "num_position_embeddings": 36,
        # Two further sets of features: all layers of the first of two stages.
        "deepstack_visual_indexes": [0, 1],
    },
}


def write_tiny_image_model(
    directory: Path, *, family: str = "qwen2_5_vl", seed: int = 0, **text: Any
) -> Path:
    """Writes a whole folder: float32 weights, tokenizer with a chat template, processor.

    Args:
        directory: made if absent.
        family: model_type of the whole model.
        seed: of the random weights.
        **text: over the sizes of the text model below.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    ids = {one: tokenizer.convert_tokens_to_ids(one) for one in SPECIAL}
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    sizes |= _TEXT[family] | text
    config = AutoConfig.for_model(
        family,
        text_config=sizes,
        tie_word_embeddings=sizes["tie_word_embeddings"],
        vision_config={
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": sizes["hidden_size"],
            **_VISION[family],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape) * 0.04)
    model.save_pretrained(directory)
    patch = config.vision_config.patch_size
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2},
        patch_size=patch,
    ).save_pretrained(directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ids["<|im_end|>"]})
    )
    return directory


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def noise(*, width: int = 112, height: int = 84, seed: int = 0) -> np.ndarray:
    """Pixels of a picture, uint8 [height, width, 3]."""
    drawn = np.random.RandomState(seed).rand(height, width, 3) * 255
    return drawn.astype(np.uint8)


def plain(color: tuple[int, int, int], *, width: int = 56, height: int = 56) -> np.ndarray:
    """Pixels of one colour, uint8 [height, width, 3]."""
    return np.full((height, width, 3), color, dtype=np.uint8)


def png(pixels_HWC: np.ndarray) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "PNG")
    return file.getvalue()
