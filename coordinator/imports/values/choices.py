"""Which algorithm another system's settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.coordinator.imports.source import ImportedError, Source, SystemName

_VERL_ESTIMATORS = {
    **{"gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo"},
    **{"rloo_vectorized": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
_VERL_LOSSES = ("vanilla", "gspo", "cispo")
_VERL_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_OPENRLHF_ESTIMATORS = {
    **{"gae": "ppo", "reinforce": "reinforce_plus_plus", "rloo": "rloo", "group_norm": "grpo"},
    **{"reinforce_baseline": "reinforce_plus_plus_baseline", "dr_grpo": "dr_grpo"},
}
_TRL_LOSSES = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo")
_GROUP: Mapping[SystemName, str] = {
    "verl": "actor_rollout_ref.rollout.n",
    "openrlhf": "rollout.n_samples_per_prompt",
    "trl": "num_generations",
}
_COMPARING = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"),
)
_OWN = "a loss of your own is a function: docs/own-losses.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An algorithm of ours."""

    type: str
    loss: str | None = None
    """Type of the policy's loss, where the algorithm takes several."""
    aggregation: str | None = None
    """How token losses become one number; None: as the algorithm has it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys, by path."""


def choice(source: Source) -> Choice:
    """The algorithm that a source asks for.

    Raises:
        ImportedError: There is none like it here.
    """
    makers = {"verl": _of_verl, "openrlhf": _of_openrlhf, "trl": _of_trl}
    made = source.once(makers[source.system])
    name = _GROUP[source.system]
    group = source.whole(name)
    if made.type in _COMPARING and group == 1:
        raise ImportedError(
            f"{source.name_of(name)} is 1, but {made.type} compares the completions of a prompt "
            "with each other: give at least 2"
        )
    return made


def _refused(source: Source, name: str, value: Any, known: Any, more: str) -> ImportedError:
    choices = ", ".join(known)
    return ImportedError(
        f"{source.name_of(name)} is {value!r}, and no algorithm here does that: give one of "
        f"{choices} in its place ({more})"
    )


def _of_verl(source: Source) -> Choice:
    estimator = source.text("algorithm.adv_estimator")
    loss = source.text(_VERL_LOSS)
    if estimator not in _VERL_ESTIMATORS:
        raise _refused(
            *(source, "algorithm.adv_estimator", estimator, _VERL_ESTIMATORS),
            "as an override after CONFIG, e.g. algorithm.adv_estimator=grpo; an estimator of your "
            "own is a function: docs/own-losses.md",
        )
    if loss not in _VERL_LOSSES:
        raise _refused(
            *(source, _VERL_LOSS, loss, _VERL_LOSSES),
            f"as an override after CONFIG, e.g. {_VERL_LOSS}=vanilla; {_OWN}",
        )
    ours = _VERL_ESTIMATORS[estimator]
    if loss in ("gspo", "cispo"):
        if ours != "grpo":
            raise ImportedError(
                f"{_VERL_LOSS} is {loss!r} and algorithm.adv_estimator is {estimator!r}: {loss} "
                "goes with grpo here: give algorithm.adv_estimator=grpo as an override after "
                f"CONFIG, or {_VERL_LOSS}=vanilla"
            )
        return Choice(type=loss, aggregation=None if loss == "gspo" else _verl_mean(source))
    if ours == "grpo" and source.flag("algorithm.filter_groups.enable"):
        ours = "dapo"
    return Choice(type=ours, loss="ppo_policy", aggregation=_verl_mean(source))


_MEANS = {
    **{"token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum"},
    **{"seq-mean-token-mean": "seq_mean_token_mean", "seq-mean-token-sum-norm": "seq_sum_norm"},
}


def mean_of(source: Source, name: str) -> str | None:
    """The aggregation of ours for verl's or OpenRLHF's name of one."""
    mode = source.text(name)
    if mode not in _MEANS:
        source.lose(name, f"no such mean here: the loss is averaged over all tokens ({_OWN})")
        return "token_mean"
    return _MEANS[mode]


def _verl_mean(source: Source) -> str | None:
    return mean_of(source, "actor_rollout_ref.actor.loss_agg_mode")


def _of_openrlhf(source: Source) -> Choice:
    name = "algo.advantage.estimator"
    estimator, loss = source.text(name), source.text("actor.policy_loss_type")
    if estimator not in _OPENRLHF_ESTIMATORS:
        raise _refused(source, name, estimator, _OPENRLHF_ESTIMATORS, "or write one of your own")
    ours = _OPENRLHF_ESTIMATORS[estimator]
    if loss == "gspo":
        if ours != "grpo":
            raise ImportedError(
                f"{source.name_of('actor.policy_loss_type')} is 'gspo' and {source.name_of(name)} "
                f"is {estimator!r}: gspo goes with group_norm here; give that, or the loss ppo"
            )
        return Choice(type="gspo")
    if loss != "ppo":
        raise _refused(source, "actor.policy_loss_type", loss, ("ppo", "gspo"), _OWN)
    if source.flag("algo.dynamic_filtering_enable"):
        if ours == "grpo":
            ours = "dapo"
        else:
            source.lose(
                "algo.dynamic_filtering_enable",
                "groups are left out by algorithm.type dapo alone: take group_norm for it",
            )
    mean = mean_of(source, "actor.loss_agg_mode")
    if ours == "dr_grpo":
        mean = "seq_sum_norm"
        source.lose("actor.loss_agg_mode", "dr_grpo divides by a constant length here")
    return Choice(type=ours, loss="ppo_policy", aggregation=mean)


def is_rloo(source: Source) -> bool:
    """Whether settings of TRL are those of its RLOOTrainer."""
    only = ("normalize_advantages", "reward_clip_range")
    named = source.text("trainer") or ""
    return "rloo" in named.lower() or any(source.given(name) for name in only)


def _of_trl(source: Source) -> Choice:
    if is_rloo(source):
        # Its ratio is that of whole completions. Before any update it is 1, as the tokens' are.
        return Choice(type="rloo", loss="ppo_policy", aggregation="seq_mean_token_sum")
    loss, level = source.text("loss_type"), source.text("importance_sampling_level")
    if loss not in _TRL_LOSSES:
        raise _refused(source, "loss_type", loss, _TRL_LOSSES, _OWN)
    mean = {"grpo": "seq_mean_token_mean", "dr_grpo": "seq_sum_norm"}.get(loss, "token_mean")
    if loss == "bnpo":
        source.lose("loss_type", "the mean is that of all tokens of an optimizer step (dapo)")
    if level in ("sequence", "sequence_token"):
        if loss == "cispo":
            raise ImportedError(
                f"importance_sampling_level is {level!r} and loss_type is 'cispo', which has a "
                "weight for each token here: give loss_type grpo, or the level token"
            )
        extra = {"algorithm.policy_loss.level": "token"} if level == "sequence_token" else {}
        return Choice(type="gspo", aggregation=mean, extra=extra)
    if level != "token":
        known = ("token", "sequence", "sequence_token")
        raise _refused(source, "importance_sampling_level", level, known, _OWN)
    if loss == "cispo":
        return Choice(type="cispo", aggregation=mean)
    return Choice(type="grpo", loss="ppo_policy", aggregation=mean)
