"""The metrics of metrics.jsonl, TensorBoard and the dashboard, each with its formula or meaning.

A name holds for every role that reports it: where two roles of a step do, it becomes `<role>/name`
(`actor/grad_norm`). The values of an evaluation stand under `held_out/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rolemesh.coordinator.recipe.role_names import ROLES, kind_of

METRICS: Mapping[str, Mapping[str, str]] = {
    "The step": {
        "step": "Number of the step, from 1.",
        "services/<role>": "Services of a role that the step began with, where they may join "
        "and leave.",
        "tokens": "Tokens of all rows that the step sampled or read, prompts included.",
        "tokens_per_second": "`tokens` / `time/step`.",
        "time/step": "Seconds from the first call of the step to its commit.",
        "time/<phase>": "Seconds of a phase: `generate`, `weight_sync`, `publish_weights`, "
        "`proximal`, `values`, `reference`, `reward`, `cost`, `advantages`, `update_actor`, "
        "`update_critic`, `update_reward`, `sleep`, `wake`; another call is "
        "`<role>_<method>`. Phases in several pools may overlap.",
        "time/cut": "Seconds for which copies of trained roles' state to shared memory held the "
        "run up.",
        "dataflow/critical_path_seconds": "Seconds of the longest chain of calls that had to "
        "wait for each other.",
        "memory/<phase>_peak_bytes": "Most memory of one rank in a phase, in bytes.",
        "experience/fetched_bytes": "Bytes that services pulled from each other.",
        "coordinator/calls": "Calls of the coordinator, without those that watch services.",
        "coordinator/sent_bytes": "Bytes that the coordinator sent in these calls.",
        "coordinator/received_bytes": "Bytes that the coordinator received in these calls.",
        "staleness/max": "Steps by which the oldest weights that sampled were behind those "
        "that train.",
    },
    "Sampling": {
        "completion_length/mean": "Mean number of tokens of a completion; tokens of an "
        "environment count.",
        "completion_length/max": "Tokens of the longest completion.",
        "completion_length/min": "Tokens of the shortest completion.",
        "finished_fraction": "Share of completions that ended by themselves. The others were "
        "cut by a length limit.",
        "sampler_logprob/mean": "Mean log-prob of the sampled tokens under the sampler, nats.",
        "policy_version/min": "Version of the oldest weights that sampled a token. Each "
        "optimizer step adds 1.",
        "policy_version/max": "Version of the newest weights that sampled a token.",
        "published_bytes": "Bytes of weights that the actor published for rollout services.",
        "weight_sync_bytes": "Bytes of new weights that a rollout service took.",
        "weights_sent_bytes": "Of these, bytes that the actor sent straight to its ranks "
        "(`schedule.sampler.weights: nccl`).",
        "agents/rows": "Rows that trajectories of agents have, one for each branch.",
        "agents/calls/mean": "Mean number of calls of a trajectory.",
        "agents/again": "Attempts of trajectories that failed and began again.",
        "agents/left_out": "Trajectories that were left out, with those of their groups.",
        "selection/groups": "Groups of completions that were judged (`dapo`).",
        "selection/wanted": "Groups whose rewards have a standard deviation above `min_std`.",
        "selection/kept": "Groups that the step trains on.",
        "selection/rows": "Completions of these groups.",
    },
    "Rewards and costs": {
        "reward/mean": "Mean reward over the judged rows, before the KL penalty and any "
        "punishment of length.",
        "reward/std": "Standard deviation of these rewards.",
        "reward/min": "Smallest of these rewards.",
        "reward/max": "Largest of these rewards.",
        "reward/standard_error": "Standard deviation (n - 1) / sqrt(rows).",
        "reward/dropped_rows": "Rows that left the step, since their reward failed.",
        "reward/baseline_mean": "Mean of what rewards are compared with: the reward of the greedy "
        "completions (`remax`), or the mean score of the steps before (`running_baseline`).",
        "accuracy/mean": "Share of rows whose reward reaches the full score of the source.",
        "accuracy/standard_error": "Standard error of `accuracy/mean`.",
        "pass@<k>": "Probability that one of k completions of a prompt is right: mean over "
        "prompts of 1 - C(n - right, k) / C(n, k), with n completions a prompt.",
        "reward/<source>/mean": "Mean reward of one source, before its weight.",
        "reward/<source>/std": "Standard deviation of these.",
        "reward/<source>/absent_rows": "Rows to which the source does not apply, or that failed.",
        "reward/<source>/failed_rows": "Rows for which the source gave no valid answer.",
        "reward/<source>/dropped_rows": "Rows that left the step for that.",
        "reward/<source>/latency_p50_seconds": "Median time of the requests that were "
        "answered, seconds.",
        "reward/<source>/latency_p99_seconds": "Time that 99 of 100 of these requests kept, "
        "seconds.",
        "reward/<source>/errors": "Requests that failed after all tries.",
        "reward/<source>/retries": "Requests that were sent again.",
        "reward/<source>/hedged": "Requests that were sent twice because the first was slow.",
        "reward/<source>/cache_hits": "Rows whose reward came from the cache.",
        "reward/<source>/queue_peak": "Most requests that waited for their turn.",
        "reward/<source>/<metric>": "Everything else that a reward of yours reports: the mean of "
        "a part of it over the rows that have the part, or a metric.",
        "cost/mean": "Mean cost over the rows (`safe_rlhf`).",
        "cost/std": "Standard deviation of the costs.",
        "cost/min": "Smallest cost.",
        "cost/max": "Largest cost.",
        "cost/standard_error": "Standard deviation (n - 1) / sqrt(rows).",
        "cost/dropped_rows": "Rows that left the step, since their cost failed.",
        "cost/multiplier": "The Lagrange multiplier, the weight of the cost in the reward.",
        "cost/<source>/<metric>": "As `reward/<source>/...`, of a source of costs.",
        "teacher/failed_rows": "Rows for which the teacher's servers gave no log-probs "
        "(`teacher.server`).",
        "teacher/dropped_rows": "Rows that left the step for that, with those of their prompts.",
    },
    "Advantages": {
        "kl/mean": "KL of the policy to the reference on the sampled tokens, nats a token: "
        "mean of log pi - log pi_ref with `kl_form: k1`.",
        "kl/per_row": "The same, summed over a completion: nats a row. The adaptive "
        "controller holds this one.",
        "kl/teacher": "KL of the policy to the teacher on the sampled tokens, nats a token: "
        "mean of log pi - log pi_teacher with the log-probs of the sampler.",
        "kl/teacher/<name>": "The same to one of several teachers, over the tokens of its rows.",
        "kl/teacher_per_row": "The same, summed over a completion: nats a row.",
        "kl/coefficient": "Weight of the KL in the reward in this step.",
        "advantages/mean": "Mean over the unmasked tokens, before any scaling over the batch.",
        "advantages/std": "Standard deviation of the same.",
        "advantages/rows_without_tokens": "Rows without a token to train on. They take no part.",
        "returns/mean": "Mean of what the critic learns to predict.",
        "returns/std": "Standard deviation of the same.",
        "values/mean": "Mean prediction of the critic.",
        "values/explained_variance": "1 - Var(returns - values) / Var(returns). 1: the critic "
        "predicts exactly; 0: no better than the mean.",
        "groups/count": "Groups, i.e. prompts with their completions.",
        "groups/std": "Mean over groups of the standard deviation of a group's scores.",
        "groups/all_equal": "Groups of two or more rows whose scores are all equal (`gdpo`: in "
        "each of the rewards). They teach nothing.",
        "groups/of_one": "Groups with one row. There is nothing to compare it with.",
        "groups/left_out": "Groups that the loss leaves out, since nothing tells their rows apart "
        "(`zero_variance: left_out`).",
        "groups/too_small": "Groups of k completions or fewer, whose advantages are 0 "
        "(`pass_at_k`).",
        "overlong/fraction": "Share of rows that are punished for their length.",
        "overlong/punishment": "Mean punishment over all rows, as a reward.",
        "pairs/count": "Pairs that the completions made (`online_dpo`).",
        "pairs/ties": "Groups whose rewards are all equal. They make no pair.",
        "pairs/of_one": "Groups of one row. They make no pair.",
        "pairs/reward_margin": "Mean of the reward of the better row less that of the worse.",
    },
    "Updates of a policy or a critic": {
        "loss": "The loss that was minimised, mean over the optimizer steps.",
        "grad_norm": "L2 norm of the gradient before clipping, mean over optimizer steps.",
        "learning_rate": "Mean learning rate of the optimizer steps, by warm-up and schedule.",
        "optimizer_steps": "Optimizer steps of the update.",
        "computed_fraction": "Tokens that the passes of the update computed, for each token of "
        "their rows. Below 1 where rows begin alike, which is computed once.",
        "experts/load_ratio": "Of a mixture: choices of its most chosen expert over the mean of "
        "all, for completion tokens, mean over layers and optimizer steps. 1: even loads. No token "
        "is dropped, whatever the loads.",
        "experts/load_ratio_max": "The same in the layer with the most uneven loads.",
        "experts/load_entropy": "Entropy of the loads of a layer's experts over that of even "
        "loads, mean over layers and optimizer steps. 1: even loads.",
        "policy_loss": "The loss without entropy bonus and KL.",
        "kl_loss": "The KL to the reference in the loss, before `kl_in_loss` weighs it.",
        "entropy": "Entropy of the policy at each token, nats, mean over tokens.",
        "ratio_mean": "Mean over tokens of the ratio that the loss works with, as a rule "
        "exp(log-prob now - log-prob when sampled).",
        "ratio_max": "Largest such ratio.",
        "approx_kl": "KL of the policy that sampled to the policy now: mean of "
        "exp(r) - 1 - r, with r = log-prob now - log-prob then; nats a token.",
        "clip_fraction_high": "Share of tokens above the upper clip, whose gradient is gone "
        "(`cispo`: whose weight is bounded; `dppo`: that the divergence masks).",
        "clip_fraction_low": "Share of tokens below the lower clip.",
        "dual_clip_fraction": "Share of tokens that `dual_clip` bounds.",
        "token_weight_mean": "Mean of the factor by which the loss scales the gradient of a token, "
        "1 where the policy is still the one that sampled (`sapo`, `vespo`, `topr`).",
        "divergence": "Mean divergence of a token of the policy that sampled and the policy now, "
        "with which `dppo` compares its thresholds.",
        "covariance": "Covariance of log-prob when sampled and advantage. The higher, the faster "
        "the entropy falls (`clip_cov`, `kl_cov`).",
        "covariance_chosen_fraction": "Share of tokens whose gradient `clip_cov` takes, or that "
        "`kl_cov` penalises.",
        "importance_weight_mean": "Mean weight of a token by `algorithm.off_policy`, before "
        "`normalize` divides by it.",
        "importance_capped_fraction": "Share of tokens whose ratio, or that of their row, is "
        "above the cap.",
        "importance_masked_fraction": "Share of tokens that the correction masks: they, or their "
        "rows, lie outside of its bounds.",
        "sampler_logprob_diff_mean": "Mean of |log-prob of the trainer - log-prob of the "
        "sampler| in the first mini-batch, nats a token. With equal weights it is rounding.",
        "sampler_logprob_diff_max": "Largest such difference.",
        "sampler_ratio_mean": "Mean over tokens of rho = exp(log-prob at the start of the update "
        "- log-prob when sampled), in the first mini-batch as all of the following. 1 but for "
        "the draw.",
        "sampler_kl_k1": "KL of the policy that sampled to the trainer at the start of the "
        "update: mean of -log rho, nats a token; may be negative.",
        "sampler_kl_k3": "The same KL as mean of rho - 1 - log rho: never negative, and less noisy "
        "where it is small.",
        "sampler_chi_square": "Chi-square divergence of the trainer from the policy that sampled: "
        "mean of rho^2 - 1. It is the variance of untruncated weights.",
        "effective_sample_fraction": "Effective sample size of weights rho, for each token: "
        "(mean rho)^2 / mean of rho^2. 1: all tokens count alike.",
        "age/<versions>/fraction": "Share of tokens that weights of this age sampled, in versions "
        "(optimizer steps) behind the start of the update; 4 stands for 4 and more.",
        "age/<versions>/sampler_kl_k3": "`sampler_kl_k3` of these tokens alone, nats a token.",
        "value_loss": "Loss of the critic: 0.5 (values - returns)^2, clipped.",
        "value_clip_fraction": "Share of tokens at which the value clip counts.",
        "values_mean": "Mean value in the update.",
        "value_error_max": "Largest |values - returns|.",
    },
    "Updates from given data": {
        "nll": "Mean over tokens of -log-prob of the given completion, nats (`sft`). exp of "
        "it is the perplexity.",
        "distillation_loss": "Divergence of the policy from the teacher over the tokens that the "
        "teacher tells apart and all others together, in nats.",
        "teacher_mass": "Share of the teacher's distribution that those tokens hold. Far below 1, "
        "raise `top_k`.",
        "policy_mass": "Share of the policy's distribution that those tokens hold.",
        "preference_accuracy": "Share of pairs whose chosen row has the greater reward, before "
        "they are trained on; a tie counts as a half, which is what a guess would get. For "
        "`kto` the share of judged rows whose reward is on their side of beta "
        "`kl_reference_point`.",
        "preference_margin": "Mean over pairs of the chosen reward less the rejected one; for "
        "`kto`, `chosen_reward` - `rejected_reward`.",
        "chosen_reward": "Mean reward of chosen rows. For `dpo` and `kto` the reward is "
        "beta (log pi - log pi_ref), for a reward model its score.",
        "rejected_reward": "The same for rejected rows.",
        "kl_reference_point": "The point that `kto` compares with: max(0, "
        "`kl_reference_point_raw`).",
        "kl_reference_point_raw": "Mean log pi - log pi_ref of mismatched completions, nats a row.",
        "auxiliary/<loss>/<metric>": "A metric of a loss beside the main one, not weighted "
        "(`pretraining_weight`).",
    },
    "Health and evaluation": {
        "health/skipped": "1 in a step whose updates a rule has undone.",
        "health/roll_backs": "Times that the run has gone back so far.",
        "health/<rule>": "1 in a step that this rule struck.",
        "held_out/score": "Mean reward over the held-out prompts.",
        "held_out/standard_error": "Its standard error.",
        "held_out/loss": "The algorithm's loss over the held-out rows, of `sft`, `dpo`, `kto` "
        "and `reward_model`. Lower is better.",
        "held_out/<metric>": "A metric of sampling, of rewards or of that loss, over all "
        "held-out prompts or rows together.",
        "evaluated/<task>/score": "Mean score over the prompts of a task, by `rolemesh evaluate` "
        "of a checkpoint; a prompt counts once, with the mean of its completions.",
        "evaluated/<task>/standard_error": "Its standard error over prompts.",
        "evaluated/<task>/pass@<k>": "Chance that one of k completions passes, over the prompts "
        "of a task (arXiv 2107.03374, eq. 1).",
    },
}
"""By topic and name: formula or meaning, with the unit of what is no share or number.

A name is as in a record; a part in angle brackets stands for several.
"""


def explanation(name: str) -> str | None:
    """The explanation of a name of a record; None where there is none.

    A name with its own explanation comes before a family, e.g. `reward/mean` before
    `reward/<source>/<metric>`.
    """
    own = name.removeprefix("held_out/")
    role, _, rest = own.partition("/")
    for each in (name, own, *([rest] if kind_of(role) in ROLES and "/" not in rest else [])):
        for metrics in METRICS.values():
            for metric, text in metrics.items():
                if metric != "held_out/<metric>" and _is_called(metric, each):
                    return text
    return None


def _is_called(metric: str, name: str) -> bool:
    """Whether a name of a record is this metric or one of the family."""
    pattern = "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", metric))
    return re.fullmatch(pattern, name) is not None
