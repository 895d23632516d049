"""Settings of verl as those of a recipe."""

from __future__ import annotations

import pytest
from support.imports import PREFIX, of_verl, recipe_of, tree_of

from rolemesh.coordinator.imports.source import ImportedError

ACTOR = f"{PREFIX}.actor"


def test_mini_batches_count_completions_here() -> None:
    made = recipe_of(
        of_verl(
            "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ppo_epochs=2"
        )
    )
    assert made.run.prompts_per_step == 64
    assert made.algorithm.mini_batch_rows == 16 * 4
    assert made.algorithm.epochs == 2


def test_a_warm_up_becomes_optimizer_steps() -> None:
    # 50 steps of the run, each with 64 / 16 = 4 optimizer steps.
    batch = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16")
    share = recipe_of(of_verl(*batch, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"))
    steps = recipe_of(of_verl(*batch, f"{ACTOR}.optim.lr_warmup_steps=3"))
    assert share.actor is not None
    assert steps.actor is not None
    assert share.actor.optimizer.warmup_steps == 5 * 4
    assert steps.actor.optimizer.warmup_steps == 3 * 4


def test_the_optimizer_has_verls_numbers_where_they_are_left_out() -> None:
    actor = recipe_of(of_verl()).actor
    assert actor is not None
    assert actor.optimizer.learning_rate == 1e-6
    assert actor.optimizer.betas == (0.9, 0.999)
    assert actor.optimizer.weight_decay == 0.01


def test_a_least_rate_is_a_rate_here() -> None:
    schedule = tree_of(
        of_verl(
            *(f"{ACTOR}.optim.lr=2e-6", f"{ACTOR}.optim.lr_scheduler_type=cosine"),
            f"{ACTOR}.optim.min_lr_ratio=0.25",
        )
    )["actor"]["optimizer"]["schedule"]
    assert schedule == {"type": "cosine", "min_learning_rate": 5e-7}


def test_routes_are_replayed_as_they_were_sampled() -> None:
    mode, kept = f"{ACTOR}.router_replay.mode", f"{PREFIX}.rollout.enable_rollout_routing_replay"
    made = of_verl(f"{mode}=R3", f"{kept}=True")
    assert tree_of(made)["actor"]["rollout"]["replay_routes"] is True
    assert mode not in made.lost
    assert "the sampler keeps them by itself" in made.lost[kept]
    made = of_verl(f"{mode}=R2")
    assert "replay_routes" not in tree_of(made)["actor"]["rollout"]
    assert "routes are those of sampling" in made.lost[mode]


def test_clips_and_kl() -> None:
    made = of_verl(
        *(f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.clip_ratio_c=5"),
        *(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.002", f"{ACTOR}.kl_loss_type=mse"),
    )
    assert tree_of(made)["algorithm"]["policy_loss"] == {
        **{"type": "ppo_policy", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 5.0},
        **{"kl_in_loss": 0.002, "kl_form": "k2", "aggregation": "token_mean"},
    }
    assert tree_of(made)["reference"]["model"]["path"] == "/models/mine"


def test_a_plain_clip_counts_for_nothing_in_verl_and_says_so() -> None:
    made = of_verl(f"{ACTOR}.clip_ratio=0.4")
    assert tree_of(made)["algorithm"]["policy_loss"]["clip_low"] == 0.2
    assert "clip_ratio_low" in made.lost[f"{ACTOR}.clip_ratio"]


def test_kl_in_the_reward_with_a_critic() -> None:
    made = of_verl(
        *("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "algorithm.lam=0.9"),
        *("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.01"),
        *("critic.model.path=/models/critic", "critic.optim.lr=3e-5", "critic.cliprange_value=0.4"),
    )
    tree = tree_of(made)
    assert tree["algorithm"]["type"] == "ppo"
    assert tree["algorithm"]["advantages"] == {
        "kl_in_reward": {"type": "adaptive", "coefficient": 0.01, "target": 0.1, "horizon": 10000},
        **{"kl_form": "k1", "gamma": 1.0, "lam": 0.9},
    }
    assert tree["algorithm"]["value_loss"] == {"clip": 0.4}
    assert tree["critic"]["model"]["path"] == "/models/critic"
    assert tree["critic"]["optimizer"]["learning_rate"] == 3e-5


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (("algorithm.adv_estimator=rloo",), "rloo"),
        (("algorithm.adv_estimator=remax",), "remax"),
        (("algorithm.adv_estimator=reinforce_plus_plus",), "reinforce_plus_plus"),
        ((f"{ACTOR}.policy_loss.loss_mode=gspo",), "gspo"),
        ((f"{ACTOR}.policy_loss.loss_mode=cispo",), "cispo"),
        ((f"{ACTOR}.policy_loss.loss_mode=gpg",), "grpo"),
        (("algorithm.adv_estimator=grpo_passk",), "pass_at_k"),
        (("+algorithm.filter_groups.enable=True",), "dapo"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_algorithms(overrides: tuple[str, ...], kind: str) -> None:
    assert recipe_of(of_verl(*overrides)).algorithm.type == kind


def test_an_algorithm_that_is_none_of_ours_is_refused_with_those_that_are() -> None:
    with pytest.raises(ImportedError, match=r"algorithm\.adv_estimator is 'opo'.*give one of gae"):
        of_verl("algorithm.adv_estimator=opo")
    with pytest.raises(ImportedError, match=r"loss_mode is 'dro'.*vanilla, gspo, cispo, sapo"):
        of_verl(f"{ACTOR}.policy_loss.loss_mode=dro")
    with pytest.raises(ImportedError, match=r"'sapo' and algorithm\.adv_estimator is 'gae'"):
        of_verl("algorithm.adv_estimator=gae", f"{ACTOR}.policy_loss.loss_mode=sapo")


def test_groups_of_one_are_refused_by_verls_name() -> None:
    with pytest.raises(ImportedError, match=rf"{PREFIX}\.rollout\.n is 1, but grpo compares"):
        of_verl(f"{PREFIX}.rollout.n=1")


def test_an_adapter_makes_its_base_the_reference() -> None:
    made = of_verl(
        *(f"{PREFIX}.model.lora_rank=8", f"{PREFIX}.model.lora_alpha=16"),
        *(f"{PREFIX}.model.target_modules=[q_proj,v_proj]", f"{ACTOR}.use_kl_loss=true"),
    )
    tree = tree_of(made)
    assert tree["actor"]["model"]["adapter"] == {
        **{"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}
    }
    assert tree["reference"] == {}
    assert recipe_of(made).served_by_actor == {"reference"}


def test_rows_of_a_pass_become_tokens() -> None:
    tree = tree_of(
        of_verl(
            *("data.max_prompt_length=100", "data.max_response_length=200"),
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        )
    )
    assert tree["actor"]["model"]["micro_batch_tokens"] == 4 * 300
    assert tree["actor"]["rollout"]["max_model_len"] == 300
    dynamic = tree_of(
        of_verl(f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=9000")
    )
    assert dynamic["actor"]["model"]["micro_batch_tokens"] == 9000


def test_gpus_become_pools_and_layouts() -> None:
    made = of_verl(
        *("trainer.n_gpus_per_node=8", f"{PREFIX}.rollout.tensor_model_parallel_size=2"),
        f"{ACTOR}.use_kl_loss=True",
    )
    tree = tree_of(made)
    assert tree["actor"]["train"] == {"tp": 2, "dp": 4}
    assert tree["actor"]["generate"] == {"tp": 2}
    assert tree["reference"]["layout"] == {"tp": 2, "dp": 4}
    assert tree["pools"]["gpus"]["roles"] == ["actor", "reference"]
    assert tree["pools"]["gpus"]["devices"][-1] == "cuda:7"
    assert tree["pools"]["judges"] == {"devices": ["cpu"], "roles": ["reward"]}


def test_slices_and_stages_of_megatron() -> None:
    megatron = f"{ACTOR}.megatron"
    tree = tree_of(
        of_verl(
            *("trainer.n_gpus_per_node=8", f"{megatron}.tensor_model_parallel_size=2"),
            *(f"{megatron}.pipeline_model_parallel_size=2", f"{ACTOR}.use_kl_loss=True"),
            *(f"{PREFIX}.ref.megatron.tensor_model_parallel_size=4",),
        )
    )
    assert tree["actor"]["train"] == {"pp": 2, "tp": 2, "dp": 2}
    assert tree["reference"]["layout"] == {"tp": 4, "dp": 2}
    with pytest.raises(ImportedError, match="8 GPUs are no multiple of tp 3"):
        of_verl("trainer.n_gpus_per_node=8", f"{megatron}.tensor_model_parallel_size=3")


def test_experts_are_shared_out_as_by_megatron() -> None:
    megatron = f"{ACTOR}.megatron"
    given = ("trainer.n_gpus_per_node=8", f"{megatron}.tensor_model_parallel_size=2")
    reference = (
        f"{ACTOR}.use_kl_loss=True",
        *(f"{PREFIX}.ref.megatron.{kind}_model_parallel_size=2" for kind in ("tensor", "expert")),
    )
    made = of_verl(*given, f"{megatron}.expert_model_parallel_size=4", *reference)
    tree = tree_of(made)
    assert tree["actor"]["train"] == {"tp": 2, "dp": 4, "ep": 4}
    assert tree["reference"]["layout"] == {"tp": 2, "dp": 4, "ep": 2}
    assert not [name for name in made.lost if "expert" in name]
    same = of_verl(*given, f"{megatron}.expert_model_parallel_size=4", f"{ACTOR}.use_kl_loss=True")
    assert tree_of(same)["reference"]["layout"] == {"tp": 2, "dp": 4, "ep": 4}


@pytest.mark.parametrize(
    "name", ["ulysses_sequence_parallel_size", "megatron.context_parallel_size"]
)
def test_rows_are_cut_over_as_many_ranks(name: str) -> None:
    given = ("trainer.n_gpus_per_node=8", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.{name}=4")
    tokens = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=4096")
    tree = tree_of(made := of_verl(*given, *tokens))
    layout = tree["actor"]["train"]
    assert (layout["dp"] % 4, layout["cp"]) == (0, 4)
    assert tree["reference"]["layout"]["cp"] == 4, "verl's reference takes the actor's"
    # verl counts the tokens that one GPU has of a pass.
    assert tree["actor"]["model"]["micro_batch_tokens"] == 4 * 4096
    assert not [one for one in made.lost if name in one]
    other = of_verl(*given, f"{PREFIX}.ref.{name}=2")
    assert tree_of(other)["reference"]["layout"]["cp"] == 2
    few = of_verl("trainer.n_gpus_per_node=6", f"{ACTOR}.{name}=4")
    assert tree_of(few)["actor"]["train"].get("cp", 1) < 4
    assert "cp of a layout divides its data axis" in few.lost[f"{ACTOR}.{name}"]


def test_experts_over_more_ranks_than_the_data_axis_has_are_said_to_be_lost() -> None:
    megatron = f"{ACTOR}.megatron"
    made = of_verl(
        *("trainer.n_gpus_per_node=8", f"{megatron}.tensor_model_parallel_size=4"),
        *(f"{megatron}.expert_model_parallel_size=8", f"{megatron}.expert_tensor_parallel_size=1"),
        f"{PREFIX}.rollout.expert_parallel_size=8",
    )
    assert tree_of(made)["actor"]["train"] == {"tp": 4, "dp": 2, "ep": 2}
    reasons = made.lost
    assert "data axis (2): 2 is taken" in reasons[f"{megatron}.expert_model_parallel_size"]
    assert "cut all else: 4" in reasons[f"{megatron}.expert_tensor_parallel_size"]
    assert "not shared out" in " ".join(reasons[f"{PREFIX}.rollout.expert_parallel_size"].split())


def test_several_hosts_are_services_that_the_user_starts() -> None:
    made = of_verl("trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert "services" in made.missing
    assert tree_of(made)["services"] == {"actor": {"address": "first-host:50051"}}
    assert tree_of(made)["actor"]["train"] == {"dp": 16}


def test_samplers_on_gpus_of_their_own() -> None:
    tree = tree_of(
        of_verl(
            *("+rollout.nnodes=1", "+rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4"),
            f"{PREFIX}.rollout.tensor_model_parallel_size=2",
        )
    )
    assert tree["rollout"]["layout"] == {"tp": 2}
    assert tree["services"]["rollout"] == {"replicas": 2}
    assert tree["schedule"]["sampler"] == {"type": "one_step_ahead"}
    assert tree["actor"]["train"] == {"dp": 4}


def test_steps_that_depend_on_the_data_are_to_fill_in() -> None:
    passes = (
        "trainer.total_training_steps=null",
        "trainer.total_epochs=3",
        "data.train_batch_size=10",
    )
    made = of_verl(*passes)
    assert "run.steps" in made.missing
    assert "trainer.total_epochs = 3" in " ".join(made.text.split())
    assert recipe_of(of_verl(*passes, rows=1005)).run.steps == 3 * 100


def test_data_and_a_reward_of_the_users() -> None:
    made = of_verl(
        *("data.train_files=['a.parquet','b.parquet']", "data.val_files=['c.parquet','d.parquet']"),
        *("data.prompt_key=question", "custom_reward_function.path=score.py"),
        "custom_reward_function.name=f",
    )
    tree = tree_of(made)
    first = tree["actor"]["data"]["sources"][0]["data"]
    assert first == {
        **{"type": "parquet", "path": "a.parquet", "held_out_path": "c.parquet"},
        "columns": {"prompt": "question", "answer": "reward_model.ground_truth"},
    }
    assert tree["reward"] == "python:score.py:f"
    assert made.missing == ()


def test_verls_own_scorers_are_to_fill_in() -> None:
    made = of_verl("data.train_files=a.parquet")
    assert made.missing == ("reward",)
    assert "FILL IN: verl chooses one of its own scorers" in made.text


def test_long_completions_are_punished_alike() -> None:
    cfg = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    tree = tree_of(
        of_verl(
            *("reward_model.reward_manager=dapo", f"{cfg}.enable=True", f"{cfg}.len=50"),
            *(f"{cfg}.penalty_factor=0.5", "+reward_model.reward_kwargs.max_resp_len=400"),
        )
    )
    assert tree["algorithm"]["advantages"]["overlong"] == {
        **{"max_length": 400, "buffer": 50, "penalty": 0.5}
    }


def test_a_punishment_that_verl_would_not_read_is_none_here() -> None:
    made = of_verl("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True")
    assert "overlong" not in str(tree_of(made)["algorithm"])
    why = made.lost["reward.reward_kwargs.overlong_buffer_cfg.enable"]
    assert why == "the reward manager dapo alone reads it"


def test_what_is_unknown_or_has_no_place_is_a_comment_with_its_value() -> None:
    made = of_verl("+trainer.mystery=7", f"{ACTOR}.max_seqlen_per_dp_cp_rank=8")
    assert made.lost["trainer.mystery"].startswith("not known to the importer")
    assert "#   trainer.mystery = 7\n" in made.text
    assert f"#   {ACTOR}.max_seqlen_per_dp_cp_rank = 8\n" in made.text


def test_a_value_that_changes_nothing_says_so() -> None:
    made = of_verl("algorithm.kl_ctrl.kl_coef=0.5")
    assert "changes nothing" in made.lost["algorithm.kl_ctrl.kl_coef"]


def test_defaults_of_verl_are_named_and_no_more() -> None:
    made = of_verl("trainer.critic_warmup=0", f"{ACTOR}.fsdp_config.param_offload=False")
    assert made.lost == {}
    assert "At the default of verl" in made.text
    assert "trainer.critic_warmup" in made.text


def test_what_is_so_in_any_case_is_no_loss() -> None:
    made = of_verl("data.filter_overlong_prompts=True", "data.truncation=left")
    assert list(made.lost) == ["data.truncation"]
    assert "So it is here in any case:\n#   data.filter_overlong_prompts\n" in made.text


def test_a_wrong_value_names_the_field_and_what_to_give() -> None:
    with pytest.raises(ImportedError, match="is 'many': give a whole number"):
        of_verl("data.train_batch_size=many")
