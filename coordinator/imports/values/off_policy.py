"""Corrections for samples of another policy: those of the others as forms of ours.

A form is the section algorithm.off_policy; an empty one is written as null, which fast numerics
then leave alone; None writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import ImportedError, Source
from rolemesh.coordinator.imports.values.choices import ACTOR, choice
from rolemesh.coordinator.imports.values.trl_trainers import DISTILLING, trl_trainer

Form = dict[str, Any]

_VERL = "algorithm.rollout_correction."
_WEIGHS_ITSELF = {
    "distillation": "distributions are compared with a teacher, and no ratios to the sampler",
    "vespo": "the loss vespo weighs rows by their ratio to the sampler itself",
}
"""Losses that take no correction."""


def put_off_policy(draft: Draft, made: Form) -> None:
    """Puts the section."""
    draft.put("algorithm.off_policy", made or None)


def _lose(source: Source, names: Iterable[str], why: str) -> None:
    """Says why values have no counterpart that are not the defaults."""
    for name in names:
        if source.given(name) and not source.is_default(name):
            source.lose(name, why)


def _takes_none(source: Source, names: Iterable[str]) -> bool:
    """Whether the loss takes no correction; then says so."""
    why = _WEIGHS_ITSELF.get(choice(source).loss_type)
    if why is None:
        return False
    _lose(source, names, why)
    return True


# verl


def verl_off_policy(source: Source) -> Form | None:
    """The correction, whose bounds verl says of the ratio for weights, of its inverse for masks."""
    cap_name = f"{ACTOR}tis_imp_ratio_cap"
    weights = [f"{_VERL}{name}" for name in ("rollout_is", "rollout_is_threshold")]
    normalize, masks = f"{_VERL}rollout_is_batch_normalize", f"{_VERL}rollout_rs"
    names = (cap_name, *weights, normalize, masks, f"{masks}_threshold")
    if _takes_none(source, names):
        return None
    if source.given(cap_name):
        cap = source.number(cap_name) or 0
        return {"type": "token_truncation", "cap": cap} if cap > 0 else None
    is_bypassing, kind = source.flag(f"{_VERL}bypass_mode"), source.text(f"{_VERL}loss_type")
    if is_bypassing and kind != "reinforce":
        _lose(
            source,
            (cap_name, *weights, normalize),
            f"with {_VERL}bypass_mode the clip is around the policy that sampled, and no token is "
            "weighed",
        )
        _lose(source, (masks, f"{masks}_threshold"), "nothing is left out without a correction")
        return {}
    made = _masked(source) or _weighed(source)
    if made is None or made["type"] == "geometric_rejection":
        return made
    if source.flag(normalize):
        made["normalize"] = "batch"
        if source.text(weights[0]) == "sequence":
            source.say(
                "verl divides weights of rows by their mean over rows; here it is one over tokens"
            )
    return made


def _bounds(source: Source, name: str) -> tuple[float | None, float] | None:
    """A lower bound, if there is one, and an upper one: "0.5_2.0" or 2.0."""
    given = source.text(name)
    if given is None:
        return None
    low, parted, high = given.strip().rpartition("_")
    try:
        return (float(low) if parted else None), float(high)
    except ValueError:
        raise ImportedError(
            f"{source.name_of(name)} is {given!r}: give one number, or two as 0.5_2.0"
        ) from None


def _weighed(source: Source) -> Form | None:
    level, bounds = (
        source.text(f"{_VERL}rollout_is"),
        _bounds(source, f"{_VERL}rollout_is_threshold"),
    )
    if level is None or bounds is None:
        return None
    low, high = bounds
    if low is None:
        return {"type": f"{level}_truncation", "cap": high}
    return {"type": "masking", "level": level, "low": low, "high": high}


def _masked(source: Source) -> Form | None:
    """The form of one of verl's masks, with the weights beside it, where there is one."""
    name = f"{_VERL}rollout_rs"
    kind, level = source.text(name), source.text(f"{_VERL}rollout_is")
    if kind is None:
        return None
    form = {("seq_mean_k1", None): "geometric_rejection", ("seq_sum_k1", "sequence"): "sequence"}
    found = {**form, ("token_k1", "token"): "token"}.get((kind, level))
    bounds = _bounds(source, f"{name}_threshold")
    weights = _bounds(source, f"{_VERL}rollout_is_threshold")
    if found is not None and bounds is not None and weights is not None:
        upper = bounds[1]
        lower = 1 / upper if bounds[0] is None else bounds[0]
        # Masks of verl look at the policy that sampled over the one that trains.
        ratios = {"low": _short(1 / upper), "high": _short(1 / lower)}
        if found == "geometric_rejection":
            made: Form = {"type": found, **ratios}
            if choice(source).aggregation == "token_mean" and not source.flag(
                f"{_VERL}bypass_mode"
            ):
                # Tokens of rows that are left out leave the mean, as in verl, which knows them
                # there before the update.
                made["normalize"] = "batch"
            return made
        if weights[0] is None and weights[1] >= ratios["high"]:
            source.say(
                "Tokens that verl masks leave the mean of its loss; here they count in it with "
                "weight 0 (algorithm.off_policy)"
            )
            return {"type": "masking", "level": found, **ratios}
    _lose(
        source,
        (name, f"{name}_threshold"),
        "of masks there are seq_mean_k1 without weights, and seq_sum_k1 or token_k1 with weights "
        "of the same level that are cut no lower than the mask ends (algorithm.off_policy)",
    )
    return None


def _short(number: float) -> float:
    """The number without the last digits of a division."""
    return float(f"{number:.9g}")


# OpenRLHF


def openrlhf_off_policy(source: Source) -> Form | None:
    """The correction by level and mode, or by the switch and the kind of earlier versions."""
    prefix = "algo.advantage.is_correction_"
    level, bounds = source.text(f"{prefix}level"), source.numbers(f"{prefix}threshold")
    mode, gate = source.text(f"{prefix}mode"), source.text(f"{prefix}gating")
    names = [f"{prefix}{name}" for name in ("level", "mode", "threshold", "gating", "enable")]
    if level in (None, "off"):
        if not source.flag(f"{prefix}enable"):
            return None
        kind = source.text(f"{prefix}type")
        level = "seq" if kind == "seq-mask-tis" else "token"
        mode = "mask" if kind == "icepop" else "clip"
    if choice(source).loss_type == "gspo":
        source.say("With a correction OpenRLHF's gspo compares with the sampler, as here without")
        _lose(source, names, "its loss gspo compares with the sampler itself, and weighs nothing")
        return {}
    if gate not in (None, "ratio"):
        _lose(source, names, f"no form looks at {gate}: dppo masks by it, while it trains")
        return None
    if not bounds:
        return None
    low, high = (bounds if len(bounds) > 1 else [0.0, *bounds])[:2]
    if level == "seq":
        source.say(
            "OpenRLHF also weighs the tokens of the rows that stay; here they are not weighted "
            "(algorithm.off_policy)"
        )
        return {"type": "geometric_rejection", "low": low, "high": high}
    if mode == "clip":
        source.lose(f"{prefix}threshold", "of the two bounds the upper one is taken")
        return {"type": "token_truncation", "cap": high}
    return {"type": "masking", "low": low, "high": high}


# TRL


def trl_off_policy(source: Source) -> Form | None:
    """The correction of what vLLM sampled, where the trainer makes one."""
    prefix = "vllm_importance_sampling_"
    trainer = trl_trainer(source)
    names = [f"{prefix}{name}" for name in ("correction", "mode", "clip_max", "clip_min")]
    if _takes_none(source, names) or trainer in DISTILLING:
        return None
    if trainer == "gmpo":
        _lose(source, names, "TRL's GMPO weighs nothing")
        return {} if source.flag("use_vllm") else None
    is_on, high = source.flag(f"{prefix}correction"), source.number(f"{prefix}clip_max")
    mode = source.text(f"{prefix}mode") or ""
    if not source.flag("use_vllm") or trainer == "rloo":
        return None
    if not is_on:
        return {}
    if not high:
        source.lose(f"{prefix}clip_min", "no form has a lower bound alone")
        return None
    level, _, form = mode.partition("_")
    low = source.number(f"{prefix}clip_min")
    if form == "truncate":
        if low is not None:
            source.lose(f"{prefix}clip_min", "weights are cut above alone here")
        return {"type": f"{level}_truncation", "cap": high}
    return {"type": "masking", "level": level, "low": low or 0.0, "high": high}
