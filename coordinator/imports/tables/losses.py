"""The page's tables on policy losses, corrections and teachers."""

from __future__ import annotations

from rolemesh.coordinator.imports.tables.facts import Fact, Topic, cell, words
from rolemesh.coordinator.imports.values import off_policy as off
from rolemesh.coordinator.imports.values import teachers as of
from rolemesh.coordinator.imports.values.choices import ACTOR

_CLIPS = (f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high")
_MODE = f"{ACTOR}policy_loss.loss_mode"
_POLICY = f"{ACTOR}policy_loss."
_CORRECTION = "algorithm.rollout_correction."
_IS = "algo.advantage.is_correction_"
_TRL_IS = "vllm_importance_sampling_"
_LOSS = "algorithm.policy_loss."


def _mode(name: str) -> str:
    return f"`actor.policy_loss.loss_mode={name}`"


LOSSES = Topic(
    title="Policy losses",
    facts=(
        Fact(
            what="one ratio for a completion",
            here="`algorithm.type: gspo`",
            trl=cell("importance_sampling_level", text='`importance_sampling_level="sequence"`'),
            openrlhf=cell("actor.policy_loss_type", text="`--actor.policy_loss_type gspo`"),
            verl=cell(_MODE, text=_mode("gspo")),
        ),
        Fact(
            what="the same, times the completion's length (LUSPO)",
            here=f"the same with `{_LOSS}aggregation: seq_mean_token_sum`",
            trl=cell("loss_type", text='`loss_type="luspo"`'),
            verl=words("`gspo` with `actor.loss_agg_mode=seq-mean-token-sum`"),
        ),
        Fact(
            what="clipped weights of tokens",
            here="`algorithm.type: cispo`",
            trl=cell("loss_type", text='`loss_type="cispo"`'),
            verl=cell(_MODE, text=_mode("cispo")),
        ),
        Fact(
            what="a mask by divergence",
            here=f"`algorithm.type: dppo`, `{_LOSS}divergence`",
            verl=cell(_MODE, text="`actor.policy_loss.loss_mode=dppo_tv`, `dppo_kl`"),
        ),
        Fact(
            what="its thresholds",
            here=f"`{_LOSS}divergence_low`, `{_LOSS}divergence_high`",
            verl=cell(*_CLIPS),
        ),
        Fact(
            what="a soft gate",
            here="`algorithm.type: sapo`",
            trl=cell("loss_type", text='`loss_type="sapo"`'),
            verl=cell(_MODE, text=_mode("sapo")),
        ),
        Fact(
            what="its steepness where the advantage is positive",
            target=f"{_LOSS}gate_positive",
            trl=cell("sapo_temperature_pos"),
            verl=cell(f"{ACTOR}tau_pos"),
        ),
        Fact(
            what="where it is not",
            target=f"{_LOSS}gate_negative",
            trl=cell("sapo_temperature_neg"),
            verl=cell(f"{ACTOR}tau_neg"),
        ),
        Fact(
            what="the geometric mean of ratios; clips are of log-ratios",
            here="`algorithm.type: gmpo`",
            trl=words("`GMPOTrainer`"),
            verl=cell(_MODE, text=_mode("geo_mean")),
        ),
        Fact(
            what="soft weights of completions",
            here="`algorithm.type: vespo`",
            trl=cell("loss_type", text='`loss_type="vespo"`'),
        ),
        Fact(
            what="their powers, by the advantage's sign",
            target=f"{_LOSS}power_positive",
            here=f"`{_LOSS}power_positive`, `{_LOSS}power_negative`",
            trl=cell(
                "vespo_k_pos",
                "vespo_k_neg",
                take=lambda source: source.number("vespo_k_pos"),
            ),
        ),
        Fact(
            what="power where the advantage is negative",
            target=f"{_LOSS}power_negative",
            trl=cell("vespo_k_neg"),
            is_shown=False,
        ),
        Fact(
            what="their decays, by the advantage's sign",
            target=f"{_LOSS}decay_positive",
            here=f"`{_LOSS}decay_positive`, `{_LOSS}decay_negative`",
            trl=cell(
                *("vespo_lambda_pos", "vespo_lambda_neg"),
                take=lambda source: source.number("vespo_lambda_pos"),
            ),
        ),
        Fact(
            what="decay where the advantage is negative",
            target=f"{_LOSS}decay_negative",
            trl=cell("vespo_lambda_neg"),
            is_shown=False,
        ),
        Fact(
            what="tokens that drain entropy, without gradient",
            here="`algorithm.type: clip_cov`",
            verl=cell(_MODE, text=_mode("clip_cov")),
        ),
        Fact(
            what="their covariance, from and to",
            target=f"{_LOSS}covariance_low",
            here=f"`{_LOSS}covariance_low`, `{_LOSS}covariance_high`",
            verl=cell(
                *(f"{_POLICY}clip_cov_lb", f"{_POLICY}clip_cov_ub"),
                take=lambda source: source.number(f"{_POLICY}clip_cov_lb"),
            ),
        ),
        Fact(
            what="the largest covariance",
            target=f"{_LOSS}covariance_high",
            verl=cell(f"{_POLICY}clip_cov_ub"),
            is_shown=False,
        ),
        Fact(
            what="tokens that drain entropy, penalised",
            here="`algorithm.type: kl_cov`",
            verl=cell(_MODE, text=_mode("kl_cov")),
        ),
        Fact(
            what="weight of the penalty",
            target=f"{_LOSS}penalty_coefficient",
            verl=cell(f"{_POLICY}ppo_kl_coef"),
        ),
        Fact(
            what="share of such tokens",
            target=f"{_LOSS}covariance_share",
            verl=cell(
                *(f"{_POLICY}clip_cov_ratio", f"{_POLICY}kl_cov_ratio"),
                take=lambda source: source.number(f"{_POLICY}{source.text(_MODE)}_ratio"),
            ),
        ),
        Fact(
            what="the plain policy gradient",
            here=f"`{_LOSS}type: reinforce`",
            verl=cell(
                *(_MODE, f"{_CORRECTION}loss_type"),
                text="`actor.policy_loss.loss_mode=gpg`; `algorithm.rollout_correction.loss_type="
                "reinforce` with its `bypass_mode`",
            ),
        ),
    ),
)

CORRECTIONS = Topic(
    title="Samples of another policy",
    facts=(
        Fact(
            what="which correction, and its bounds",
            here="`algorithm.off_policy`",
            put=off.put_off_policy,
            trl=cell(
                *(f"{_TRL_IS}mode", f"{_TRL_IS}clip_min", f"{_TRL_IS}clip_max"),
                f"{_TRL_IS}correction",
                text="{0}, {1}, {2}",
                take=off.trl_off_policy,
            ),
            openrlhf=cell(
                *(f"{_IS}level", f"{_IS}mode", f"{_IS}threshold", f"{_IS}gating"),
                text="{0}, {1}, {2}",
                take=off.openrlhf_off_policy,
            ),
            verl=cell(
                *(f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_is_threshold"),
                *(f"{_CORRECTION}rollout_rs", f"{_CORRECTION}rollout_rs_threshold"),
                take=off.verl_off_policy,
            ),
        ),
        Fact(
            what="weights of tokens, cut",
            here="`type: token_truncation`, `cap`",
            trl=words('`"token_truncate"`'),
            openrlhf=words("`token`, `clip`"),
            verl=words("`rollout_is=token`, one number"),
        ),
        Fact(
            what="weights of completions, cut",
            here="`type: sequence_truncation`, `cap`",
            trl=words('`"sequence_truncate"`'),
            verl=words("`rollout_is=sequence`, one number"),
        ),
        Fact(
            what="weights of tokens, masked",
            here="`type: masking`, `low`, `high`",
            trl=words('`"token_mask"`'),
            openrlhf=words("`token`, `mask`"),
            verl=words("`rollout_is=token`, two numbers; or with `rollout_rs=token_k1`"),
        ),
        Fact(
            what="weights of completions, masked",
            here="`type: masking`, `level: sequence`",
            trl=words('`"sequence_mask"`'),
            verl=words("`rollout_is=sequence`, two numbers; or with `rollout_rs=seq_sum_k1`"),
        ),
        Fact(
            what="completions left out by their mean ratio",
            here="`type: geometric_rejection`",
            openrlhf=words("`seq`, `mask` (and weighs tokens)"),
            verl=words("`rollout_rs=seq_mean_k1`; its bounds are those of the inverse ratio"),
        ),
        Fact(
            what="weights divided by their mean",
            here="`normalize: batch`",
            verl=cell(f"{_CORRECTION}rollout_is_batch_normalize"),
        ),
        Fact(
            what="none",
            here="`algorithm.off_policy: null`",
            trl=cell(f"{_TRL_IS}correction", text=f"`{_TRL_IS}correction=False`"),
            openrlhf=words("`off`"),
            verl=cell(
                f"{_CORRECTION}bypass_mode", text="{0} (the clip is around the policy that sampled)"
            ),
        ),
    ),
)

TEACHERS = Topic(
    title="Teachers",
    facts=(
        Fact(
            what="a teacher in the place of a reward",
            here="`algorithm.type: on_policy_distillation` ([teachers](teachers.md))",
            trl=words("`DistillationTrainer`, `GKDTrainer`"),
            verl=cell(
                *("distillation.enabled", f"{of.LOSS}use_task_rewards"),
                text=f"{{0}} with `{of.LOSS}use_task_rewards=False`",
            ),
        ),
        Fact(
            what="the teacher's model",
            target="teacher.model.path",
            trl=cell("teacher_model_name_or_path", take=of.trl_teacher),
            verl=cell(f"{of.TEACHERS}teacher_model.model_path", take=of.verl_teacher),
        ),
        Fact(
            what="several teachers, by a column of the data",
            here="`teacher.named`, `teacher.route`",
            verl=words("`distillation.teacher_key`, `distillation.teacher_models.NAME.key`"),
        ),
        Fact(
            what="how distributions are compared",
            here=f"`{_LOSS}type: distillation`, `{_LOSS}divergence`",
            trl=cell("beta", text="{0}: 0 is `forward_kl`, 1 `reverse_kl`"),
            verl=cell(
                f"{of.LOSS}loss_mode",
                text="{0}: `forward_kl_topk` and `k3` are `forward_kl`, `k2` is `reverse_kl`",
            ),
        ),
        Fact(
            what="a mixture of both",
            here=f"`{_LOSS}divergence: jensen_shannon`, `{_LOSS}mixture`",
            trl=words("`beta` between"),
        ),
        Fact(
            what="tokens that the teacher tells apart",
            here=f"`{_LOSS}top_k`",
            trl=cell("loss_top_k", text="all; {0} of a server"),
            verl=cell(f"{of.LOSS}topk"),
        ),
        Fact(
            what="share of completions that are the policy's own",
            here="all",
            trl=cell("lmbda", text="{0} of `GKDConfig`; all with `DistillationConfig`"),
            verl=words("all"),
        ),
        Fact(
            what="the teacher as a reward of each sampled token",
            here=f"`{_LOSS}type: ppo_policy`",
            verl=cell(
                f"{of.LOSS}use_policy_gradient",
                text=f"{{0}} with `{of.LOSS}loss_mode=k1`",
            ),
        ),
        Fact(
            what="its clips",
            here=f"`{_LOSS}clip_low`, `{_LOSS}clip_high`",
            verl=cell(
                *(f"{of.LOSS}clip_ratio_low", f"{of.LOSS}clip_ratio_high", f"{of.LOSS}clip_ratio"),
                text="{0}, {1}",
            ),
        ),
        Fact(
            what="a teacher beside the reward",
            here=f"`{_LOSS}kl_in_loss`, and a section `teacher` in the place of `reference`",
            verl=cell(
                *(f"{of.LOSS}use_task_rewards", f"{of.LOSS}distillation_loss_coef"),
                text=f"`{of.LOSS}use_task_rewards=True`, {{1}}",
            ),
        ),
        Fact(
            what="the teacher's GPUs",
            here="`teacher.layout`, `pools`",
            trl=words("processes of `accelerate launch`"),
            verl=cell(
                *("distillation.nnodes", "distillation.n_gpus_per_node"),
                f"{of.TEACHERS}teacher_model.inference.tensor_model_parallel_size",
                text="{0} x {1}, {2}",
            ),
        ),
    ),
)
