"""The page's tables on sampling and on algorithms."""

from __future__ import annotations

from rolemesh.coordinator.imports.tables.facts import Fact, Topic, cell, words
from rolemesh.coordinator.imports.values import algorithm as of
from rolemesh.coordinator.imports.values.batch import batch
from rolemesh.coordinator.imports.values.choices import ACTOR, choice

_LOW = (f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio")

SAMPLING = Topic(
    title="Sampling and batches",
    facts=(
        Fact(
            what="prompts a step",
            target="run.prompts_per_step",
            take=lambda source: batch(source).prompts,
            trl=cell("generation_batch_size", "num_generations", text="{0} / {1}"),
            openrlhf=cell("rollout.batch_size"),
            verl=cell("data.train_batch_size"),
        ),
        Fact(
            what="prompts between two updates of an asynchronous sampler",
            here="`run.prompts_per_step`",
            verl=cell(
                *("async_training.require_batches", "async_training.trigger_parameter_sync_step"),
                "rollout.total_rollout_steps",
            ),
            is_shown=False,
        ),
        Fact(
            what="completions a prompt",
            target="algorithm.sampling.samples_per_prompt",
            take=lambda source: batch(source).group,
            trl=cell("num_generations"),
            openrlhf=cell("rollout.n_samples_per_prompt"),
            verl=cell(f"{of.ROLLOUT}n"),
        ),
        Fact(
            what="completions an optimizer step",
            target="algorithm.mini_batch_rows",
            take=lambda source: batch(source).mini_rows,
            trl=cell(
                *("per_device_train_batch_size", "gradient_accumulation_steps"),
                text="{0} x {1} x processes",
            ),
            openrlhf=cell("train.batch_size"),
            verl=cell(f"{ACTOR}ppo_mini_batch_size", f"{of.ROLLOUT}n", text="{0} x {1}"),
        ),
        Fact(
            what="passes over a step's rows",
            target="algorithm.epochs",
            take=lambda source: batch(source).epochs,
            trl=cell("num_iterations"),
            openrlhf=cell("train.max_epochs"),
            verl=cell(f"{ACTOR}ppo_epochs"),
        ),
        Fact(
            what="longest completion",
            target="algorithm.sampling.max_new_tokens",
            take=lambda source: batch(source).new_tokens,
            trl=cell("max_completion_length"),
            openrlhf=cell("rollout.max_new_tokens"),
            verl=cell("data.max_response_length"),
        ),
        Fact(
            what="temperature",
            target="algorithm.sampling.temperature",
            trl=cell("temperature"),
            openrlhf=cell("rollout.temperature"),
            verl=cell(f"{of.ROLLOUT}temperature"),
        ),
        Fact(
            what="likeliest tokens alone",
            here="none in training",
            put=lambda draft, value: None,
            take=of.whole_distribution,
            trl=cell("top_p", "top_k"),
            openrlhf=cell("rollout.top_p"),
            verl=cell(f"{of.ROLLOUT}top_p", f"{of.ROLLOUT}top_k"),
        ),
        Fact(
            what="steps",
            here="`run.steps`",
            take=batch,
            put=of.put_steps,
            trl=cell(
                *("max_steps", "num_train_epochs"), text="{0} (optimizer steps), {1} (passes)"
            ),
            openrlhf=cell(
                *("train.num_episodes", "data.max_samples"), text="{0} (passes), {1} (rows of one)"
            ),
            verl=cell(
                *("trainer.total_training_steps", "trainer.total_epochs"), text="{0}, {1} (passes)"
            ),
        ),
        Fact(
            what="seed",
            target="run.seed",
            kind="whole",
            trl=cell("seed"),
            openrlhf=cell("train.seed"),
            verl=cell("data.seed"),
        ),
        Fact(
            what="the same bits each time",
            target="run.deterministic",
            trl=cell("full_determinism", take=of.on("full_determinism")),
            openrlhf=cell(
                "train.full_determinism_enable", take=of.on("train.full_determinism_enable")
            ),
            verl=cell(
                f"{ACTOR}fsdp_config.full_determinism",
                take=of.on(f"{ACTOR}fsdp_config.full_determinism"),
            ),
        ),
    ),
)

ALGORITHM = Topic(
    title="Algorithm",
    facts=(
        Fact(
            what="algorithm",
            here="`algorithm.type`: [all](algorithms.md)",
            take=choice,
            put=of.put_type,
            trl=words("the trainer's class"),
            openrlhf=cell("algo.advantage.estimator"),
            verl=cell("algorithm.adv_estimator"),
        ),
        Fact(
            what="GRPO",
            here="`grpo`",
            trl=words("`GRPOTrainer`"),
            openrlhf=words("`group_norm`"),
            verl=words("`grpo`"),
        ),
        Fact(
            what="PPO",
            here="`ppo`",
            trl=words("(an experimental trainer until 1.12)"),
            openrlhf=words("`gae`"),
            verl=words("`gae`"),
        ),
        Fact(
            what="RLOO",
            here="`rloo`",
            trl=words("`RLOOTrainer`"),
            openrlhf=words("`rloo`"),
            verl=words("`rloo`"),
        ),
        Fact(
            what="lower clip",
            target="algorithm.policy_loss.clip_low",
            trl=cell("epsilon", take=of.trl_low),
            openrlhf=cell("actor.eps_clip_low_high", "actor.eps_clip", take=of.openrlhf_clip(0)),
            verl=cell(*_LOW, text="{0}", take=of.verl_clip("low")),
        ),
        Fact(
            what="upper clip",
            target="algorithm.policy_loss.clip_high",
            trl=cell("epsilon_high", take=of.trl_high),
            openrlhf=cell("actor.eps_clip_low_high", "actor.eps_clip", take=of.openrlhf_clip(1)),
            verl=cell(f"{ACTOR}clip_ratio_high", take=of.verl_clip("high")),
        ),
        Fact(
            what="dual clip",
            target="algorithm.policy_loss.dual_clip",
            trl=cell("delta"),
            openrlhf=cell("actor.dual_clip"),
            verl=cell(f"{ACTOR}clip_ratio_c", take=of.verl_dual_clip),
        ),
        Fact(
            what="KL in the loss",
            target="algorithm.policy_loss.kl_in_loss",
            here="`algorithm.policy_loss.kl_in_loss`, and a section `reference`",
            trl=cell("beta", take=of.trl_kl_in_loss),
            openrlhf=cell("algo.kl.use_loss", "algo.kl.init_coef", take=of.openrlhf_kl_in_loss),
            verl=cell(f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef", take=of.verl_kl_in_loss),
        ),
        Fact(
            what="its estimator",
            target="algorithm.policy_loss.kl_form",
            trl=words("k3"),
            openrlhf=cell(
                "algo.kl.estimator", take=of.form("algo.kl.estimator", of.openrlhf_kl_in_loss)
            ),
            verl=cell(
                f"{ACTOR}kl_loss_type",
                text="{0} (`low_var_kl` is `k3`)",
                take=of.verl_kl_form,
            ),
        ),
        Fact(
            what="KL in the reward",
            target="algorithm.advantages.kl_in_reward",
            here="`algorithm.advantages.kl_in_reward`, and a section `reference`",
            trl=cell("beta", text="{0} of `RLOOConfig`", take=of.trl_kl_in_reward),
            openrlhf=cell("algo.kl.init_coef", take=of.openrlhf_kl_in_reward),
            verl=cell(
                *("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
                take=of.verl_kl_in_reward,
            ),
        ),
        Fact(
            what="its target, adaptive",
            here="`algorithm.advantages.kl_in_reward.target`, "
            "`algorithm.advantages.kl_in_reward.horizon`",
            openrlhf=cell("algo.kl.target", "algo.kl.horizon"),
            verl=cell(
                *("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"),
                "algorithm.kl_ctrl.horizon",
            ),
        ),
        Fact(
            what="its estimator",
            target="algorithm.advantages.kl_form",
            trl=words("k1"),
            openrlhf=cell(
                "algo.kl.estimator", take=of.form("algo.kl.estimator", of.openrlhf_kl_in_reward)
            ),
            verl=cell(
                "algorithm.kl_penalty", take=of.form("algorithm.kl_penalty", of.verl_kl_in_reward)
            ),
        ),
        Fact(
            what="mean of the loss",
            target="algorithm.policy_loss.aggregation",
            take=of.mean,
            put=of.put_mean,
            trl=cell("loss_type"),
            openrlhf=cell("actor.loss_agg_mode"),
            verl=cell(f"{ACTOR}loss_agg_mode", f"{ACTOR}loss_scale_factor"),
        ),
        Fact(
            what="divide by the group's deviation",
            target="algorithm.advantages.normalize_std",
            trl=cell("scale_rewards", take=of.trl_std),
            openrlhf=words("always with `group_norm`"),
            verl=cell("algorithm.norm_adv_by_std_in_grpo", take=of.verl_std),
        ),
        Fact(
            what="discount",
            target="algorithm.advantages.gamma",
            openrlhf=cell("algo.advantage.gamma"),
            verl=cell("algorithm.gamma", take=of.verl_reward_only("algorithm.gamma")),
        ),
        Fact(
            what="trace decay",
            target="algorithm.advantages.lam",
            openrlhf=cell("algo.advantage.lambd"),
            verl=cell("algorithm.lam"),
        ),
        Fact(
            what="clip of values",
            target="algorithm.value_loss.clip",
            openrlhf=cell("critic.value_clip"),
            verl=cell("critic.cliprange_value"),
        ),
        Fact(
            what="entropy bonus",
            target="algorithm.policy_loss.entropy_coefficient",
            trl=cell("entropy_coef", take=lambda source: source.number("entropy_coef") or None),
            openrlhf=cell(
                "actor.entropy_coef",
                take=lambda source: source.number("actor.entropy_coef") or None,
            ),
            verl=cell(f"{ACTOR}entropy_coeff", take=of.verl_entropy),
        ),
        Fact(
            what="punish long completions",
            target="algorithm.advantages.overlong",
            openrlhf=cell(
                *("reward.overlong_buffer_len", "reward.overlong_penalty_factor"),
                take=of.openrlhf_overlong,
            ),
            verl=cell(
                *(f"{of.OVERLONG}enable", f"{of.OVERLONG}len", f"{of.OVERLONG}penalty_factor"),
                *("reward.reward_kwargs.max_resp_len", "reward.reward_manager.name"),
                text="`reward.reward_kwargs.overlong_buffer_cfg`",
                take=of.verl_overlong,
            ),
        ),
        Fact(
            what="policy loss of your own",
            here='`algorithm.policy_loss: "python:FILE.py:NAME"` ([form](own-losses.md))',
            trl=words("a subclass of the trainer"),
            verl=words("`actor.policy_loss.loss_mode` with `@register_policy_loss`"),
        ),
        Fact(
            what="estimator of your own",
            here='`algorithm.advantages: "python:FILE.py:NAME"`',
            trl=words("a subclass of the trainer"),
            verl=words("`algorithm.adv_estimator` with `@register_adv_est`"),
        ),
        Fact(
            what="several rewards, normalised apart",
            here="`algorithm.type: gdpo`; with another loss `algorithm.advantages: gdpo`",
            trl=cell(
                "multi_objective_aggregation",
                text='`multi_objective_aggregation="normalize_then_sum"`',
            ),
            verl=cell(
                *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
                text="`gdpo`, {0}, {1}",
            ),
        ),
        Fact(
            what="the best of several completions counts",
            here="`algorithm.type: pass_at_k`, `algorithm.advantages.k`",
            verl=words("`grpo_passk`"),
        ),
        Fact(
            what="groups that are all alike stay in the mean",
            here="`algorithm.advantages.zero_variance: counted`",
            trl=words("always"),
            openrlhf=words("always"),
            verl=words("always"),
        ),
        Fact(
            what="leave out groups that are all alike",
            here="`algorithm.type: dapo`",
            openrlhf=cell("algo.dynamic_filtering_enable"),
            verl=cell("algorithm.filter_groups.enable"),
        ),
    ),
)
