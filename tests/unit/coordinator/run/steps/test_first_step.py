"""What the calls of a first step say of its length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.run.steps.first_step import FirstStep

RECIPES = Path(__file__).parents[5] / "recipes"
ALONE = ("reference=null", "algorithm.policy_loss.kl_in_loss=0",
         "pools={all: {roles: [actor, reward]}}")  # fmt: skip
APART = "pools={a: {roles: [actor, critic, reward]}, b: {roles: [reference]}}"


class MadeStep:
    """A step whose products take what they multiply, at a rate, and other calls what is given."""

    def __init__(self, folder: Path, name: str, *settings: str) -> None:
        (folder / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
        file = [RECIPES / f"{name}.yaml"]
        bare = load_recipe(file, overrides=settings)
        models = [f"{role}.model.path={folder}" for role in bare.roles
                  if hasattr(bare.section(role), "model")]  # fmt: skip
        self.recipe = load_recipe(file, overrides=[*settings, *models])
        self.nodes = list(asyncio.run(plan_step(self.recipe)))
        self.now = 1000.0
        self.told: list[tuple[float, float]] = []
        self.first = FirstStep(
            self.recipe, self.nodes, lambda *told: self.told.append(told), lambda: self.now
        )

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def begin(self, name: str) -> None:
        node = self.node(name)
        node.state, node.started_at = NodeState.RUNNING, self.now
        self.first.on_phase(node.service, node.method, 0, 0)

    def end(self, name: str, seconds: float = 0.0) -> None:
        node = self.node(name)
        if node.started_at is None:
            self.begin(name)
        self.now += seconds
        node.state, node.ended_at = NodeState.DONE, self.now
        if node.method in ("generate", "read"):
            # 64 rows with prompts of 20 tokens, and completions of 5.
            node.num_rows, node.num_tokens = 64, 64 * 25
            node.metrics = {"completion_length/mean": 5.0} if node.method == "generate" else {}
        self.first.on_phase(node.service, "", 0, 0)

    @property
    def seconds(self) -> float | None:
        return self.first.seconds(self.now)


LAYERS, HEAD, SCORES = 4 * (4 * 64 * 64 + 3 * 64 * 128), 512 * 64, 64
"""Parameters that a token of the tiny model is multiplied with."""


def flops(rows: int, head: int, factors: tuple[int, int] = (1, 1)) -> float:
    """Of so many rows of the quickstart, four of which share their prompt."""
    tokens, attention = rows * 5 + rows // 4 * 20, 4 * 4 * 64 * 12.5
    in_head = 2 * rows * 5 * head
    return factors[0] * tokens * (2 * LAYERS + attention) + factors[1] * in_head


PASSES = {
    "critic.compute_values": flops(64, SCORES),
    "reference.compute_logprobs": flops(64, HEAD),
    "critic.update": 2 * flops(32, SCORES, (3, 4)),
    "actor.update": 2 * flops(32, HEAD, (3, 4)),
}


def test_the_first_passes_tell_the_step_by_their_share_of_its_operations(tmp_path: Path) -> None:
    step = MadeStep(tmp_path, "quickstart-ppo", "critic.model.num_layers=4")
    rate = 1e-8
    # What is no product counts as it was, and nothing is known before it was made.
    step.end("actor.generate", 7.0)
    assert step.seconds is None
    step.end("critic.compute_values", rate * PASSES["critic.compute_values"])
    assert step.seconds is None
    step.end("reward.compute_reward", 2.0)
    whole = 7.0 + 2.0 + rate * sum(PASSES.values())
    assert step.seconds == pytest.approx(whole)
    assert step.told[-1] == pytest.approx((whole, step.now - 1000))
    # Half the speed from here on: what was expected becomes longer, pass by pass.
    step.end("reference.compute_logprobs", 2 * rate * PASSES["reference.compute_logprobs"])
    assert step.seconds > whole
    step.end("actor.compute_advantages")
    step.end("critic.update", rate * PASSES["critic.update"])
    step.begin("actor.update")
    step.now += 5.0
    step.first.on_phase("actor", "update: update", 16, 64)
    whole = step.now - 1000 + 15.0
    assert step.seconds == pytest.approx(whole)
    # It says so again, and is no slower for it.
    step.now += 3.0
    step.first.on_phase("actor", "update: update", 16, 64)
    assert step.seconds == pytest.approx(whole)
    step.end("actor.update", 12.0)
    assert step.seconds == pytest.approx(step.now - 1000)


def test_without_a_pass_before_it_an_update_tells_by_how_far_it_is(tmp_path: Path) -> None:
    step = MadeStep(tmp_path, "quickstart-grpo", *ALONE)
    for name in ("actor.generate", "reward.compute_reward", "actor.compute_advantages"):
        step.end(name, 1.0)
    step.begin("actor.update")
    assert (step.seconds, step.told) == (None, [])
    step.now += 2.0
    step.first.on_phase("actor", "update: update", 8, 64)
    assert step.told == [pytest.approx((3.0 + 16.0, 5.0))]


def test_rows_that_are_given_tell_as_well(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("")
    step = MadeStep(tmp_path, "sft", f"actor.data.path={data}")
    step.end(step.nodes[0].name)
    step.begin("actor.update")
    step.now += 1.0
    step.first.on_phase("actor", "update: update", 1, 32)
    assert step.seconds == pytest.approx(32.0)


def test_a_pool_is_known_by_its_own_passes(tmp_path: Path) -> None:
    step = MadeStep(tmp_path, "quickstart-ppo", "critic.model.num_layers=4", APART)
    step.end("actor.generate", 1.0)
    step.end("reward.compute_reward")
    step.begin("critic.compute_values")
    step.end("reference.compute_logprobs", 1.0)
    # The other pool may be of faster devices.
    assert step.seconds is None
    rate = 4.0 / PASSES["critic.compute_values"]
    step.end("critic.compute_values", 3.0)
    updates = PASSES["critic.update"] + PASSES["actor.update"]
    assert step.seconds == pytest.approx(1.0 + 4.0 + rate * updates)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dapo", ()),
        ("async-grpo", ()),
        ("async-grpo", ("schedule.sampler={type: one_step_ahead}",)),
        ("quickstart-ppo", ("schedule.sampler={type: sync, block_rows: 8}",)),
        ("quickstart-ppo", ("schedule.sampler={type: sync, batch_size: 8}",)),
    ],
)
def test_a_step_whose_calls_overlap_or_are_not_known_is_not_guessed(
    tmp_path: Path, name: str, settings: tuple[Any, ...]
) -> None:
    step = MadeStep(tmp_path, name, *settings)
    for node in step.nodes:
        if node.method != "update":
            step.end(node.name, 1.0)
    assert step.told == []


def test_a_model_of_unknown_sizes_is_not_guessed(tmp_path: Path) -> None:
    step = MadeStep(tmp_path, "quickstart-ppo")
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    for node in step.nodes[:-1]:
        step.end(node.name, 1.0)
    assert step.told == []
