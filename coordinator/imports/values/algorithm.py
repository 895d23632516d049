"""Values of sampling and algorithms: what becomes of those of the others."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import Source
from rolemesh.coordinator.imports.values.batch import Batch, batch
from rolemesh.coordinator.imports.values.choices import ACTOR, Choice, choice, verl_bound
from rolemesh.coordinator.imports.values.teachers import LOSS, verl_beside, verl_teaches
from rolemesh.coordinator.imports.values.trl_trainers import is_rloo

ROLLOUT = "actor_rollout_ref.rollout."
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."


def on(name: str) -> Any:
    """Takes what is on; nothing where it is off."""
    return lambda source: source.flag(name) or None


def put_type(draft: Draft, made: Choice) -> None:
    """Puts the algorithm, the kinds of its estimator and loss, and what goes with them."""
    draft.put("algorithm.type", made.type)
    if made.estimator is not None:
        draft.put("algorithm.advantages.type", made.estimator)
    if made.loss is not None:
        draft.put("algorithm.policy_loss.type", made.loss)
    for path, value in made.extra.items():
        draft.put(path, value)


def put_steps(draft: Draft, made: Batch) -> None:
    """Puts the number of steps, or some number where it is not known."""
    if made.unknown:
        draft.fill_in("run.steps", made.steps, made.unknown)
    else:
        draft.put("run.steps", made.steps)


def _put_sampling(draft: Draft, made: Batch) -> None:
    draft.put("algorithm.sampling.samples_per_prompt", made.group)


def mean(source: Source) -> tuple[str, int] | None:
    """How token losses become one number, and the constant length of the one that has it."""
    made = choice(source).aggregation
    if made is None:
        return None
    factor = source.whole(f"{ACTOR}loss_scale_factor") if source.system == "verl" else None
    return made, factor or batch(source).new_tokens


def put_mean(draft: Draft, made: tuple[str, int]) -> None:
    """Puts the mean."""
    draft.put("algorithm.policy_loss.aggregation", made[0])
    if made[0] == "seq_sum_norm":
        draft.put("algorithm.policy_loss.norm_length", made[1])


def whole_distribution(source: Source) -> None:
    """Sampling from a part of the distribution is a setting of the others alone."""
    for name in (f"{ROLLOUT}top_p", f"{ROLLOUT}top_k", "rollout.top_p", "top_p", "top_k"):
        value = source.number(name) if source.given(name) else None
        if value not in (None, 1.0, -1.0, 0.0) or (name.endswith("p") and value == 0):
            source.lose(name, "training samples from the whole distribution here (1.0, and all)")


def trl_high(source: Source) -> float | None:
    """The upper clip of TRL; that of CISPO is the bound itself, ours what lies above 1."""
    high = source.number("epsilon_high")
    if choice(source).loss_type == "cispo":
        return None if high is None or high <= 1 else high - 1
    return source.number("epsilon") if high is None else high


def trl_low(source: Source) -> float | None:
    """The lower clip of TRL."""
    if choice(source).loss_type == "cispo":
        source.lose("epsilon", "cispo sets no lower bound")
        return None
    return source.number("epsilon")


def openrlhf_clip(place: int) -> Any:
    """Takes one of the two clips of OpenRLHF."""

    def take(source: Source) -> float | None:
        both = source.numbers("actor.eps_clip_low_high")
        return both[place] if len(both) == 2 else source.number("actor.eps_clip")

    return take


def verl_clip(side: str) -> Any:
    """Takes the clip of a side."""

    def take(source: Source) -> float | None:
        if verl_teaches(source) == "alone":
            return verl_bound(source, side, LOSS)
        value = verl_bound(source, side)
        # Without a lower bound, weights have none; verl says so by a bound below zero.
        is_none = side == "low" and choice(source).loss_type == "cispo" and (value or 0) >= 1
        return None if is_none else value

    return take


def verl_reward_only(name: str) -> Any:
    """Takes a number, which verl does not read where a teacher is all that trains."""

    def take(source: Source) -> float | None:
        if verl_teaches(source) == "alone":
            return None
        return source.number(name)

    return take


def verl_dual_clip(source: Source) -> float | None:
    """The bound of negative advantages; verl has no setting of it for a teacher."""
    name = f"{ACTOR}clip_ratio_c"
    if verl_teaches(source) == "alone":
        return float(source.known.defaults[name])
    return source.number(name)


def verl_entropy(source: Source) -> float | None:
    """Weight of the entropy bonus, if it has any."""
    return verl_reward_only(f"{ACTOR}entropy_coeff")(source) or None


def verl_kl_in_loss(source: Source) -> float | None:
    """Weight of the KL in the loss: to a reference, or to a teacher beside a reward."""
    name, teaches = f"{ACTOR}use_kl_loss", verl_teaches(source)
    if teaches == "alone":
        return None
    is_on = source.flag(name)
    if teaches == "beside":
        if is_on:
            source.lose(name, "the KL in the loss is the one to the teacher here")
        return verl_beside(source) or None
    coefficient = source.number(f"{ACTOR}kl_loss_coef") or 0.0
    return coefficient if is_on and coefficient > 0 else None


def verl_kl_form(source: Source) -> str | None:
    """Estimator of the KL in the loss, where there is one."""
    is_beside = verl_teaches(source) == "beside"
    name = f"{LOSS}loss_mode" if is_beside else f"{ACTOR}kl_loss_type"
    made: str | None = form(name, verl_kl_in_loss)(source)
    return made


def openrlhf_kl_in_loss(source: Source) -> float | None:
    """Weight of the KL in the loss."""
    is_on = source.flag("algo.kl.use_loss")
    return (source.number("algo.kl.init_coef") or None) if is_on else None


def trl_kl_in_loss(source: Source) -> float | None:
    """Weight of the KL in the loss."""
    return None if is_rloo(source) else (source.number("beta") or None)


def _controller(coefficient: float, target: float | None, horizon: int | None) -> dict[str, Any]:
    if target is None:
        return {"type": "fixed", "coefficient": coefficient}
    found = {"type": "adaptive", "coefficient": coefficient, "target": target}
    return found if horizon is None else {**found, "horizon": horizon}


def verl_kl_in_reward(source: Source) -> dict[str, Any] | None:
    """The KL in the reward."""
    ctrl = "algorithm.kl_ctrl."
    is_on = source.flag("algorithm.use_kl_in_reward")
    coefficient = source.number(f"{ctrl}kl_coef") or 0.0
    is_adaptive = source.text(f"{ctrl}type") == "adaptive"
    target, horizon = source.number(f"{ctrl}target_kl"), source.whole(f"{ctrl}horizon")
    if not is_on or coefficient <= 0 or _takes_plain(source, "algorithm.use_kl_in_reward"):
        return None
    if verl_teaches(source) == "beside":
        source.lose("algorithm.use_kl_in_reward", "the KL is the one to the teacher here")
        return None
    return _controller(coefficient, target if is_adaptive else None, horizon)


def openrlhf_kl_in_reward(source: Source) -> dict[str, Any] | None:
    """The KL in the reward."""
    coefficient = source.number("algo.kl.init_coef") or 0.0
    target, horizon = source.number("algo.kl.target"), source.whole("algo.kl.horizon")
    if source.flag("algo.kl.use_loss") or coefficient <= 0:
        return None
    return _controller(coefficient, target, horizon)


def trl_kl_in_reward(source: Source) -> dict[str, Any] | None:
    """The KL in the reward, which the RLOOTrainer has."""
    beta = source.number("beta") or 0.0
    return _controller(beta, None, None) if is_rloo(source) and beta > 0 else None


def _takes_plain(source: Source, name: str) -> bool:
    """Whether the estimator takes rewards as they came; then says what a value is not for."""
    if choice(source).estimator_type != "gdpo":
        return False
    source.lose(name, "rewards are taken as they came by gdpo")
    return True


_FORMS = {
    **{"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"},
}


def form(name: str, is_on: Any) -> Any:
    """Takes the estimator of a KL, where there is one."""

    def take(source: Source) -> str | None:
        given = source.text(name) or ""
        plain = given.removesuffix("+")
        if is_on(source) is None:
            return None
        if plain != given:
            source.lose(name, f"the gradient of {plain} is its own here, without {given}'s change")
        if plain not in _FORMS:
            source.lose(name, "no such estimator of the KL here: k1, k2 and k3 are")
        return _FORMS.get(plain)

    return take


def verl_std(source: Source) -> bool | None:
    """Whether advantages are divided, where they are not."""
    return None if source.flag("algorithm.norm_adv_by_std_in_grpo") else False


def trl_std(source: Source) -> bool | None:
    """Whether advantages are divided, where they are not."""
    given = str(source.get("scale_rewards")).lower()
    if given == "batch":
        source.lose("scale_rewards", "deviations are those of a group here, not of a batch")
    return False if given in ("none", "false") else None


def verl_overlong(source: Source) -> dict[str, Any] | None:
    """The punishment of long completions, which one of verl's reward managers knows."""
    manager = source.text("reward.reward_manager.name")
    is_on = source.flag(f"{OVERLONG}enable")
    is_on = is_on and not _takes_plain(source, f"{OVERLONG}enable")
    if not is_on or manager != "dapo":
        why = "the reward manager dapo alone reads it"
        if not is_on:
            why = "the punishment is not enabled"
        for name in ("len", "penalty_factor", *(("enable",) if is_on else ())):
            source.lose(f"{OVERLONG}{name}", why)
        source.lose("reward.reward_kwargs.max_resp_len", why)
        if manager != "naive":
            source.lose("reward.reward_manager.name", "a reward function does all that it does")
        return None
    most = source.whole("reward.reward_kwargs.max_resp_len") or batch(source).new_tokens
    factor = source.number(f"{OVERLONG}penalty_factor") or 1.0
    length = source.whole(f"{OVERLONG}len") or most
    return {"max_length": most, "buffer": min(length, most), "penalty": factor}


def openrlhf_overlong(source: Source) -> dict[str, Any] | None:
    """The punishment of long completions."""
    length = source.whole("reward.overlong_buffer_len")
    factor = source.number("reward.overlong_penalty_factor") or 1.0
    if not length:
        return None
    most = batch(source).new_tokens
    return {"max_length": most, "buffer": min(length, most), "penalty": factor}
