"""Which algorithm another system's settings ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.coordinator.imports.source import ImportedError, Source, SystemName
from rolemesh.coordinator.imports.values.teachers import (
    lose_teachers,
    trl_divergence,
    verl_divergence,
    verl_teaches,
)
from rolemesh.coordinator.imports.values.trl_trainers import DISTILLING, trl_trainer
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS

ACTOR = "actor_rollout_ref.actor."
_VERL_ESTIMATORS = {
    **{"gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo"},
    **{"rloo_vectorized": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    **{"gdpo": "gdpo", "grpo_passk": "pass_at_k"},
}
_VERL_LOSSES = {
    **{"vanilla": "ppo_policy", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"},
    **{"geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo", "gpg": "reinforce"},
    **{"clip_cov": "clip_cov", "kl_cov": "kl_cov"},
}
_VERL_LOSS = f"{ACTOR}policy_loss.loss_mode"
_OPENRLHF_ESTIMATORS = {
    **{"gae": "ppo", "reinforce": "reinforce_plus_plus", "rloo": "rloo", "group_norm": "grpo"},
    **{"reinforce_baseline": "reinforce_plus_plus_baseline", "dr_grpo": "dr_grpo"},
}
_OPENRLHF_LOSSES = {"ppo": "ppo_policy", "gspo": "gspo"}
_TRL_LOSSES = {
    **{"grpo": "seq_mean_token_mean", "dr_grpo": "seq_sum_norm", "bnpo": "token_mean"},
    **{"dapo": "token_mean", "cispo": "token_mean", "sapo": "seq_mean_token_mean"},
    **{"luspo": "seq_mean_token_sum", "vespo": "token_mean"},
}
"""Means of the losses of TRL."""
_GROUP: Mapping[SystemName, str] = {
    "verl": "actor_rollout_ref.rollout.n",
    "openrlhf": "rollout.n_samples_per_prompt",
    "trl": "num_generations",
}
_OWN = "a loss of your own is a function: docs/own-losses.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An algorithm of ours."""

    type: str
    loss: str | None = None
    """Type of the policy's loss, where it is not the algorithm's own."""
    estimator: str | None = None
    """Type of the estimator, where it is not the algorithm's own."""
    aggregation: str | None = None
    """How token losses become one number; None: as the algorithm has it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys, by path."""

    @property
    def loss_type(self) -> str:
        """Type of the policy's loss."""
        return self.loss or self.type

    @property
    def estimator_type(self) -> str:
        """Type of the estimator; that of an algorithm may have its name."""
        return self.estimator or self.type

    @property
    def compares(self) -> bool:
        """Whether completions of a prompt are compared with each other."""
        return self.type == "dapo" or _is_group(self.type)


def _is_group(name: str) -> bool:
    return name in POLICY_GRADIENTS and POLICY_GRADIENTS[name].compares


def choice(source: Source) -> Choice:
    """The algorithm that a source asks for.

    Raises:
        ImportedError: There is none like it here.
    """
    makers = {"verl": _of_verl, "openrlhf": _of_openrlhf, "trl": _of_trl}
    made = source.once(makers[source.system])
    name = _GROUP[source.system]
    group = source.whole(name)
    if made.compares and group == 1:
        raise ImportedError(
            f"{source.name_of(name)} is 1, but {made.type} compares the completions of a prompt "
            "with each other: give at least 2"
        )
    return made


def _refused(
    source: Source, name: str, value: Any, known: Iterable[str], more: str
) -> ImportedError:
    choices = ", ".join(known)
    return ImportedError(
        f"{source.name_of(name)} is {value!r}, and no algorithm here does that: give one of "
        f"{choices} in its place ({more})"
    )


def _of_family(
    estimator: str,
    loss: str,
    *,
    is_selecting: bool = False,
    aggregation: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Choice:
    """An estimator and a loss: the algorithm of both, or of the estimator with another loss.

    Args:
        estimator: An algorithm that has it.
        loss: Type of a policy loss.
        is_selecting: Whether groups that are all alike are left out, as DAPO does.
        aggregation: See Choice.
        extra: See Choice.
    """
    more = dict(extra or {})
    if is_selecting:
        own = None if estimator == "grpo" else estimator
        return Choice(type="dapo", loss=loss, estimator=own, aggregation=aggregation, extra=more)
    if estimator == "grpo" and loss in POLICY_GRADIENTS and loss != "reinforce":
        return Choice(type=loss, aggregation=aggregation, extra=more)
    return Choice(type=estimator, loss=loss, aggregation=aggregation, extra=more)


def _selection(
    source: Source, name: str, estimator: str, *, is_ahead: bool
) -> tuple[bool, dict[str, Any]]:
    """Whether groups that are all alike are sampled anew, and what is done about them otherwise.

    Args:
        source: Settings.
        name: The field that asks for it.
        estimator: An algorithm that has it.
        is_ahead: Whether the sampler runs ahead of the step.
    """
    if not source.flag(name):
        return False, {}
    if not _is_group(estimator):
        source.lose(
            name, f"no groups to leave out: {estimator} compares no completions of a prompt"
        )
        return False, {}
    if not is_ahead:
        return True, {}
    source.say(
        "Groups that are all alike are left out, and none is sampled in their place, since the "
        "sampler runs ahead of the step"
    )
    return False, {"algorithm.advantages.zero_variance": "left_out"}


# verl


def _of_verl(source: Source) -> Choice:
    lose_teachers(source)
    if verl_teaches(source) == "alone":
        loss, extra = verl_divergence(source)
        kind = "on_policy_distillation"
        return Choice(type=kind, loss=loss, aggregation=_verl_mean(source), extra=extra)
    estimator = source.text("algorithm.adv_estimator")
    if estimator not in _VERL_ESTIMATORS:
        raise _refused(
            *(source, "algorithm.adv_estimator", estimator, _VERL_ESTIMATORS),
            "as an override after CONFIG, e.g. algorithm.adv_estimator=grpo; an estimator of your "
            "own is a function: docs/own-losses.md",
        )
    loss = _verl_loss(source)
    ours = _VERL_ESTIMATORS[estimator]
    fitting = {"ppo": ("ppo_policy",), "remax": ("ppo_policy", "reinforce")}.get(ours, (loss,))
    if loss not in fitting:
        raise ImportedError(
            f"{_VERL_LOSS} is {source.text(_VERL_LOSS)!r} and algorithm.adv_estimator is "
            f"{estimator!r}: {loss} goes with grpo here: give algorithm.adv_estimator=grpo as an "
            f"override after CONFIG, or {_VERL_LOSS}=vanilla"
        )
    is_selecting, more = _selection(
        source,
        "algorithm.filter_groups.enable",
        ours,
        is_ahead=source.given("rollout.n_gpus_per_node"),
    )
    return _of_family(
        ours,
        loss,
        is_selecting=is_selecting,
        aggregation=_verl_mean(source, loss),
        extra={**_verl_extra(source, loss), **_verl_best(source, ours), **more},
    )


def _verl_loss(source: Source) -> str:
    """The loss of ours for verl's, which a correction may put another one in the place of."""
    given = source.text(_VERL_LOSS)
    rule = "algorithm.rollout_correction."
    if source.flag(f"{rule}bypass_mode"):
        bypassing = source.text(f"{rule}loss_type")
        if given != "vanilla":
            source.lose(_VERL_LOSS, f"{rule}bypass_mode puts {bypassing} in its place")
        if bypassing not in ("ppo_clip", "reinforce"):
            names = ("ppo_clip", "reinforce")
            raise _refused(source, f"{rule}loss_type", bypassing, names, _OWN)
        return "reinforce" if bypassing == "reinforce" else "ppo_policy"
    if given not in _VERL_LOSSES:
        raise _refused(
            *(source, _VERL_LOSS, given, _VERL_LOSSES),
            f"as an override after CONFIG, e.g. {_VERL_LOSS}=vanilla; {_OWN}",
        )
    return _VERL_LOSSES[given]


def _verl_extra(source: Source, loss: str) -> dict[str, Any]:
    """What the keys of a loss are that have another meaning than their names say."""
    if loss == "dppo":
        source.say(
            "verl's DPPO cuts ratios at clip_ratio_c (3 where it is left out); here they are not "
            "cut, as in the paper's objective"
        )
        part = "algorithm.policy_loss."
        return {
            f"{part}divergence": (source.text(_VERL_LOSS) or "").removeprefix("dppo_"),
            f"{part}divergence_low": verl_bound(source, "low"),
            f"{part}divergence_high": verl_bound(source, "high"),
        }
    if loss in ("clip_cov", "kl_cov"):
        source.say(
            "verl takes covariances with the log-probs of the pass that trains and the means of a "
            "micro-batch; here log-probs are those when sampled, and means are the mini-batch's"
        )
    return {}


def _verl_best(source: Source, estimator: str) -> dict[str, Any]:
    """The size of the sets of which pass@k takes the best: one less than a group."""
    if estimator != "pass_at_k":
        return {}
    group = source.whole(_GROUP["verl"]) or 1
    if group < 3:
        raise ImportedError(
            f"{_GROUP['verl']} is {group}: pass@k compares sets of at least 2 completions with one "
            "more here: give at least 3"
        )
    source.say(
        "pass_at_k with k one less than a group: advantages are verl's, before the division by "
        "the group's deviation, less their mean, times the completions of the group"
    )
    return {"algorithm.advantages.k": group - 1}


def verl_bound(source: Source, side: str, prefix: str = ACTOR) -> float | None:
    """The number that verl clips a side with, "low" or "high".

    Args:
        source: Settings.
        side: Which.
        prefix: Of the section with verl's three numbers.
    """
    own, plain = f"{prefix}clip_ratio_{side}", f"{prefix}clip_ratio"
    if source.given(plain) and not source.given(own):
        shown = source.number(plain)
        if shown != source.number(own):
            source.lose(
                plain,
                "verl takes clip_ratio_low and clip_ratio_high before it, which are 0.2 where "
                "they are left out: so do these settings",
            )
    return source.number(own)


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


def _verl_mean(source: Source, loss: str = "") -> str | None:
    name = f"{ACTOR}loss_agg_mode"
    if loss in ("sapo", "gmpo"):
        if source.text(name) != "seq-mean-token-mean":
            source.lose(
                name, f"the loss {loss} is a mean of rows' means, in verl whatever this says"
            )
        return "seq_mean_token_mean"
    return mean_of(source, name)


# OpenRLHF


def _of_openrlhf(source: Source) -> Choice:
    name, loss_name = "algo.advantage.estimator", "actor.policy_loss_type"
    estimator, loss = source.text(name), source.text(loss_name)
    if estimator not in _OPENRLHF_ESTIMATORS:
        raise _refused(source, name, estimator, _OPENRLHF_ESTIMATORS, "or write one of your own")
    ours = _OPENRLHF_ESTIMATORS[estimator]
    if loss not in _OPENRLHF_LOSSES:
        raise _refused(source, loss_name, loss, _OPENRLHF_LOSSES, _OWN)
    if loss == "gspo" and ours == "ppo":
        raise ImportedError(
            f"{source.name_of(loss_name)} is 'gspo' and {source.name_of(name)} is {estimator!r}: "
            "gspo goes with group_norm here; give that, or the loss ppo"
        )
    is_selecting, more = _selection(
        source,
        "algo.dynamic_filtering_enable",
        ours,
        is_ahead=source.flag("train.async_enable"),
    )
    mean = "seq_mean_token_mean" if loss == "gspo" else mean_of(source, "actor.loss_agg_mode")
    if ours == "dr_grpo" and loss != "gspo":
        mean = "seq_sum_norm"
        source.lose("actor.loss_agg_mode", "dr_grpo divides by a constant length here")
    return _of_family(
        ours,
        _OPENRLHF_LOSSES[loss],
        is_selecting=is_selecting,
        aggregation=mean,
        extra=more,
    )


# TRL


def _of_trl(source: Source) -> Choice:
    trainer = trl_trainer(source)
    if trainer in DISTILLING:
        return Choice(
            type="on_policy_distillation",
            loss="distillation",
            aggregation="token_mean",
            extra=trl_divergence(source, trainer),
        )
    if trainer == "rloo":
        # Its ratio is that of whole completions. Before any update it is 1, as the tokens' are.
        return Choice(type="rloo", loss="ppo_policy", aggregation="seq_mean_token_sum")
    estimator = _trl_estimator(source)
    if trainer == "gmpo":
        for name in ("loss_type", "importance_sampling_level"):
            if source.given(name) and not source.is_default(name):
                source.lose(name, "GMPO has a loss of its own, which does not read it")
        return _of_family(estimator, "gmpo", aggregation="seq_mean_token_mean")
    given, level = source.text("loss_type"), source.text("importance_sampling_level")
    if given not in _TRL_LOSSES:
        raise _refused(source, "loss_type", given, _TRL_LOSSES, _OWN)
    mean = _TRL_LOSSES[given]
    loss = given if given in ("cispo", "sapo", "vespo") else "ppo_policy"
    if given == "bnpo":
        source.lose("loss_type", "the mean is that of all tokens of an optimizer step (dapo)")
    if level not in ("token", "sequence", "sequence_token"):
        known = ("token", "sequence", "sequence_token")
        raise _refused(source, "importance_sampling_level", level, known, _OWN)
    if level == "token":
        return _of_family(estimator, loss, aggregation=mean)
    if loss == "vespo":
        source.lose(
            "importance_sampling_level", "the loss vespo weighs whole rows, whatever this says"
        )
        return _of_family(estimator, loss, aggregation=mean)
    if loss != "ppo_policy":
        raise ImportedError(
            f"importance_sampling_level is {level!r} and loss_type is {given!r}, which has a "
            "weight for each token here: give loss_type grpo, or the level token"
        )
    extra = {"algorithm.policy_loss.level": "token"} if level == "sequence_token" else {}
    return _of_family(estimator, "gspo", aggregation=mean, extra=extra)


def _trl_estimator(source: Source) -> str:
    """What TRL makes of several rewards: a sum that is normalised, or parts that are."""
    name = "multi_objective_aggregation"
    how = source.text(name)
    if how not in ("sum_then_normalize", "normalize_then_sum"):
        known = ("sum_then_normalize", "normalize_then_sum")
        raise _refused(source, name, how, known, "an estimator of your own: docs/own-losses.md")
    if how == "sum_then_normalize":
        return "grpo"
    judges = len(source.texts("reward_funcs"))
    if judges + source.given("reward_model_name_or_path") == 1:
        source.lose(name, "one reward alone is normalised as the sum is")
        return "grpo"
    return "gdpo"
