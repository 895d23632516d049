"""Teachers of the others: what is compared with them, and what stands beside."""

from __future__ import annotations

import re
from typing import Any, Literal

from rolemesh.coordinator.imports.source import ImportedError, Source
from rolemesh.coordinator.imports.values.models import place
from rolemesh.coordinator.recipe.role_names import teacher_role

TEACHERS = "distillation.teacher_models."
LOSS = "distillation.distillation_loss."
_PART = "algorithm.policy_loss."
_SAMPLED = {"k3": "forward_kl", "low_var_kl": "forward_kl", "k2": "reverse_kl", "mse": "reverse_kl"}
"""Divergences whose gradient verl's estimators have in the mean.

At a token that the policy draws with probability q, and the teacher with p, the derivative of k3 by
log q is 1 - p/q, and that of k2 is log(q/p). Their means over what the policy draws, times the
derivative of log q, are the gradients of KL(p || q) and of KL(q || p).
"""
_OWN = "teacher_model"
_SLICES = 2
"""GPUs that cut a teacher of verl where nothing says so."""


def verl_teaches(source: Source) -> Literal["", "alone", "beside"]:
    """Whether verl has a teacher, and whether it is all that trains or stands beside a reward."""
    if not source.flag("distillation.enabled"):
        return ""
    return "beside" if source.flag(f"{LOSS}use_task_rewards") else "alone"


def lose_teachers(source: Source) -> None:
    """Says of settings of teachers that they are off, where they are."""
    if verl_teaches(source):
        return
    for name, value in source.fields():
        if name.startswith("distillation.") and value is not None and not source.is_default(name):
            source.lose(name, "no teacher is asked for (distillation.enabled)")


def verl_divergence(source: Source) -> tuple[str, dict[str, Any]]:
    """The loss of ours for a teacher that is all that trains, and its keys by path.

    Raises:
        ImportedError: No loss here compares as this one does.
    """
    mode = source.text(f"{LOSS}loss_mode")
    if mode != "forward_kl_topk" and not source.is_default(f"{LOSS}topk"):
        source.lose(f"{LOSS}topk", f"verl reads it with forward_kl_topk alone, and not with {mode}")
    if source.flag(f"{LOSS}use_policy_gradient"):
        if mode not in ("k1", "kl"):
            raise ImportedError(
                f"{LOSS}loss_mode is {mode!r} with use_policy_gradient, but a teacher as the "
                f"reward of tokens is k1 here: give {LOSS}loss_mode=k1, or "
                f"{LOSS}use_policy_gradient=False"
            )
        return "ppo_policy", {}
    if mode == "forward_kl_topk":
        source.say(
            "verl's forward KL leaves out all but the teacher's topk tokens; here the others "
            "together are one more outcome"
        )
        return "distillation", {
            f"{_PART}divergence": "forward_kl",
            f"{_PART}top_k": source.whole(f"{LOSS}topk"),
        }
    if mode not in _SAMPLED:
        raise ImportedError(
            f"{LOSS}loss_mode is {mode!r}, and no loss here does that: give one of "
            f"{', '.join(_SAMPLED)}, forward_kl_topk, or k1 with {LOSS}use_policy_gradient=True"
        )
    made = _SAMPLED[mode]
    source.say(
        f"verl's {mode} looks at the sampled token; its mean gradient is that of {made}, which is "
        "computed here over the teacher's likeliest tokens, and all others together"
    )
    return "distillation", {f"{_PART}divergence": made}


def verl_beside(source: Source) -> float:
    """Weight of a teacher that stands beside a reward: that of a KL in the loss.

    Raises:
        ImportedError: It is not compared by a KL in the loss.
    """
    mode = source.text(f"{LOSS}loss_mode")
    if source.flag(f"{LOSS}use_policy_gradient") or mode not in _SAMPLED:
        raise ImportedError(
            f"{LOSS}use_task_rewards is on, so the teacher is a KL in the loss here, which "
            f"{LOSS}loss_mode {mode!r} with this {LOSS}use_policy_gradient is not: give one of "
            f"{', '.join(_SAMPLED)} with use_policy_gradient=False, or use_task_rewards=False for "
            "the teacher alone"
        )
    return source.number(f"{LOSS}distillation_loss_coef") or 0.0


def _entries(source: Source) -> dict[str, str]:
    """What the names of each teacher's settings begin with, by its name here.

    verl's own entry is `teacher_model`, which it drops where there are others.
    """
    ending = ".model_path"
    found = [
        name.removeprefix(TEACHERS).removesuffix(ending)
        for name, value in source.fields()
        if name.startswith(TEACHERS) and name.endswith(ending) and value is not None
    ]
    others = [entry for entry in found if entry != _OWN]
    if others and _OWN in found:
        source.lose(
            f"{TEACHERS}{_OWN}{ending}", "verl drops the entry teacher_model where there are others"
        )
    names: dict[str, str] = {}
    for entry in others or [_OWN]:
        # A name here is part of those of services: small letters and digits.
        name = re.sub(r"[^a-z0-9]", "", entry.lower())[:24]
        name = name if name[:1].isalpha() else f"t{name}"[:24]
        while name in names:
            name = f"{name[:22]}x"
        names[name] = f"{TEACHERS}{entry}."
    return names


def verl_teacher(source: Source) -> str | None:
    """The teacher's model; None where there are several, or none."""
    entries = _entries(source)
    if not verl_teaches(source) or len(entries) > 1:
        return None
    path = source.text(f"{next(iter(entries.values()))}model_path")
    return None if path is None else place(path)


def verl_teachers(source: Source) -> dict[str, Any] | None:
    """The section of several teachers; None where there is one, or none.

    Raises:
        ImportedError: One has no key, or two have the same.
    """
    entries = _entries(source)
    if not verl_teaches(source) or len(entries) < 2:
        return None
    named: dict[str, Any] = {}
    to: dict[str, str] = {}
    for name, entry in entries.items():
        key = source.text(f"{entry}key")
        if key is None or key in to:
            raise ImportedError(
                f"{entry}key is {key!r}: of several teachers each needs a key of its own, the "
                "value of its rows in the column distillation.teacher_key"
            )
        path = source.text(f"{entry}model_path")
        named[name] = {"model": {"path": None if path is None else place(path)}}
        to[key] = name
    by = source.text("distillation.teacher_key") or "data_source"
    return {"named": named, "route": {"by": f"metadata.{by}", "to": to}}


def verl_gpus(source: Source) -> dict[str, tuple[int, int]]:
    """GPUs of each teacher that has its own, by its role, and how many of them cut one model."""
    if not verl_teaches(source):
        return {}
    entries = _entries(source)
    found = {}
    for name, entry in entries.items():
        sliced = source.whole(f"{entry}inference.tensor_model_parallel_size") or _SLICES
        gpus = sliced * (source.whole(f"{entry}num_replicas") or 0)
        if len(entries) == 1:
            pool = (f"distillation.{one}" for one in ("nnodes", "n_gpus_per_node"))
            nodes, each = (source.whole(one) or 0 for one in pool)
            gpus = gpus or nodes * each
        if gpus > 0:
            found["teacher" if len(entries) == 1 else teacher_role(name)] = (gpus, sliced)
    return found


def trl_teacher(source: Source) -> str | None:
    """The teacher's model."""
    path = source.text("teacher_model_name_or_path")
    return None if not path else place(path)


def trl_divergence(source: Source, trainer: str) -> dict[str, Any]:
    """Keys of the loss by path; `beta` is TRL's name of the teacher's share of the mixture.

    Raises:
        ImportedError: Texts of the teacher are the data, or vocabularies differ.
    """
    share = source.number("beta")
    if share is None or not 0 <= share <= 1:
        raise ImportedError(f"beta is {share}: give a number from 0 to 1, the teacher's share")
    if source.flag("use_uld_loss"):
        raise ImportedError(
            "use_uld_loss is on: no loss here compares a teacher of another vocabulary with the "
            "policy. Have it write completions, and train with sft on them (docs/teachers.md), or "
            "take a teacher with the policy's vocabulary, without use_uld_loss"
        )
    if trainer in ("gkd", "gold"):
        _own_share(source, trainer)
    made: dict[str, Any] = {f"{_PART}divergence": "reverse_kl" if share == 1 else "forward_kl"}
    if 0 < share < 1:
        made = {f"{_PART}divergence": "jensen_shannon", f"{_PART}mixture": share}
    if trainer != "server_distillation":
        source.say(
            "TRL compares whole distributions; here the top_k tokens that the teacher finds "
            "likeliest, and all others together: take more where teacher_mass is far below 1"
        )
    elif share == 0:
        made[f"{_PART}top_k"] = source.whole("loss_top_k")
    else:
        source.say(
            "With a server TRL compares the sampled token and the teacher's likeliest one alone; "
            "here the top_k tokens that the teacher finds likeliest, and all others together"
        )
    return made


def _own_share(source: Source, trainer: str) -> None:
    """Refuses what does not train on completions of the policy; says what is left of the rest."""
    own = source.number("lmbda")
    if source.flag("seq_kd") or own == 0:
        name = "seq_kd is on" if source.flag("seq_kd") else "lmbda is 0"
        raise ImportedError(
            f"{name}: it trains on texts that are given or that the teacher writes, which is "
            "algorithm.type sft here (docs/given-answers.md): give lmbda 1 for the policy's own"
        )
    if own != 1:
        why = "all completions are the policy's own here, as with lmbda 1"
        if source.given("lmbda"):
            source.lose("lmbda", why)
        else:
            source.say(f"lmbda is {own:g} in TRL where it is left out: {why}")
    if trainer == "gold" and not source.given("top_p"):
        source.say("GOLD samples with top_p 0.95 where it is left out; here it is 1")
    if trainer == "gkd" and source.number("temperature") != 1:
        source.say("GKD compares at temperature 1; here it is that of sampling")
