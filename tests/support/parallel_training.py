"""One trainer spread over ranks, and what it did as if one rank had done it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import TypeAdapter
from support.rank_processes import RankContext
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.boxes import train_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import (
    AnyOptimizerSpec,
    ClassifierRewardSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
)
from rolemesh.engine.train.expert_loads import LayerLoads
from rolemesh.engine.train.optimizers.host_moments import MOMENTS
from rolemesh.engine.train.trainer import Trainer

Tensors = dict[str, torch.Tensor]

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient: float32 sums in another order (over slices, over rows
that lie on other ranks). With weights as wide as these, one rank's own gradients are 1.3e-6 from
float64 (test_trainer), and both sides err."""
STEP_TOLERANCE = 5e-6
"""Absolute, of a weight after three steps of 1e-3. Sums in another order moved none by more than
7e-7 in any family and layout of `test_families`. With an eps of 1e-6 one number in ten thousand was
off by 2e-5 to 5e-5: see EPS."""
EPS = 1e-4
"""Of AdamW. Steps of gradients far below it follow the gradient, and not its sign alone: a number
that nearly cancels (1e-7 beside ones of 0.1) would else move a weight by what it was rounded to,
and one that is too large or too small by a factor would not show."""
WHOLE_STEPS = {"micro_batch_tokens": 1024}
"""Fields of a ModelSpec with which a step is one pass: what several are together, others prove
(test_parallel_training, test_routing)."""
METRIC_TOLERANCE = 1e-5
"""Relative (absolute below 1): sums of float32 numbers that differ in their last bits."""


@dataclass(frozen=True)
class Job:
    """What every rank is told to train."""

    folder: Path
    batch: Experience
    loss: LossSpec
    kind: Literal["policy", "critic", "reward"] = "policy"
    layout: TrainLayout = field(default_factory=TrainLayout)
    mini_batch_rows: int = 3
    rows_per_unit: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    """Further fields of the ModelSpec."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of the optimizer's spec."""
    average: float | None = None
    """Of the moving average of a policy; None: none is kept."""


@dataclass
class Trained:
    """What came of it: of one rank's part, or, joined, of the whole model."""

    metrics: dict[str, float]
    """Of the update."""
    gradients: list[Tensors]
    """Of each optimizer step, before clipping."""
    weights: Tensors
    moments: dict[str, Tensors]
    shape: DecoderShape
    average: Tensors = field(default_factory=dict)
    """Of the weights; empty where none is kept."""
    expert_loads: list[LayerLoads] = field(default_factory=list)
    """Of all steps; empty of a model without experts."""


def make_trainer(job: Job, at: RankContext, mesh: Any) -> Trainer:
    """The trainer of one rank."""
    torch.manual_seed(0)
    spec = ModelSpec.model_validate(
        {"path": job.folder, "compute_dtype": "float32", "micro_batch_tokens": 24, **job.model}
    )
    optimizer = _optimizer(job.optimizer)
    if job.kind == "reward":
        return Trainer.reward(ClassifierRewardSpec(model=spec, label=1), optimizer, mesh=mesh)
    if job.kind == "policy":
        return Trainer.policy(spec, optimizer, mesh=mesh, average=job.average)
    trainer = Trainer.critic(spec, optimizer, mesh=mesh)
    if job.kind == "critic":
        # A head of zeros would hide the backbone's gradients. Drawn whole on every rank.
        name = "score.weight"
        head = dict(trainer.named_weights()).get(name)
        if head is not None:
            whole = torch.empty(1, trainer.model.shape.hidden_size)  # type: ignore[union-attr]
            torch.nn.init.normal_(whole, std=0.1, generator=torch.Generator().manual_seed(1))
            head.copy_(whole[: len(head)] if mesh.fsdp.is_first else whole[:0])
    return trainer


def _optimizer(given: dict[str, Any]) -> AnyOptimizerSpec:
    eps = {"adamw": {"eps": EPS}} if given.get("type") == "muon" else {"eps": EPS}
    found: AnyOptimizerSpec = TypeAdapter(AnyOptimizerSpec).validate_python(
        {"learning_rate": 1e-3, **eps, **given}
    )
    return found


def train(at: RankContext, job: Job) -> Trained:
    """Makes the job's optimizer steps as one rank."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        gradients = record_gradients(trainer)
        metrics = update_whole(
            trainer,
            job.batch,
            job.loss,
            epochs=1,
            mini_batch_rows=job.mini_batch_rows,
            seed=5,
            rows_per_unit=job.rows_per_unit,
        )
        return part_of(trainer, metrics, gradients)


def record_gradients(trainer: Trainer) -> list[Tensors]:
    """Keeps the gradients of each coming step, summed over the ranks."""
    steps: list[Tensors] = []
    gradients = trainer._gradients
    norm = gradients.norm

    def recording() -> Any:
        steps.append(
            {
                name: weight.grad.clone()
                for name, weight in gradients.weights.items()
                if weight.grad is not None
            }
        )
        return norm()

    gradients.norm = recording  # type: ignore[method-assign]
    return steps


def part_of(trainer: Trainer, metrics: dict[str, float], gradients: list[Tensors]) -> Trained:
    """What a rank has after its steps."""
    assert trainer.model.shape is not None
    return Trained(
        metrics=metrics,
        gradients=gradients,
        weights={name: weight.clone() for name, weight in trainer.named_weights()},
        moments={
            name: {key: moment.clone() for key, moment in trainer.optimizer_state(name).items()}
            for name in MOMENTS
        },
        shape=trainer.model.shape,
        average={name: one.clone() for name, one in trainer.averaged_weights().items()},
        expert_loads=trainer.take_expert_loads(),
    )


def joined(parts: list[Trained], layout: TrainLayout) -> Trained:
    """Puts the parts together; replicas, metrics and loads must be equal bit by bit."""
    shape = parts[0].shape
    for part in parts:
        assert part.metrics == parts[0].metrics
        assert part.expert_loads == parts[0].expert_loads
    return Trained(
        metrics=parts[0].metrics,
        gradients=[
            whole([part.gradients[step] for part in parts], shape, layout)
            for step in range(len(parts[0].gradients))
        ],
        weights=whole([part.weights for part in parts], shape, layout),
        moments={
            name: whole([part.moments[name] for part in parts], shape, layout) for name in MOMENTS
        },
        shape=shape,
        average=whole([part.average for part in parts], shape, layout) if parts[0].average else {},
        expert_loads=parts[0].expert_loads,
    )


def whole(parts: list[Tensors], shape: DecoderShape, layout: TrainLayout) -> Tensors:
    """Puts local tensors together by the boxes of the planner: of all weights, or of some."""
    plan = train_layout(shape, layout, trained_only=True)
    if all(set(part) < set(shard.shapes) for part, shard in zip(parts, plan.ranks, strict=True)):
        plan = plan.of({name for part in parts for name in part}.__contains__)
    found = {
        name: torch.full(parameter.shape, torch.nan) for name, parameter in plan.manifest.items()
    }
    for part, shard in zip(parts, plan.ranks, strict=True):
        shapes = {name: tuple(tensor.shape) for name, tensor in part.items()}
        assert shapes == dict(shard.shapes), {
            name: (shapes.get(name), shard.shapes.get(name))
            for name in shapes.keys() | shard.shapes.keys()
            if shapes.get(name) != shard.shapes.get(name)
        }
        for piece in shard.pieces:
            sizes = [stop - start for start, stop in piece.box]
            source = tuple(
                slice(at, at + size) for at, size in zip(piece.origin, sizes, strict=True)
            )
            target = tuple(slice(start, stop) for start, stop in piece.box)
            here, there = part[piece.tensor][source], found[piece.parameter][target]
            assert there.isnan().all() or torch.equal(there, here), piece
            there.copy_(here)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Of two tensors of one shape, relative to the norm of the right one."""
    return float((left.double() - right.double()).norm() / right.double().norm().clamp_min(1e-12))


def assert_gradients_agree(found: list[Tensors], expected: list[Tensors]) -> None:
    """Those of the first of three steps, by their norms."""
    assert len(found) == len(expected) == 3
    # The first step's alone: later ones are gradients of weights that already differ.
    assert found[0].keys() == expected[0].keys()
    for name, gradient in expected[0].items():
        assert distance(found[0][name], gradient) < GRADIENT_TOLERANCE, name


def assert_metrics_agree(found: Trained, expected: Trained) -> None:
    """All but the share of tokens computed: what rows share, and fillers, depend on the layout.

    Loads of experts are whole numbers, and equal.
    """
    assert found.expert_loads == expected.expert_loads
    assert found.metrics.keys() == expected.metrics.keys()
    for name in expected.metrics.keys() - {"computed_fraction"}:
        assert found.metrics[name] == pytest.approx(
            expected.metrics[name], rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE
        ), name


def assert_agree(found: Trained, expected: Trained) -> None:
    """Metrics, gradients and weights of three steps."""
    assert_metrics_agree(found, expected)
    assert_gradients_agree(found.gradients, expected.gradients)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=STEP_TOLERANCE)


def policy_job(folder: Path, loss: LossSpec) -> Job:
    """A tiny Llama, written to the folder, and a batch that it scored nearly alike."""
    write_tiny_llama(folder, seed=4)
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), loss)


def near_policy(batch: Experience, scored: Column, seed: int = 0) -> Experience:
    """A batch whose old log-probs are near the trainer's, so that some ratios are clipped.

    Its tokens were sampled by weights of three versions.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(scale: float) -> Column:
        noise_N = scale * torch.randn(len(scored.values), generator=generator)
        return Column(ColumnKind.COMPLETION, scored.values + noise_N, scored.offsets)

    versions = Column(
        ColumnKind.COMPLETION, -(torch.arange(len(scored.values)) % 3), scored.offsets
    )
    return batch | Experience(
        {
            "logprobs": moved(0.3),
            "reference_logprobs": moved(0.5),
            "proximal_logprobs": moved(0.2),
            "policy_versions": versions,
        }
    )
