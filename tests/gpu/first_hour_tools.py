"""Tools of the first hour's parts: what a part writes, models of the shapes, and updates of them.

None of the parts has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPES = {
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "inner": 8960},
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864},
}
"""Of Qwen2.5, with its vocabulary of 151,936, tied."""
VOCABULARY = 151_936
NEEDED_BYTES = {"1.5B": 45e9, "0.5B": 16e9}
"""Weights, gradients and moments in float32, and room for a pass of 4,096 tokens."""


class Skip(Exception):
    """The part cannot be done here; says why."""


class Found:
    """What a part has found; written to its file at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._path.write_text(json.dumps(self._values))


def needs(*modules: str) -> None:
    """Skips the part unless all of these can be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Skip(f"{name} cannot be imported: {error}") from error


def shape_that_fits() -> str:
    """The largest shape that the first GPU has room for."""
    total = torch.cuda.mem_get_info(0)[1]
    for name, needed in NEEDED_BYTES.items():
        if total >= needed:
            return name
    raise Skip(f"the first GPU has {total / 1e9:.0f} GB: the smallest shape needs 16")


def write_shape(folder: Path, name: str) -> Path:
    """A folder with random bfloat16 weights of the shape, the same ones each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rolemesh.quickstart.tiny_model import VOCAB_SIZE, tiny_tokenizer

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["hidden"] // shape["heads"],
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda", 0):
        model = LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes with the part."""
    with tempfile.TemporaryDirectory(prefix="rolemesh-part-") as folder:
        yield Path(folder)


def make_trainer(folder: Path, **model: Any) -> Any:
    """A policy on the first GPU; `model` are settings of its ModelSpec."""
    from rolemesh.engine.specs import ModelSpec, OptimizerSpec
    from rolemesh.engine.train.trainer import Trainer

    spec = ModelSpec.model_validate({"path": folder, **model})
    return Trainer.policy(spec, OptimizerSpec(), device=torch.device("cuda", 0))


def update(trainer: Any, *, rows: int, tokens: int) -> dict[str, float]:
    """One optimizer step by PPO's loss on rows of that many tokens, a quarter of them prompts."""
    from support.token_batches import token_batch
    from support.updates import update_whole

    from rolemesh.engine.experience import Column, Experience
    from rolemesh.engine.specs import PpoPolicyLossSpec

    prompts = [tokens // 4] * rows
    batch = token_batch(
        prompt_lengths=prompts, completion_lengths=[tokens - tokens // 4] * rows, seed=0
    )
    # What random weights give to every token, so that ratios are near 1.
    like = batch["advantages"]
    logprobs = torch.full_like(like.values, -math.log(VOCABULARY))
    batch |= Experience({"logprobs": Column(like.kind, logprobs, like.offsets)})
    return update_whole(trainer, batch, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=rows, seed=0)
