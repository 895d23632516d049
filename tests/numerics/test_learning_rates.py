"""Learning-rate schedules against transformers' schedulers and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from rolemesh.engine.specs import OptimizerSpec
from rolemesh.engine.train.optimizers.optimizer import Optimizer, scheduled_rate

PEAK, LOW, STEPS = 3e-4, 2e-5, 11
REL = 1e-12
"""Both compute in float64; only the order of a few operations differs."""

THEIRS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "constant": ({"type": "constant"}, "constant_with_warmup", {}),
    "linear": ({"type": "linear"}, "linear", {}),
    "linear with a minimum": (
        {"type": "linear", "min_learning_rate": LOW},
        "polynomial",
        {"lr_end": LOW, "power": 1.0},
    ),
    "cosine": ({"type": "cosine"}, "cosine", {}),
    "cosine with a minimum": (
        {"type": "cosine", "min_learning_rate": LOW},
        "cosine_with_min_lr",
        {"min_lr": LOW},
    ),
}


def spec_of(schedule: dict[str, Any], warmup_steps: int = 0) -> OptimizerSpec:
    if schedule["type"] != "constant":
        schedule = {"optimizer_steps": STEPS, **schedule}
    return OptimizerSpec.model_validate(
        {"learning_rate": PEAK, "warmup_steps": warmup_steps, "schedule": schedule}
    )


def their_rates(name: str, options: dict[str, Any], warmup_steps: int) -> list[float]:
    """Rates of their optimizer steps 0 to STEPS."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=options,
    )
    rates = []
    for _ in range(STEPS + 1):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("case", THEIRS)
def test_rates_are_those_of_transformers_but_for_a_warm_up_one_step_ahead(
    case: str, warmup_steps: int
) -> None:
    schedule, name, options = THEIRS[case]
    theirs = their_rates(name, options, warmup_steps)
    spec = spec_of(schedule, warmup_steps)
    rates = [scheduled_rate(spec, step) for step in range(STEPS + 1)]
    # Theirs spends the first step of a warm-up at 0.
    assert rates[:warmup_steps] == pytest.approx(theirs[1 : warmup_steps + 1], rel=REL)
    assert rates[warmup_steps:] == pytest.approx(theirs[warmup_steps:], rel=REL, abs=1e-20)


def test_a_schedule_without_a_length_is_refused_before_the_first_step() -> None:
    spec = OptimizerSpec.model_validate({"warmup_steps": 2, "schedule": {"type": "cosine"}})
    gradients: Any = None
    with pytest.raises(ValueError, match=r"optimizer\.schedule\.optimizer_steps is not given"):
        Optimizer(spec, gradients)


def test_rates_by_hand() -> None:
    linear = spec_of({"type": "linear", "min_learning_rate": 1e-4, "optimizer_steps": 4})
    assert [scheduled_rate(linear, step) for step in range(6)] == pytest.approx(
        [3e-4, 2.5e-4, 2e-4, 1.5e-4, 1e-4, 1e-4], rel=REL
    )
    cosine = spec_of({"type": "cosine", "optimizer_steps": 6}, warmup_steps=2)
    falling = [PEAK * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(5)]
    assert [scheduled_rate(cosine, step) for step in range(7)] == pytest.approx(
        [PEAK / 2, PEAK, *falling], rel=REL, abs=1e-20
    )


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_stays_at_its_minimum(kind: str) -> None:
    spec = spec_of({"type": kind, "min_learning_rate": LOW})
    assert {scheduled_rate(spec, step) for step in (STEPS, STEPS + 1, 2 * STEPS, 9999)} == {LOW}
