"""Every algorithm learns: coordinator and services as they are, on tasks whose optimum is known.

The tiny policy begins with random weights: about a tenth of the characters that it writes are the
letters that earn something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.counting_classifier import write_counting_classifier
from support.learning_runs import LearnedRun, learn, service_processes, write_rows
from support.learning_tasks import (
    LETTERS,
    LIKED,
    OTHER,
    PROMPTS,
    VOCAB_SIZE,
    WORD_LENGTH,
    demonstrations,
    given_recipe,
    judgements,
    model_of,
    num_liked,
    pairs,
    prompt_text,
    sampled_recipe,
    word_logprobs,
    write_task,
)
from support.tiny_models import tiny_tokenizer

from rolemesh.coordinator.algorithms.registry import ALGORITHMS
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.sources import ClassifierReward
from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = (1, 2, 3)
"""Each with a model of its own, data of its own, and draws of its own."""

STEPS = 60
DAPO_STEPS = 26
"""DAPO wants groups whose rewards differ: a run fails once the policy has mastered all of them, as
it has after 30 to 40 steps here."""
DAPO_LEVEL = 0.8
"""What is certain by then."""
NUM_LAST = 5
"""Steps at the end over which a curve's level is taken: 160 completions."""
FIRST_LEVEL = 0.2
"""A random policy earns less: a tenth of 256 bytes are upper-case letters."""
LEVEL = 0.9
"""Of an optimum of 1, which no policy that still explores reaches quite."""

HELD_OUT_PAIRS = 200
ACCURACY = 0.85
"""Of held-out pairs. The rule is without exception, so the optimum is 1; but words that differ by
one letter of six are told apart only once all 26 letters are known. IPO, which draws the margins of
all pairs to one number, comes to 0.91 here, the others to 0.94 and above."""

NLL_ABOVE = 0.1
"""Nats a token above the entropy of the demonstrations: what 60 steps leave to learn."""
NLL_BELOW = 0.05
"""Nats a token below it: nobody knows more than the entropy, but the words of the last steps are
100 draws, which a policy that still leans to one letter or another may happen to fit."""

COST_LIMIT = 0.25
COST_TOLERANCE = 0.08
"""The policy is drawn to and fro around the limit by draws and multiplier: their amplitude."""
NUM_LAST_COSTS = 20
"""Steps over which that evens out."""

SAMPLED: Mapping[str, Mapping[str, Any]] = {
    "ppo": {},
    # Several rewards have a test of their own.
    **{name: {} for name in POLICY_GRADIENTS if name != "gdpo"},
    "dr_grpo": {
        "policy_loss": {
            "type": "ppo_policy", "aggregation": "seq_sum_norm", "norm_length": WORD_LENGTH,
        },
    },
    "pass_at_k": {"advantages": {"k": 2}},
    "grpo without equal groups": {"advantages": {"type": "grpo", "zero_variance": "left_out"}},
    "dapo": {},
    "remax": {},
    "online_dpo": {"policy_loss": {"type": "dpo", "beta": 0.05}},
}  # fmt: skip


PREFERENCE: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"type": "dpo"},
    "cdpo": {"type": "dpo", "policy_loss": {"type": "dpo", "label_smoothing": 0.1}},
    "ipo": {"type": "dpo", "policy_loss": {"type": "dpo", "variant": "ipo"}},
    "kto": {"type": "kto"},
}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of services that outlive the runs."""
    with service_processes(tmp_path_factory.mktemp("services")) as addresses:
        yield addresses


@pytest.fixture(scope="module", params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(scope="module")
def task(seed: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), seed)


def test_no_algorithm_is_left_out() -> None:
    others = {"gdpo", "safe_rlhf", "on_policy_distillation", "dpo", "kto", "sft", "reward_model"}
    assert {name.partition(" ")[0] for name in SAMPLED} | others == ALGORITHMS.keys()


@pytest.mark.parametrize("name", SAMPLED)
async def test_rewards_rise_to_the_optimum(
    name: str, seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    steps, level = (DAPO_STEPS, DAPO_LEVEL) if name == "dapo" else (STEPS, LEVEL)
    recipe = sampled_recipe(
        task,
        {"type": name.partition(" ")[0], **SAMPLED[name]},
        seed=seed,
        steps=steps,
        worth={LETTERS: 1.0},
    )
    run = await learn(recipe, services, tmp_path / "run")
    rewards = run.curve("reward/mean")
    report(name, seed, rewards)
    assert rewards[0] < FIRST_LEVEL
    assert run.last("reward/mean", NUM_LAST) >= level
    assert max(run.curve("reward/max")) <= 1


async def test_gdpo_learns_both_of_two_rewards(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    """Letters earn something, and those that are liked earn something else, on another scale."""
    row_length = len(tiny_tokenizer(VOCAB_SIZE)(prompt_text("a"))["input_ids"]) + WORD_LENGTH
    judge = write_counting_classifier(
        tmp_path / "liked", LIKED, vocab_size=VOCAB_SIZE, scale=100 * row_length / WORD_LENGTH
    )
    recipe = sampled_recipe(task, {"type": "gdpo"}, seed=seed, steps=STEPS, worth={LETTERS: 1.0})
    liked = {"type": "classifier", "model": model_of(judge)}
    recipe["reward"] = [
        {"source": {"type": "environment"}, "name": "letters"},
        {"source": liked, "name": "liked", "weight": 0.5},
    ]
    run = await learn(recipe, services, tmp_path / "run")
    for name, scale in (("letters", 1.0), ("liked", 100.0)):
        curve = [value / scale for value in run.curve(f"reward/{name}/mean")]
        report(f"gdpo {name}", seed, curve)
        assert curve[0] < FIRST_LEVEL
        assert sum(curve[-NUM_LAST:]) / NUM_LAST >= LEVEL


@pytest.mark.parametrize("loss", ["ppo_policy", "distillation"])
async def test_a_policy_learns_from_a_teacher_alone(
    loss: str, seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    """The teacher is what GRPO made of the same model. The reward is told and trains nothing."""
    recipe = sampled_recipe(task, {"type": "grpo"}, seed=seed, steps=STEPS, worth={LETTERS: 1.0})
    teacher = await learn(recipe, services, tmp_path / "teacher")
    recipe = sampled_recipe(
        task,
        {"type": "on_policy_distillation", "policy_loss": {"type": loss}},
        seed=seed,
        steps=STEPS,
        worth={LETTERS: 1.0},
    )
    recipe["teacher"] = {"model": model_of(teacher.model)}
    run = await learn(recipe, services, tmp_path / "run")
    rewards, gaps = run.curve("reward/mean"), run.curve("kl/teacher")
    report(f"on_policy_distillation {loss}", seed, rewards)
    assert rewards[0] < FIRST_LEVEL
    assert run.last("reward/mean", NUM_LAST) >= LEVEL
    assert run.last("kl/teacher", NUM_LAST) < gaps[0] / 4


async def test_muon_comes_to_the_optimum_with_the_rate_of_adamw(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    recipe = sampled_recipe(task, {"type": "grpo"}, seed=seed, steps=STEPS, worth={LETTERS: 1.0})
    recipe["actor"]["optimizer"] = {"type": "muon", **recipe["actor"]["optimizer"]}
    run = await learn(recipe, services, tmp_path / "run")
    report("grpo, muon", seed, run.curve("reward/mean"))
    assert run.curve("reward/mean")[0] < FIRST_LEVEL
    assert run.last("reward/mean", NUM_LAST) >= LEVEL


async def safe_run(
    limit: float, seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> LearnedRun:
    """Liked letters earn twice what others do, and their share is the cost."""
    row_length = len(tiny_tokenizer(VOCAB_SIZE)(prompt_text("a"))["input_ids"]) + WORD_LENGTH
    judge = write_counting_classifier(
        tmp_path / "cost", LIKED, vocab_size=VOCAB_SIZE, scale=row_length / WORD_LENGTH
    )
    recipe = sampled_recipe(
        task,
        {
            "type": "safe_rlhf",
            "advantages": {
                "cost_limit": limit,
                "initial_multiplier": 0.5,
                "multiplier_rate": 0.3,
                # Whitened advantages are as large near the optimum as far from it: then the policy
                # jumps from one side of the limit to the other. The KL makes it give way smoothly.
                "whiten": False,
                "kl_in_reward": {"type": "fixed", "coefficient": 0.015},
            },
        },
        seed=seed,
        steps=80,
        worth={LIKED: 1.0, OTHER: 0.5},
    )
    recipe["cost"] = {"source": {"type": "classifier", "model": model_of(judge)}}
    return await learn(recipe, services, tmp_path / "run")


async def test_safe_rlhf_holds_its_limit(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    run = await safe_run(COST_LIMIT, seed, task, services, tmp_path)
    report("safe_rlhf", seed, run.curve("cost/mean"))
    # It went for the reward, and the multiplier brought it back.
    assert max(run.curve("cost/mean")) > COST_LIMIT + COST_TOLERANCE
    assert abs(run.last("cost/mean", NUM_LAST_COSTS) - COST_LIMIT) <= COST_TOLERANCE
    assert run.last("reward/mean", NUM_LAST_COSTS) >= COST_LIMIT


async def test_without_the_limit_the_cost_is_far_above_it(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    run = await safe_run(1.0, seed, task, services, tmp_path)
    report("safe_rlhf without limit", seed, run.curve("cost/mean"))
    assert run.last("cost/mean", NUM_LAST_COSTS) >= 2 * COST_LIMIT


async def learn_given(
    algorithm: Mapping[str, Any],
    rows: list[dict[str, Any]],
    seed: int,
    task: Path,
    services: dict[str, str],
    tmp_path: Path,
) -> LearnedRun:
    """Learns from the rows, each once."""
    data = write_rows(tmp_path / "rows.jsonl", rows)
    recipe = given_recipe(
        task, algorithm, data, seed=seed, steps=STEPS, rows_per_step=len(rows) // STEPS
    )
    return await learn(recipe, services, tmp_path / "run")


@pytest.mark.parametrize("name", PREFERENCE)
async def test_held_out_pairs_are_told_apart_by_the_implied_reward(
    name: str, seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    rows = judgements(seed, 40 * STEPS) if name == "kto" else pairs(seed, 32 * STEPS)
    run = await learn_given(PREFERENCE[name], rows, seed, task, services, tmp_path)
    held_out = pairs(1000 + seed, HELD_OUT_PAIRS)
    margin = torch.zeros(HELD_OUT_PAIRS)
    for sign, field in ((1, "chosen"), (-1, "rejected")):
        words = [(pair["prompt"], pair[field]) for pair in held_out]
        margin += sign * word_logprobs(run.model, words)
        margin -= sign * word_logprobs(task / "model", words)
    accuracy = float((margin > 0).double().mean())
    report(name, seed, [accuracy])
    assert accuracy >= ACCURACY


async def test_a_reward_model_tells_held_out_pairs_apart(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    rows = pairs(seed, 32 * STEPS)
    run = await learn_given({"type": "reward_model"}, rows, seed, task, services, tmp_path)
    judge = ClassifierReward(
        ClassifierRewardSpec(model=ModelSpec(path=run.model, compute_dtype="float32")),
        torch.device("cpu"),
        RankMesh.single(),
    )
    held_out = pairs(1000 + seed, HELD_OUT_PAIRS)
    prompts = Column.text([prompt_text(pair["prompt"]) for pair in held_out])
    chosen, rejected = (
        judge.score(
            Experience(
                {
                    "prompt_text": prompts,
                    "completion_text": Column.text([pair[field] for pair in held_out]),
                }
            ),
            lambda *_: None,
        )
        for field in ("chosen", "rejected")
    )
    accuracy = float((chosen > rejected).double().mean())
    report("reward_model", seed, [accuracy])
    assert accuracy >= ACCURACY


async def test_fine_tuning_comes_down_to_the_entropy_of_what_it_is_shown(
    seed: int, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    rows = demonstrations(seed, 20 * STEPS)
    run = await learn_given({"type": "sft"}, rows, seed, task, services, tmp_path)
    # Letters are drawn evenly; the end of a word is certain.
    entropy = WORD_LENGTH * math.log(len(LIKED)) / (WORD_LENGTH + 1)
    reached = run.last("nll", NUM_LAST)
    report("sft", seed, [value - entropy for value in run.curve("nll")])
    assert run.curve("nll")[0] > 2 * entropy
    assert entropy - NLL_BELOW <= reached <= entropy + NLL_ABOVE


def test_the_rules_of_the_tasks_are_what_they_say() -> None:
    assert all(num_liked(pair["chosen"]) > num_liked(pair["rejected"]) for pair in pairs(0, 50))
    labels = [row["label"] for row in judgements(0, 200)]
    assert 0 < sum(labels) < 200
    assert all(num_liked(row["completion"]) == WORD_LENGTH for row in demonstrations(0, 50))
    assert not set(LETTERS) & set("".join(prompt_text(letter) for letter in PROMPTS))


def report(name: str, seed: int, curve: list[float]) -> None:
    """For whoever wants to see curves: pytest -s."""
    shown = " ".join(f"{value:.2f}" for value in curve[:: max(1, len(curve) // 12)])
    end = sum(curve[-NUM_LAST:]) / len(curve[-NUM_LAST:])
    print(f"\n{name} seed {seed}: {shown}; end {end:.3f}")
