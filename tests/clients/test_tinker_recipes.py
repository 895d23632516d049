"""Tests of tinker-cookbook's recipes as they are: distillation, preferences, an agent with a tool.

What they need from a hub or from services elsewhere is in this process; see the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cookbook import NAME, checkpoints, run_recipe, served_smol

pytestmark = pytest.mark.clients

CHATML = "qwen3_instruct"
"""The cookbook's renderer of ChatML, which is SmolLM2's, too."""

ROUNDING = 1e-4
"""Of a loss of 8 pairs, whose log-probs are sums of up to 20 float32 terms. 3e-7 was seen."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server of SmolLM2."""
    with served_smol(tmp_path_factory.mktemp("smol")) as found:
        yield found


def test_a_student_comes_near_its_teacher(
    variables: dict[str, str], beside_a_tokenizer: Path
) -> None:
    teaching = run_recipe(
        variables,
        beside_a_tokenizer,
        "distillation.off_policy_reasoning",
        renderer_name=CHATML,
        lora_rank=8,
        learning_rate=1e-3,
        lr_schedule="constant",
        batch_size=8,
        max_length=256,
        max_prompts=64,
        buffer_size=64,
        max_steps=4,
    )
    losses = [step["train_mean_nll"] for step in teaching]
    # 6.3 to 1.2 nats a token in four steps; the rows are the same each time.
    assert losses[-1] < losses[0] / 2

    teacher = checkpoints(beside_a_tokenizer / "distillation.off_policy_reasoning")[-1]
    steps = run_recipe(
        variables,
        beside_a_tokenizer,
        "distillation.on_policy_distillation",
        renderer_name=CHATML,
        teacher_model=NAME,
        teacher_checkpoint=teacher["sampler_path"],
        lora_rank=8,
        learning_rate=1e-3,
        groups_per_batch=8,
        group_size=4,
        max_tokens=16,
        max_steps=6,
    )
    divergences = [step["teacher_kl"] for step in steps]
    # 1.24, 1.28, 1.07, 1.07, 0.42, 0.14 nats a token. The first is a mean over
    # about 480 tokens that deviate by 2, so it has a standard deviation of 0.1: without learning
    # half of it is out of reach. Late answers have 3 tokens, so the better of two steps counts.
    assert min(divergences[-2:]) < divergences[0] / 2


def test_preferred_answers_become_likelier(
    variables: dict[str, str], beside_a_tokenizer: Path
) -> None:
    steps = run_recipe(
        variables,
        beside_a_tokenizer,
        "preference.dpo.train",
        renderer_name=CHATML,
        learning_rate=2e-4,
        lr_schedule="constant",
        batch_size=8,
        max_length=256,
        max_steps=4,
    )
    # The sampler tells the reference's log-probs and the trainer the policy's: before a step they
    # are the same, and the loss is that of a coin.
    assert steps[0]["dpo_loss"] == pytest.approx(math.log(2), abs=ROUNDING)
    losses = [step["dpo_loss"] for step in steps]
    # 0.693, 0.365, 0.153, 0.046, each of pairs that no step before has seen. Steps in directions of
    # no meaning would leave the loss about ln 2, and half of the pairs in the wrong order: all 8 in
    # the right one come by chance once in 256.
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2
    assert steps[-1]["accuracy"] == 1
    assert steps[-1]["chosen_reward"] > 0 > steps[-1]["rejected_reward"]
    # Of the test rows, by the samplers of the weights before and behind training.
    assert "test/nll" in steps[0]


def test_an_agent_with_a_tool_earns_more(
    variables: dict[str, str], beside_a_tokenizer: Path
) -> None:
    # One log folder for both, so that the second goes on from the weights of the first.
    log_path = beside_a_tokenizer / "agent"
    shown = run_recipe(
        variables,
        beside_a_tokenizer,
        "chat_sl.train",
        "tinker_search.py",
        log_path=log_path,
        model_name=NAME,
        renderer_name=CHATML,
        dataset="demonstrations.jsonl",
        train_on_what="all_assistant_messages",
        lora_rank=8,
        learning_rate=1e-3,
        batch_size=2,
        num_epochs=2,
        max_steps=6,
    )
    assert shown[-1]["train_mean_nll"] < shown[0]["train_mean_nll"] / 2
    steps = run_recipe(
        variables,
        beside_a_tokenizer,
        "search_tool.train",
        "tinker_search.py",
        log_path=log_path,
        behavior_if_log_dir_exists="resume",
        model_name=NAME,
        renderer_name=CHATML,
        batch_size=4,
        group_size=4,
        n_results=1,
        max_tokens=48,
        max_turns=3,
        learning_rate=3e-4,
        max_steps=3,
    )
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    assert len(rewards) == 3
    # Of 1.5 turns an episode, half a turn is one behind a call of the tool. The base, without the
    # demonstrations, called it in none of 36 episodes.
    assert steps[0]["env/all/turns_per_episode"] > 1.1
    assert all(step["grad_norm"] > 0 for step in steps[:3])
    # 0.05, 0.48, 0.40 and 0.05, 0.20, 0.39 were seen, of 16 episodes each, of which two earn 1 at
    # first: the mean then has a standard deviation of 0.09, so without learning one run in ten has
    # a step that is better by 0.2.
    assert max(rewards[1:]) > rewards[0] + 0.2
