"""Adapters that PEFT itself makes and saves, over tiny bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 8.0


def peft_model(
    base: Path, *, seed: int = 0, auto: Any = AutoModelForCausalLM, **config: Any
) -> Any:
    """A base with an adapter whose B is not zero, so that A has a gradient.

    Args:
        base: folder of the base.
        seed: of A and B.
        auto: transformers' auto class.
        **config: of peft.LoraConfig, over rank 4, alpha 8 and all linear layers.

    Returns:
        peft's model, float32.
    """
    lm = auto.from_pretrained(base, dtype=torch.float32)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", **config}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(lm, peft.LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model.eval()


def write_adapter(folder: Path, base: Path, **options: Any) -> Path:
    """Saves such a model's adapter, as PEFT does."""
    peft_model(base, **options).save_pretrained(folder)
    return folder


def plain_name(name: str) -> str:
    """Ours, of a parameter of peft's model with its one adapter."""
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")
