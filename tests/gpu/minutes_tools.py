"""Tools of the parts: what a part writes, the model that is measured, its updates, and timing."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
IS_REHEARSAL = os.environ.get("GPU_MINUTES_REHEARSAL") == "1"
"""Tiny shapes on the CPU, to see that all of it runs."""


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

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def unrehearsed(self, what: str, reason: str) -> None:
        """Notes what a CPU cannot show: nothing stands in for it."""
        self["not in a rehearsal"] = self._values.get("not in a rehearsal", {}) | {what: reason}


@dataclass(frozen=True)
class Shape:
    """Of the model that is measured."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tokens: int
    """Of a step."""


SHAPE = (
    Shape(2, 64, 4, 2, 32, 128, 512, tokens=256)
    if IS_REHEARSAL
    # Qwen3-0.6B, whose embeddings are tied.
    else Shape(28, 1024, 16, 8, 128, 3072, 151_936, tokens=16_384)
)

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, as NVIDIA gives them (SXM)."""


def needs(*modules: str) -> None:
    """Skips the part unless all of these can be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Skip(f"{name} cannot be imported: {error}") from error


def use_gpu() -> torch.device:
    """The first GPU, selected as a service does it; in a rehearsal the CPU."""
    from rolemesh.engine.hardware.devices import use_device

    device = torch.device("cpu") if IS_REHEARSAL else torch.device("cuda", 0)
    use_device(device)
    return device


def synchronize() -> None:
    """Waits for all that was given to the device."""
    if not IS_REHEARSAL:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any]) -> float:
    """Of one call, from an idle device to an idle device."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def median_s(work: Callable[[], Any], times: int = 3, warm_ups: int = 1) -> float:
    """Of several calls, after some that are not counted."""
    for _ in range(warm_ups):
        work()
    return statistics.median(seconds_of(work) for _ in range(times))


def peak_flops() -> float | None:
    """Of the first GPU; None where it is not known."""
    if IS_REHEARSAL:
        return None
    name = torch.cuda.get_device_name(0)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes with the part."""
    with tempfile.TemporaryDirectory(prefix="part-") as folder:
        yield Path(folder)


def model_folder() -> Path:
    """Random bfloat16 weights of the shape, the same ones for all parts of a call."""
    shared = os.environ.get("GPU_MINUTES_SHARED") or tempfile.mkdtemp(prefix="rm-gpu-")
    folder = Path(shared) / "model"
    if folder.exists():
        return folder
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rolemesh.quickstart.tiny_model import VOCAB_SIZE, tiny_tokenizer

    config = Qwen3Config(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.inner,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with use_gpu():
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    written = folder.with_name("model.part")
    model.save_pretrained(written)
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(written)
    # Whole at once: a part that is ended here leaves the next one none.
    written.rename(folder)
    return folder


def make_trainer(numerics: str = "exact", **model: Any) -> Any:
    """A policy on the device; `model` are settings of its ModelSpec."""
    from rolemesh.engine.models.causal_lm import CausalLm
    from rolemesh.engine.specs import ModelSpec, OptimizerSpec
    from rolemesh.engine.train.trainer import Trainer

    spec = ModelSpec.model_validate({"path": model_folder(), **model})
    device = use_gpu()
    return Trainer(CausalLm(spec, device=device, numerics=numerics), OptimizerSpec())  # type: ignore[arg-type]


def rows_of(prompts: Sequence[int], completions: Sequence[int], *, group: int = 1) -> Any:
    """Rows of random tokens with what PPO's loss reads; `group` neighbours share their prompt."""
    from support.token_batches import token_batch, with_shared_prompts

    from rolemesh.engine.experience import Column, Experience

    batch = token_batch(
        prompt_lengths=prompts,
        completion_lengths=completions,
        seed=sum(completions),
        vocab_size=SHAPE.vocabulary,
    )
    if group > 1:
        batch = with_shared_prompts(batch, group)
    # What random weights give to every token, so that ratios are near 1.
    like = batch["advantages"]
    logprobs = torch.full_like(like.values, -math.log(SHAPE.vocabulary))
    return batch | Experience({"logprobs": Column(like.kind, logprobs, like.offsets)})


def update(trainer: Any, batch: Any) -> dict[str, float]:
    """One optimizer step by PPO's loss on all rows."""
    from support.updates import update_whole

    from rolemesh.engine.specs import PpoPolicyLossSpec

    rows = batch.num_rows
    return update_whole(trainer, batch, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=rows, seed=0)


def drop_memory() -> None:
    """Frees what earlier trainers held, so that the next one's peak is its own."""
    from rolemesh.engine.hardware.devices import give_back_memory

    give_back_memory(use_gpu())
    if not IS_REHEARSAL:
        torch.cuda.reset_peak_memory_stats()
