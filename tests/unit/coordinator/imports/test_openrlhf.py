"""Arguments of OpenRLHF as settings of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from support.imports import of_openrlhf, recipe_of, tree_of

from rolemesh.coordinator.imports.source import ImportedError

NEW = (
    "--actor.model_name_or_path /models/mine --reward.remote_url http://10.0.0.1:5000/get_reward "
    "--data.prompt_dataset rows.jsonl --data.input_key question --data.label_key answer "
    "--data.max_samples 6400 --data.max_len 300 --rollout.max_new_tokens 200 "
    "--rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --train.batch_size 128 "
    "--algo.advantage.estimator group_norm --actor.num_gpus_per_node 2 --vllm.num_engines 2 "
    "--train.colocate_all"
)
OLD = (
    "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
    "--pretrain /models/mine --remote_rm_url http://10.0.0.1:5000/get_reward "
    "--prompt_data rows.jsonl --input_key question --label_key answer "
    "--max_samples 6400 --max_len 300 --max_new_tokens 200 "
    "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 128 "
    "--advantage_estimator group_norm --actor_num_gpus_per_node 2 --vllm_num_engines 2 "
    "--colocate_all_models"
)


def test_flags_of_before_mean_the_same() -> None:
    assert tree_of(of_openrlhf(OLD)) == tree_of(of_openrlhf(NEW))


def test_batches_and_steps() -> None:
    made = recipe_of(of_openrlhf(NEW))
    assert (made.run.prompts_per_step, made.run.steps) == (64, 100)
    assert made.algorithm.type == "grpo"
    assert made.algorithm.mini_batch_rows == 128
    assert made.actor is not None
    # 100 steps with 64 * 4 / 128 optimizer steps each, of which 0.03 warm up; to a tenth.
    assert made.actor.optimizer.warmup_steps == 6
    assert tree_of(of_openrlhf(NEW))["actor"]["optimizer"]["schedule"] == {
        **{"type": "cosine", "min_learning_rate": 1e-7}
    }


def test_data_and_reward_server() -> None:
    tree = tree_of(of_openrlhf(NEW))
    assert tree["actor"]["data"] == {
        **{"type": "jsonl", "path": "rows.jsonl", "max_prompt_tokens": 100},
        "columns": {"prompt": "question", "answer": "answer"},
    }
    assert tree["reward"] == "http://10.0.0.1:5000/get_reward"


def test_the_kl_goes_where_the_flags_say() -> None:
    reward = tree_of(of_openrlhf(f"{NEW} --algo.kl.init_coef 0.02"))["algorithm"]
    assert reward["advantages"]["kl_in_reward"] == {"type": "fixed", "coefficient": 0.02}
    loss = tree_of(
        of_openrlhf(f"{NEW} --algo.kl.init_coef 0.02 --algo.kl.use_loss --algo.kl.estimator k3")
    )["algorithm"]
    assert loss["policy_loss"]["kl_in_loss"] == 0.02
    assert loss["policy_loss"]["kl_form"] == "k3"
    assert "advantages" not in loss


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        ("", None),
        ("LEVEL token", {"type": "masking", "low": 0.5, "high": 5.0}),
        ("LEVEL token MODE clip BOUNDS 2.0", {"type": "token_truncation", "cap": 2.0}),
        (
            "LEVEL seq BOUNDS 0.99 1.01",
            {"type": "geometric_rejection", "low": 0.99, "high": 1.01},
        ),
        ("--vllm_enable_is_correction", {"type": "token_truncation", "cap": 5.0}),
        (
            "--vllm_enable_is_correction --vllm_is_correction_type icepop",
            {"type": "masking", "low": 0.5, "high": 5.0},
        ),
    ],
    ids=["off", "masked", "cut", "rows", "switch of before", "kind of before"],
)
def test_weights_against_the_sampler(flags: str, form: dict[str, Any] | None) -> None:
    for name, flag in {"LEVEL": "level", "MODE": "mode", "BOUNDS": "threshold"}.items():
        flags = flags.replace(name, f"--algo.advantage.is_correction_{flag}")
    made = of_openrlhf(f"{NEW} {flags}")
    assert tree_of(made)["algorithm"].get("off_policy") == form
    assert recipe_of(made).algorithm.off_policy is not None or form is None


def test_a_correction_that_has_no_form_is_a_comment() -> None:
    level = "--algo.advantage.is_correction_level token"
    gate = "--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.1"
    made = of_openrlhf(f"{NEW} {level} {gate}")
    assert "off_policy" not in tree_of(made)["algorithm"]
    assert "no form looks at tv" in made.lost["algo.advantage.is_correction_gating"]
    gspo = of_openrlhf(f"{NEW} {level} --actor.policy_loss_type gspo")
    # Its ratio is then that to the sampler, which it is here without a correction.
    assert tree_of(gspo)["algorithm"]["off_policy"] is None
    assert recipe_of(gspo).algorithm.type == "gspo"


def test_groups_are_left_out_with_any_estimator_of_groups() -> None:
    flags = "--algo.dynamic_filtering_enable --actor.policy_loss_type gspo"
    made = of_openrlhf(NEW.replace("group_norm", "rloo") + f" {flags}")
    algorithm = recipe_of(made).algorithm
    assert (algorithm.type, algorithm.parts.advantages.type) == ("dapo", "rloo")
    assert algorithm.parts.policy_loss.type == "gspo"
    alone = of_openrlhf(NEW.replace("group_norm", "reinforce") + " --algo.dynamic_filtering_enable")
    assert "no groups" in alone.lost["algo.dynamic_filtering_enable"]


def test_a_sampler_that_runs_ahead_samples_no_groups_anew() -> None:
    apart = NEW.replace("--train.colocate_all", "--train.async_enable")
    algorithm = recipe_of(of_openrlhf(f"{apart} --algo.dynamic_filtering_enable")).algorithm
    assert (algorithm.type, algorithm.parts.advantages.zero_variance) == ("grpo", "left_out")


def test_two_clips_in_one_flag() -> None:
    loss = tree_of(of_openrlhf(f"{NEW} --actor.eps_clip_low_high 0.1 0.3"))["algorithm"]
    assert (loss["policy_loss"]["clip_low"], loss["policy_loss"]["clip_high"]) == (0.1, 0.3)


def test_ppo_has_a_critic_of_the_actors_model() -> None:
    tree = tree_of(of_openrlhf(NEW.replace("group_norm", "gae")))
    assert tree["algorithm"]["type"] == "ppo"
    assert tree["critic"]["model"]["path"] == "/models/mine"
    assert tree["critic"]["optimizer"]["learning_rate"] == 9e-6
    assert tree["pools"]["gpus"]["roles"] == ["actor", "critic", "reference"]


def test_samplers_apart_that_run_ahead() -> None:
    tree = tree_of(
        of_openrlhf(
            NEW.replace("--train.colocate_all", "--train.colocate_actor_ref")
            + " --train.async_enable --train.async_queue_size 2 --vllm.tensor_parallel_size 2"
        )
    )
    assert tree["pools"]["samplers"]["devices"] == ["cuda:2", "cuda:3", "cuda:4", "cuda:5"]
    assert tree["services"]["rollout"] == {"replicas": 2}
    assert tree["rollout"]["layout"] == {"tp": 2}
    assert tree["schedule"]["sampler"] == {
        **{"type": "async", "max_staleness": 2, "partial_rollouts": False}
    }


def test_an_adapter() -> None:
    made = of_openrlhf(
        f"{NEW} --ds.lora.rank 16 --ds.lora.alpha 64 --ds.lora.target_modules q_proj k_proj"
    )
    assert tree_of(made)["actor"]["model"]["adapter"] == {
        **{"rank": 16, "alpha": 64.0, "targets": ["q_proj", "k_proj"]}
    }


def test_a_key_of_a_tracker_is_not_written_down() -> None:
    made = of_openrlhf(f"{NEW} --logger.wandb.key abc123 --logger.wandb.project mine")
    assert tree_of(made)["trackers"] == [{"type": "wandb", "project": "mine"}]
    assert "abc123" not in made.text


def test_what_has_no_place_is_a_comment_by_the_flag_that_was_given() -> None:
    made = of_openrlhf(f"{NEW} --normalize_reward --mystery 3")
    assert "#   --normalize_reward = True\n" in made.text
    assert "#   --mystery = 3\n" in made.text
    assert made.lost["mystery"].startswith("not known")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ImportedError, match="stands before the first flag"):
        of_openrlhf("/models/mine --train.seed 1")
    with pytest.raises(ImportedError, match="close the quotes"):
        of_openrlhf("--actor.model_name_or_path 'models")
    with pytest.raises(ImportedError, match="another program of OpenRLHF"):
        of_openrlhf("deepspeed --module openrlhf.cli.train_sft --seed 1")
    with pytest.raises(ImportedError, match=r"--n_samples_per_prompt is 1, but rloo compares"):
        of_openrlhf("--n_samples_per_prompt 1 --advantage_estimator rloo")
    with pytest.raises(ImportedError, match=r"--algo\.advantage\.estimator is 'flash_reinforce'"):
        of_openrlhf("--algo.advantage.estimator flash_reinforce")


def test_muon_takes_adamws_rate_and_its_own_momentum() -> None:
    flags = "--actor.optim muon --actor.adam.lr 2e-6 --actor.muon.momentum 0.9 --actor.muon.lr 0.01"
    imported = of_openrlhf(f"{NEW} {flags}")
    made = recipe_of(imported).actor.optimizer
    assert (made.type, made.learning_rate, made.momentum) == ("muon", 2e-6, 0.9)
    assert "adamw" in tree_of(imported)["actor"]["optimizer"]
    with_adapter = recipe_of(of_openrlhf(f"{NEW} {flags} --ds.lora.rank 8"))
    assert with_adapter.actor.optimizer.type == "adamw"
