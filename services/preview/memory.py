"""Estimates what the ranks of roles hold: python -m rolemesh.services.preview.memory < QUESTION.

QUESTION is a `Question` in JSON. Prints one JSON object a line, as soon as it is known: "role" with
the memory of a model of a role, "sampler" with that of its vLLM, "error" with what is wrong.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rolemesh.engine.fit.rank_memory import RankMemory, RankWork, estimated
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.model_folders.pretrained import load_config
from rolemesh.engine.models.adapters.adapters import with_adapter
from rolemesh.engine.specs import (
    AdapterSpec,
    AnyOptimizerSpec,
    LayoutSpec,
    LossSpec,
    ModelSpec,
    Numerics,
    Spec,
    VllmSpec,
)


class ModelQuestion(Spec):
    """A model on the ranks of a role."""

    role: str
    kind: Literal["policy", "critic", "reward"]
    model: ModelSpec
    layout: LayoutSpec
    optimizer: AnyOptimizerSpec | None = None
    """None: it is frozen."""
    loss: LossSpec | None = None
    average: float | None = None
    """Of the moving average of what is trained; None: none is kept."""
    numerics: Numerics = "exact"
    row_tokens: int
    """Tokens of the longest row, prompt and completion."""
    prompt_tokens: int
    """Tokens of its prompt."""


class SamplerQuestion(Spec):
    """vLLM on the ranks of a role."""

    role: str
    path: Path
    """Folder of its model."""
    adapter: AdapterSpec | None = None
    """What the actor trains beside it."""
    sampler: VllmSpec
    tp: int
    """Slices of generation."""


class Question(Spec):
    """What to estimate."""

    models: tuple[ModelQuestion, ...] = ()
    samplers: tuple[SamplerQuestion, ...] = ()
    device: Literal["cpu", "cuda"] = "cuda"
    """What the ranks compute on."""
    device_bytes: int | None = None
    """Memory of that GPU; None: not known."""


def main() -> int:
    """Reads the question, estimates, and prints."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    question = Question.model_validate_json(sys.stdin.read())
    for sampler in question.samplers:
        _answer("sampler", sampler.role, lambda one=sampler: _sampler(one))
    for model in question.models:
        _answer("role", model.role, lambda one=model: _model(one, question))
    return 0


def _answer(kind: str, role: str, find: Any) -> None:
    try:
        found = find()
    except (ValueError, RuntimeError) as error:
        kind, found = "error", {"text": str(error)}
    print(json.dumps({"type": kind, "role": role, **found}), flush=True)


def _model(asked: ModelQuestion, question: Question) -> dict[str, Any]:
    work = RankWork(
        kind=asked.kind,
        model=asked.model,
        layout=HybridLayout(asked.layout.layout()),
        optimizer=asked.optimizer,
        loss=asked.loss,
        average=asked.average,
        numerics=asked.numerics,
        row_tokens=asked.row_tokens,
        prompt_tokens=asked.prompt_tokens,
    )
    most: RankMemory = max(
        (
            estimated(replace(work, rank=rank), question.device, question.device_bytes)
            for rank in _unlike_ranks(work.layout)
        ),
        key=lambda found: found.peak,
    )
    return {**asdict(most), "peak": most.peak, "rest": most.rest}


def _unlike_ranks(layout: HybridLayout) -> Iterator[int]:
    """A rank of the first stage and one of the last; the stages between hold less."""
    yield 0
    if layout.train.pp > 1:
        yield layout.train.rank(pp=layout.train.pp - 1, tp=0, dp=0)


def _sampler(asked: SamplerQuestion) -> dict[str, Any]:
    if not (asked.path / "config.json").is_file():
        raise ModelFolderError(
            f"model.path {str(asked.path)!r} has no config.json: put that of the model there "
            "(its weights are not read)"
        )
    config = load_config(asked.path)
    shape = DecoderShape.from_config(config.to_dict())
    if asked.adapter is not None:
        shape = with_adapter(shape, asked.adapter)
    chosen = getattr(config, "num_experts_per_tok", 0) if shape.experts else 0
    found = sampler_memory(shape, asked.sampler, asked.tp, chosen)
    return {**asdict(found), "least": found.least}


if __name__ == "__main__":
    sys.exit(main())
