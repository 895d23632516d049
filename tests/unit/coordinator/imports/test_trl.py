"""Configurations of TRL as settings of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from support.imports import of_trl, recipe_of, tree_of

from rolemesh.coordinator.imports.source import ImportedError

BASE: dict[str, Any] = {
    **{"model_name_or_path": "/models/mine", "dataset_name": "rows.jsonl", "max_steps": 40},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4},
    **{"max_prompt_length": 100, "max_completion_length": 200, "reward_funcs": ["mine.judge"]},
}


def test_batches_of_devices_become_prompts_and_completions() -> None:
    made = recipe_of(of_trl({**BASE, "num_iterations": 2, "steps_per_generation": 4}, gpus=2))
    # 2 devices make 8 * 4 rows each in a generation, and an optimizer step of 8 * 2 each.
    assert made.run.prompts_per_step == 8 * 4 * 2 / 4
    assert made.algorithm.mini_batch_rows == 8 * 2 * 2
    # 40 optimizer steps, of which a step here makes 2 * 2.
    assert made.run.steps == 10


def test_groups_have_to_come_out_even() -> None:
    with pytest.raises(ImportedError, match="num_generations is 5, which does not divide the 16"):
        of_trl({**BASE, "num_generations": 5})


def test_passes_need_the_rows_of_the_data() -> None:
    passes = {**BASE, "max_steps": -1, "num_train_epochs": 2}
    assert "run.steps" in of_trl(passes).missing
    assert recipe_of(of_trl(passes, rows=400)).run.steps == 2 * 400 / 4


@pytest.mark.parametrize(
    ("given", "mean"),
    [
        ({}, {"aggregation": "token_mean"}),
        ({"loss_type": "grpo"}, {"aggregation": "seq_mean_token_mean"}),
        ({"loss_type": "dr_grpo"}, {"aggregation": "seq_sum_norm", "norm_length": 200}),
    ],
    ids=["dapo", "grpo", "dr_grpo"],
)
def test_means_of_the_loss(given: dict[str, Any], mean: dict[str, Any]) -> None:
    loss = tree_of(of_trl({**BASE, **given}))["algorithm"]["policy_loss"]
    assert {key: loss[key] for key in loss if key in ("aggregation", "norm_length")} == mean


def test_clips_kl_and_deviation() -> None:
    tree = tree_of(
        of_trl(
            {**BASE, "epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0, "beta": 0.04}
            | {"scale_rewards": False}
        )
    )["algorithm"]
    loss = tree["policy_loss"]
    assert (loss["clip_low"], loss["clip_high"], loss["dual_clip"]) == (0.1, 0.3, 4.0)
    assert loss["kl_in_loss"] == 0.04
    assert tree["advantages"] == {"normalize_std": False}


def test_sequence_ratios_and_clipped_weights() -> None:
    sequence = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4}
    assert tree_of(of_trl({**BASE, **sequence}))["algorithm"]["type"] == "gspo"
    weights = tree_of(of_trl({**BASE, "loss_type": "cispo", "epsilon_high": 5.0}))["algorithm"]
    assert weights["type"] == "cispo"
    # TRL's bound is that of the weight, ours is what lies above 1.
    assert weights["policy_loss"]["clip_high"] == 4.0


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({}, {"type": "masking", "level": "sequence", "low": 0.0, "high": 3.0}),
        ({"mode": "token_truncate"}, {"type": "token_truncation", "cap": 3.0}),
        ({"mode": "sequence_truncate", "clip_max": 2}, {"type": "sequence_truncation", "cap": 2.0}),
        (
            {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0},
            {"type": "masking", "level": "token", "low": 0.5, "high": 5.0},
        ),
        ({"correction": False}, None),
    ],
    ids=["default", "tokens", "rows", "masked tokens", "off"],
)
def test_weights_against_the_sampler(given: dict[str, Any], form: dict[str, Any] | None) -> None:
    prefix = "vllm_importance_sampling_"
    settings = {f"{prefix}{name}": value for name, value in given.items()}
    made = of_trl({**BASE, "use_vllm": True, **settings})
    assert tree_of(made)["algorithm"].get("off_policy") == form
    assert not [name for name in made.lost if name.startswith(prefix)]
    assert recipe_of(made).algorithm.off_policy is not None or form is None


def test_rloo_has_its_own_defaults() -> None:
    values = {key: value for key, value in BASE.items() if key != "num_generations"}
    made = recipe_of(of_trl({**values, "trainer": "rloo"}))
    assert made.algorithm.type == "rloo"
    assert made.sampling is not None
    assert made.sampling.samples_per_prompt == 2
    tree = tree_of(of_trl({**values, "normalize_advantages": False}))
    assert tree["algorithm"]["advantages"]["kl_in_reward"]["coefficient"] == 0.05


def test_warm_ups_of_both_kinds() -> None:
    for given, steps in (({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.1}, 4)):
        actor = recipe_of(of_trl({**BASE, **given})).actor
        assert actor is not None
        assert actor.optimizer.warmup_steps == steps
    assert tree_of(of_trl(BASE))["actor"]["optimizer"]["schedule"] == {"type": "linear"}


def test_an_adapter_of_the_script_and_of_peft() -> None:
    lora = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"]}
    made = tree_of(of_trl({**BASE, **lora, "use_rslora": True}))["actor"]["model"]["adapter"]
    assert made == {"rank": 8, "alpha": 16.0, "targets": ["q_proj"], "scaling": "rslora"}
    off = tree_of(of_trl({**BASE, "lora_r": 8}))["actor"]["model"]
    assert "adapter" not in off


def test_samplers() -> None:
    assert tree_of(of_trl(BASE))["actor"]["rollout"]["type"] == "hf"
    vllm = tree_of(of_trl({**BASE, "use_vllm": True, "vllm_gpu_memory_utilization": 0.5}))
    assert vllm["actor"]["rollout"]["gpu_memory_utilization"] == 0.5
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://h:8000"}
    made = tree_of(of_trl({**BASE, **server}))["actor"]["rollout"]
    assert made["urls"] == ["http://h:8000"]


def test_rewards_by_name() -> None:
    two = {"reward_funcs": ["mine.judge", "think_format_reward"], "reward_weights": [1.0, 0.5]}
    assert tree_of(of_trl({**BASE, **two}))["reward"] == [
        {"source": "python:mine:judge", "weight": 1.0},
        {"source": "python:trl.rewards:think_format_reward", "weight": 0.5},
    ]
    made = of_trl({**BASE, "reward_funcs": ["accuracy"]})
    assert made.missing == ("reward",)


def test_data_sets_of_the_hub() -> None:
    named = {"dataset_name": "me/rows", "dataset_config": "main", "dataset_train_split": "small"}
    data = tree_of(of_trl({**BASE, **named}))["actor"]["data"]
    assert data["path"] == "hf:me/rows:main"
    assert data["split"] == "small"


def test_intervals_are_steps_of_the_run() -> None:
    # A step of the run makes 2 optimizer steps.
    given = {
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 10,
        "steps_per_generation": 4,
    }
    run = tree_of(of_trl({**BASE, **given, "steps_per_generation": 4}))["run"]
    assert run["evaluation"]["every_steps"] == 10
    assert run["checkpoint"]["every_steps"] == 5


def test_a_value_without_a_place_is_a_comment() -> None:
    made = of_trl({**BASE, "repetition_penalty": 1.1, "mystery": "x", "push_to_hub": False})
    assert "#   repetition_penalty = 1.1\n" in made.text
    assert "#   mystery = x\n" in made.text
    assert "push_to_hub" not in made.lost


@pytest.mark.parametrize(
    ("given", "kind", "loss"),
    [
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 2.0},
            "sapo",
            {"aggregation": "seq_mean_token_mean", "gate_positive": 2.0, "gate_negative": 1.05},
        ),
        (
            {"loss_type": "vespo", "vespo_k_neg": 2.5, "vespo_lambda_pos": 4.0},
            "vespo",
            {
                **{"aggregation": "token_mean", "power_positive": 2.0, "power_negative": 2.5},
                **{"decay_positive": 4.0, "decay_negative": 2.0},
            },
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            "gspo",
            {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "seq_mean_token_sum"},
        ),
        (
            {"trainer": "GMPOTrainer", "epsilon_high": 0.5},
            "gmpo",
            {"clip_low": 0.4, "clip_high": 0.5, "aggregation": "seq_mean_token_mean"},
        ),
    ],
    ids=["sapo", "vespo", "luspo", "gmpo"],
)
def test_losses_with_their_numbers(given: dict[str, Any], kind: str, loss: dict[str, Any]) -> None:
    made = of_trl({**BASE, **given})
    assert tree_of(made)["algorithm"]["type"] == recipe_of(made).algorithm.type == kind
    assert tree_of(made)["algorithm"]["policy_loss"] == loss
    assert set(given) & set(made.lost) == set()


def test_numbers_of_another_loss_are_no_part_of_it() -> None:
    made = of_trl({**BASE, "sapo_temperature_pos": 2.0, "vespo_k_pos": 2.0})
    assert list(made.lost) == ["sapo_temperature_pos"]
    assert "has no key gate_positive" in made.lost["sapo_temperature_pos"]


def test_vespo_corrects_itself() -> None:
    mode = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    made = of_trl({**BASE, "loss_type": "vespo", **mode})
    assert "off_policy" not in tree_of(made)["algorithm"]
    assert "to the sampler itself" in made.lost["vllm_importance_sampling_mode"]


def test_several_rewards_are_normalised_apart() -> None:
    apart = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    two = {**BASE, **apart, "reward_funcs": ["mine.judge", "mine.form"]}
    algorithm = recipe_of(of_trl(two)).algorithm
    assert algorithm.type == "gdpo"
    assert algorithm.parts.advantages.weights == {"python": 1.0, "python-2": 0.5}
    with_loss = tree_of(of_trl({**two, "loss_type": "sapo"}))["algorithm"]
    assert (with_loss["type"], with_loss["policy_loss"]["type"]) == ("gdpo", "sapo")
    alone = of_trl({**BASE, "multi_objective_aggregation": "normalize_then_sum"})
    assert recipe_of(alone).algorithm.type == "grpo"
    assert "one reward alone" in alone.lost["multi_objective_aggregation"]


TAUGHT = {key: BASE[key] for key in BASE if key not in ("num_generations", "reward_funcs")} | {
    "teacher_model_name_or_path": "Qwen/Qwen3-8B"
}


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({}, {"divergence": "reverse_kl"}),
        ({"beta": 0}, {"divergence": "forward_kl"}),
        ({"beta": 0.3}, {"divergence": "jensen_shannon", "mixture": 0.3}),
        ({"trainer": "gkd", "lmbda": 1.0}, {"divergence": "jensen_shannon", "mixture": 0.5}),
        (
            {"teacher_model_server_url": "http://t:1", "beta": 0.0, "loss_top_k": 16},
            {"divergence": "forward_kl", "top_k": 16},
        ),
    ],
    ids=["default", "forward", "mixture", "gkd", "server"],
)
def test_teachers_in_the_place_of_a_reward(given: dict[str, Any], loss: dict[str, Any]) -> None:
    made = of_trl({**TAUGHT, **given})
    tree, recipe = tree_of(made), recipe_of(made)
    assert tree["algorithm"]["type"] == recipe.algorithm.type == "on_policy_distillation"
    assert tree["algorithm"]["policy_loss"] == {
        **{"type": "distillation", **loss, "aggregation": "token_mean"}
    }
    assert tree["teacher"]["model"]["path"] == "hf:Qwen/Qwen3-8B"
    assert tree["algorithm"]["sampling"]["samples_per_prompt"] == 1
    assert "reward" not in tree
    assert "teacher" in tree["pools"]["gpus"]["roles"]


def test_gkd_trains_on_the_policys_own_completions_alone() -> None:
    gkd = {**TAUGHT, "trainer": "gkd"}
    assert "lmbda is 0.5 in TRL" in of_trl(gkd).text
    assert "policy's own" in of_trl(gkd | {"lmbda": 0.5}).lost["lmbda"]
    for name, value in (("lmbda", 0.0), ("seq_kd", True)):
        with pytest.raises(ImportedError, match=rf"{name} is .* sft here"):
            of_trl(gkd | {name: value})
    with pytest.raises(ImportedError, match="teacher of another vocabulary"):
        of_trl({**TAUGHT, "use_uld_loss": True})


def test_a_trainer_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ImportedError, match=r"trainer is 'SFTTrainer'.*one of grpo, rloo, gmpo"):
        of_trl({**BASE, "trainer": "SFTTrainer"})


def test_a_loss_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ImportedError, match=r"loss_type is 'strange'.*give one of grpo, dr_grpo"):
        of_trl({**BASE, "loss_type": "strange"})
    with pytest.raises(ImportedError, match=r"'sequence' and loss_type is 'sapo'"):
        of_trl({**BASE, "loss_type": "sapo", "importance_sampling_level": "sequence"})
