"""Every algorithm: its section, its roles, and what a step of it asks of whom, in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.fake_recipes import TRAINED_REWARD, fake_recipe

from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS

SAMPLED = {"sampling": {"samples_per_prompt": 2}, "mini_batch_rows": 4}
KL = {"advantages": {"kl_in_reward": {"type": "fixed"}}}
BASE = {"tokens", "prompt_lengths", "loss_mask"}
POLICY = {*BASE, "logprobs", "advantages", "policy_versions"}
GROUP_ORDER = (
    "actor.Generate", "reward.ComputeReward", "actor.ComputeAdvantages", "actor.Update",
)  # fmt: skip
KL_ORDER = (GROUP_ORDER[0], "reference.ComputeLogprobs", *GROUP_ORDER[1:])


@dataclass(frozen=True)
class Case:
    """An algorithm's section, its roles, and what a step of it is."""

    section: dict[str, Any]
    roles: tuple[str, ...]
    order: tuple[str, ...]
    """Calls of a step, all roles in one pool."""
    reads: dict[str, set[str]] = field(default_factory=dict)
    """Columns that calls must get, as the formulas of the papers say, not the specs."""
    rows_per_unit: int = 2
    reward: dict[str, Any] | None = None

    def recipe(self, **changes: Any) -> Any:
        algorithm = {**self.section, **changes.pop("algorithm", {})}
        values = {"steps": 2, "evaluation": {"num_prompts": 0}, **changes}
        return fake_recipe(roles=self.roles, algorithm=algorithm, reward=self.reward, **values)


def group(name: str, *, with_reference: bool = False, **section: Any) -> Case:
    """A case of an algorithm that compares the completions of a prompt."""
    roles = ("actor", "reference", "reward") if with_reference else ("actor", "reward")
    judged = {*BASE, "rewards", "prompt_ids"}
    if with_reference:
        given = section.get("advantages", {})
        if isinstance(given, dict):
            section = {**section, "advantages": {**KL["advantages"], **given}}
        judged |= {"logprobs", "reference_logprobs"}
    return Case(
        {"type": name, **SAMPLED, **section},
        roles,
        KL_ORDER if with_reference else GROUP_ORDER,
        {
            "actor.ComputeAdvantages": judged,
            "actor.Update": POLICY,
            "reward.ComputeReward": {"completion_text", "answer", "metadata", "prompt_text"},
        },
        rows_per_unit=section.get("sampling", SAMPLED["sampling"])["samples_per_prompt"],
    )


NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"policy_loss": {"aggregation": "seq_sum_norm", "norm_length": 8}},
    "pass_at_k": {"advantages": {"k": 2}, "sampling": {"samples_per_prompt": 4}},
}
"""What a recipe has to give of algorithms that have no default for it."""
PPO_ORDER = (
    "actor.Generate", "critic.ComputeValues", "reference.ComputeLogprobs", "reward.ComputeReward",
    "actor.ComputeAdvantages", "critic.Update", "actor.Update",
)  # fmt: skip
PPO_READS = {
    "actor.ComputeAdvantages": {
        *BASE, "rewards", "values", "logprobs", "reference_logprobs",
    },
    "critic.Update": {*BASE, "values", "returns"},
    "actor.Update": POLICY,
}  # fmt: skip
SAFE_ORDER = (*PPO_ORDER[:4], "cost.ComputeReward", *PPO_ORDER[4:])
SAFE_READS = {
    **PPO_READS,
    "actor.ComputeAdvantages": {*PPO_READS["actor.ComputeAdvantages"], "costs"},
}
PPO_ROLES = ("actor", "critic", "reference", "reward")
PAIRS = {"pair_ids", "preference"}
CASES: dict[str, Case] = {
    "ppo": Case({"type": "ppo", **SAMPLED, **KL}, PPO_ROLES, PPO_ORDER, PPO_READS),
    "safe_rlhf": Case(
        {"type": "safe_rlhf", **SAMPLED, **KL}, (*PPO_ROLES, "cost"), SAFE_ORDER, SAFE_READS
    ),
    "safe_rlhf with texts": Case(
        {"type": "safe_rlhf", "pretraining_weight": 0.5, **SAMPLED, **KL},
        (*PPO_ROLES, "cost"),
        # Nothing has to be there before texts are read: so the actor does it at once.
        (SAFE_ORDER[0], "actor.ReadBatch", *SAFE_ORDER[1:]),
        SAFE_READS,
    ),
    **{
        name: group(name, **NEEDED.get(name, {})) for name in POLICY_GRADIENTS if name != "gdpo"
    },
    **{
        f"{name} with reference": group(name, with_reference=True, **NEEDED.get(name, {}))
        for name in POLICY_GRADIENTS
        # These take rewards as they came.
        if name not in ("gdpo", "maxrl")
    },
    "gdpo": Case(
        {"type": "gdpo", **SAMPLED},
        ("actor", "reward"),
        GROUP_ORDER,
        {"actor.ComputeAdvantages": {*BASE, "rewards", "reward/a", "reward/b", "prompt_ids"}},
        reward={
            "source": [
                {"source": {"type": "arithmetic"}, "name": name} for name in ("a", "b")
            ]
        },
    ),
    "grpo with other parts": group("grpo", advantages="rloo", policy_loss="cispo"),
    "grpo with a cap": Case(
        {"type": "grpo", **SAMPLED, "off_policy": {"type": "token_truncation", "cap": 2.0}},
        ("actor", "reward"),
        # The update asks for them, but they need the rollouts alone.
        (*GROUP_ORDER[:2], "actor.ComputeLogprobs", *GROUP_ORDER[2:]),
        {"actor.Update": {*POLICY, "proximal_logprobs"}},
    ),
    "dapo": Case(
        {"type": "dapo", **SAMPLED},
        ("actor", "reward"),
        (*GROUP_ORDER[:2], "actor.SelectGroups", *GROUP_ORDER[2:]),
        {
            "actor.SelectGroups": {*BASE, "rewards", "prompt_ids", "logprobs", "metadata"},
            "actor.ComputeAdvantages": {*BASE, "rewards", "prompt_ids"},
            "actor.Update": POLICY,
        },
    ),
    "remax": Case(
        {"type": "remax", **SAMPLED},
        ("actor", "reward"),
        ("actor.Generate", "actor.Generate", "reward.ComputeReward", "reward.ComputeReward",
         *GROUP_ORDER[2:]),
        {"actor.ComputeAdvantages": {*BASE, "rewards", "prompt_ids"}, "actor.Update": POLICY},
    ),
    "on_policy_distillation": Case(
        {"type": "on_policy_distillation", **SAMPLED},
        ("actor", "teacher"),
        ("actor.Generate", "teacher.ComputeLogprobs", "actor.ComputeAdvantages", "actor.Update"),
        {
            "actor.ComputeAdvantages": {"logprobs", "teacher_logprobs", "loss_mask"},
            "actor.Update": POLICY,
        },
    ),
    "on_policy_distillation of distributions": Case(
        {
            "type": "on_policy_distillation", **SAMPLED,
            "policy_loss": {"type": "distillation", "top_k": 4},
        },
        ("actor", "teacher", "reward"),
        ("actor.Generate", "teacher.ComputeLogprobs", "reward.ComputeReward",
         "actor.ComputeAdvantages", "actor.Update"),
        {
            "actor.ComputeAdvantages": {"logprobs", "teacher_logprobs", "loss_mask", "rewards"},
            "actor.Update": {*BASE, "teacher_logprobs_top_ids", "teacher_logprobs_top"},
        },
    ),
    "ppo with a teacher": Case(
        {"type": "ppo", **SAMPLED, **KL},
        ("actor", "critic", "teacher", "reward"),
        tuple(call.replace("reference.", "teacher.") for call in PPO_ORDER),
        PPO_READS,
    ),
    "grpo with a teacher": Case(
        {"type": "grpo", **SAMPLED, **KL},
        ("actor", "teacher", "reward"),
        tuple(call.replace("reference.", "teacher.") for call in KL_ORDER),
        {"actor.ComputeAdvantages": {*BASE, "rewards", "logprobs", "reference_logprobs"}},
    ),
    "online_dpo": Case(
        {"type": "online_dpo", **SAMPLED},
        ("actor", "reference", "reward"),
        KL_ORDER,
        {
            "actor.ComputeAdvantages": {*BASE, "rewards", "prompt_ids"},
            "actor.Update": {*BASE, *PAIRS, "reference_logprobs"},
        },
    ),
    "dpo": Case(
        {"type": "dpo", "mini_batch_rows": 4},
        ("actor", "reference"),
        ("actor.ReadBatch", "reference.ComputeLogprobs", "actor.Update"),
        {"actor.Update": {*BASE, *PAIRS, "reference_logprobs"}},
    ),
    "kto": Case(
        {"type": "kto", "mini_batch_rows": 4},
        ("actor", "reference"),
        ("actor.ReadBatch", "reference.ComputeLogprobs", "actor.ComputeLogprobs",
         "actor.ComputeAdvantages", "actor.Update"),
        {
            "actor.ComputeAdvantages": {
                *BASE, "preference", "proximal_logprobs", "reference_logprobs",
            },
            "actor.Update": {*BASE, "preference", "reference_logprobs", "kl_reference_point"},
        },
    ),
    "sft": Case(
        {"type": "sft", "mini_batch_rows": 4},
        ("actor",),
        ("actor.ReadBatch", "actor.Update"),
        {"actor.Update": BASE},
        rows_per_unit=1,
    ),
    "reward_model": Case(
        {"type": "reward_model", "mini_batch_rows": 4},
        ("reward",),
        ("reward.ReadBatch", "reward.Update"),
        {"reward.Update": {*BASE, *PAIRS}},
        reward=TRAINED_REWARD,
    ),
}  # fmt: skip
