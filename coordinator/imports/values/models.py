"""Values of models, optimizers and samplers: what becomes of those of the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import Source
from rolemesh.coordinator.imports.values.batch import batch, warmup_steps

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
VERL = {"actor": "actor_rollout_ref.actor.", "critic": "critic."}
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
CUTS = ("ulysses_sequence_parallel_size", "megatron.context_parallel_size")
"""How verl's sections call the ranks that cut rows among them, with FSDP and with Megatron."""


def place(text: str) -> str:
    """A path as a recipe has it: of this machine, or a name at the hub."""
    path = Path(text).expanduser()
    if _HUB_NAME.fullmatch(text) and not path.exists() and not path.parent.exists():
        return f"hf:{text}"
    return str(path) if text.startswith("~") else text


def model_place(name: str) -> Callable[[Source], str | None]:
    """Takes a model's path, or its name at the hub."""

    def take(source: Source) -> str | None:
        text = source.text(name) if source.given(name) else None
        return None if not text else place(text)

    return take


def critic_place(source: Source) -> str | None:
    """The critic's model: its own, or what OpenRLHF takes where none is named."""
    names = {"verl": "critic.model.path", "openrlhf": "critic.model_name_or_path"}
    own = model_place(names[source.system])(source)
    if own is not None or source.system == "verl":
        return own
    rewards = source.texts("reward.model_name_or_path")
    return place(rewards[0]) if rewards and not source.given("reward.remote_url") else None


# Adapters


def _targets(source: Source, name: str) -> Any:
    given = source.get(name)
    words = source.texts(name) if given is not None else []
    if not words or words == ["all-linear"] or words == ["all_linear"]:
        return None
    return words


def adapter(source: Source) -> dict[str, Any] | None:
    """The section of an adapter; None where the whole model is trained."""
    names = {
        "verl": (f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules"),
        "openrlhf": ("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
        "trl": ("lora_r", "lora_alpha", "lora_target_modules"),
    }
    rank_name, alpha_name, targets_name = names[source.system]
    rank = source.whole(rank_name) or 0
    alpha, targets = source.number(alpha_name), _targets(source, targets_name)
    is_rslora = source.system == "trl" and source.flag("use_rslora")
    is_on = rank > 0 and (source.system != "trl" or source.flag("use_peft"))
    if not is_on:
        return None
    made: dict[str, Any] = {"rank": rank, "alpha": alpha}
    if targets is not None:
        made["targets"] = targets
    if is_rslora:
        made["scaling"] = "rslora"
    start = source.text(f"{MODEL}lora_adapter_path") if source.system == "verl" else None
    return {**made, "from": start} if start else made


def put_adapter(draft: Draft, made: dict[str, Any]) -> None:
    """Puts the section."""
    draft.put("actor.model.adapter", made)


# Optimizers


def verl_rate(role: str) -> Callable[[Source], float | None]:
    """Takes the least rate of a schedule of verl."""
    prefix = f"{VERL[role]}optim."

    def take(source: Source) -> float | None:
        rate, share = source.number(f"{prefix}lr"), source.number(f"{prefix}min_lr_ratio")
        least = source.number(f"{prefix}min_lr") or (share or 0.0) * (rate or 0.0)
        return least or None

    return _falling(f"{prefix}lr_scheduler_type", take)


def openrlhf_rate(role: str) -> Callable[[Source], float | None]:
    """Takes the least rate of a schedule of OpenRLHF."""

    def take(source: Source) -> float | None:
        least = source.number(f"{role}.min_lr_ratio") or 0.0
        return least * (source.number(f"{role}.adam.lr") or 0.0) or None

    def only(source: Source) -> float | None:
        name = f"{role}.lr_scheduler"
        is_bounded = source.text(name) == "cosine_with_min_lr"
        made = _falling(name, take)(source)
        return made if is_bounded else None

    return only


def trl_rate(source: Source) -> float | None:
    """Takes the least rate of a schedule of TRL."""

    def take(source: Source) -> float | None:
        given = source.get("lr_scheduler_kwargs")
        extra = given if isinstance(given, dict) else {}
        rate = source.number("learning_rate") or 0.0
        least = extra.get("min_lr") or (extra.get("min_lr_rate") or 0.0) * rate
        return float(least) or None

    return _falling("lr_scheduler_type", take)(source)


_SCHEDULES = {
    **{"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"},
    **{"cosine": "cosine", "cosine_with_min_lr": "cosine"},
}


def _falling(name: str, take: Callable[[Source], float | None]) -> Callable[[Source], float | None]:
    """The least rate where the rate falls at all."""

    def only(source: Source) -> float | None:
        made = take(source)
        return None if schedule(name)(source) is None else made

    return only


def schedule(name: str) -> Callable[[Source], str | None]:
    """Takes the type of a schedule; None where the rate stays."""

    def take(source: Source) -> str | None:
        given = source.text(name) or "constant"
        if given not in _SCHEDULES:
            source.lose(name, "no such schedule here: constant, linear and cosine are")
        found = _SCHEDULES.get(given, "constant")
        return None if found == "constant" else found

    return take


def verl_warmup(role: str) -> Callable[[Source], int | None]:
    """Takes a warm-up, which verl counts in steps of the run."""
    prefix = f"{VERL[role]}optim."

    def take(source: Source) -> int | None:
        given = source.number(f"{prefix}lr_warmup_steps")
        share = source.number(f"{prefix}lr_warmup_steps_ratio")
        return warmup_steps(source, given, share, batch(source).updates) or None

    return take


def openrlhf_warmup(role: str) -> Callable[[Source], int | None]:
    """Takes a warm-up, which OpenRLHF gives as a share."""

    def take(source: Source) -> int | None:
        share = source.number(f"{role}.lr_warmup_ratio")
        return warmup_steps(source, None, share, 1) or None

    return take


def trl_warmup(source: Source) -> int | None:
    """Takes a warm-up: steps, or below 1 a share; or a share of its own name."""
    given, share = source.number("warmup_steps") or 0.0, source.number("warmup_ratio")
    if 0 < given < 1:
        given, share = 0.0, given
    return warmup_steps(source, given or None, share, 1) or None


def betas(source: Source, role: str = "actor") -> list[float] | None:
    """Takes both betas of AdamW."""
    if source.system == "trl":
        made = [source.number("adam_beta1"), source.number("adam_beta2")]
        return None if None in made else made  # type: ignore[return-value]
    names = {"verl": f"{VERL[role]}optim.betas", "openrlhf": f"{role}.adam.betas"}
    found = source.numbers(names[source.system])
    return found if len(found) == 2 else None


def verl_clip(role: str) -> Callable[[Source], float | None]:
    """Takes the bound of the gradient's norm, which verl has at two places."""

    def take(source: Source) -> float | None:
        own, other = f"{VERL[role]}grad_clip", f"{VERL[role]}optim.clip_grad"
        is_other = source.given(other) and not source.given(own)
        value = source.number(other if is_other else own)
        if source.given(own) and source.given(other):
            source.number(other)
        return value if value and value > 0 else None

    return take


def optimizer_type(role: str) -> Callable[[Source], str | None]:
    """Takes the type of an optimizer; None for AdamW, which needs no type."""
    names = {"verl": f"{VERL[role]}optim.optimizer", "openrlhf": f"{role}.optim", "trl": "optim"}

    def take(source: Source) -> str | None:
        name = names[source.system]
        given = (source.text(name) or "").lower() if source.given(name) else ""
        if "8bit" in given:
            source.lose(name, "no moments in 8 bits here: AdamW keeps them in float32")
        elif "muon" in given:
            if adapter(source) is not None:
                source.lose(name, "Muon does not train the factors of an adapter: AdamW does")
                return None
            source.lose(f"{role}.muon.lr", "AdamW's rate is for all weights, also Muon's")
            if given == "muon" and source.system == "verl":
                source.say(
                    "Megatron scales Muon's steps by muon_scale_mode; here they have about the "
                    "size of AdamW's: give learning_rate as for AdamW"
                )
            return "muon"
        elif given and "adam" not in given:
            source.lose(name, "AdamW and Muon are the optimizers here: choose a rate for AdamW")
        return None

    return take


def only_muon(role: str, name: str, kind: str) -> Callable[[Source], Any]:
    """Takes a number that Muon alone reads; of verl, Megatron's."""

    def take(source: Source) -> Any:
        is_muon = optimizer_type(role)(source) is not None
        if source.system == "verl" and source.text(f"{VERL[role]}optim.optimizer") != "muon":
            is_muon = False
        return getattr(source, kind)(name) if is_muon else None

    return take


def put_moments(role: str, name: str) -> Callable[[Draft, Any], None]:
    """Puts a number of AdamW, which stands beside Muon in a section of its own."""

    def put(draft: Draft, value: Any) -> None:
        section = f"{role}.optimizer"
        is_beside = draft.get(f"{section}.type") == "muon"
        draft.put(f"{section}.adamw.{name}" if is_beside else f"{section}.{name}", value)

    return put


# Passes and samplers


def pass_tokens(role: str) -> Callable[[Source], int | None]:
    """Tokens of one pass of a role, where the others count rows."""

    def take(source: Source) -> int | None:
        return {"verl": _verl_pass, "openrlhf": _openrlhf_pass, "trl": _trl_pass}[source.system](
            source, role
        )

    return take


def _verl_pass(source: Source, role: str) -> int | None:
    whole = batch(source).whole_tokens
    prefix = {**VERL, "reference": "actor_rollout_ref.ref."}[role]
    kind = "log_prob" if role == "reference" else "ppo"
    dynamic = f"{prefix}log_prob_use_dynamic_bsz" if kind == "log_prob" else ""
    if source.flag(dynamic if source.given(dynamic) else f"{VERL['actor']}use_dynamic_bsz") or (
        role == "critic" and source.flag("critic.use_dynamic_bsz")
    ):
        tokens = f"{prefix}{kind}_max_token_len_per_gpu"
        for name in ("micro_batch_size_per_gpu", "micro_batch_size"):
            source.lose(f"{prefix}{kind}_{name}", "use_dynamic_bsz counts tokens in its place")
        own = source.whole(tokens)
        return None if own is None else own * row_cuts(source, role)
    rows = source.whole(f"{prefix}{kind}_micro_batch_size_per_gpu")
    if rows is None:
        return None
    source.lose(f"{prefix}{kind}_max_token_len_per_gpu", "rows are counted in its place")
    return rows * whole


def row_cuts(source: Source, role: str) -> int:
    """Ranks that cut rows among them, by verl's sections; the reference takes the actor's."""
    prefix = {**VERL, "reference": "actor_rollout_ref.ref."}[role]
    given = [f"{prefix}{name}" for name in CUTS if source.given(f"{prefix}{name}")]
    if not given and role == "reference":
        return row_cuts(source, "actor")
    return max((source.whole(name) or 1 for name in given), default=1)


def _openrlhf_pass(source: Source, role: str) -> int | None:
    prefix = "rollout" if role == "reference" else "train"
    rows, tokens = f"{prefix}.micro_batch_size", f"{prefix}.max_tokens_per_gpu"
    if source.flag("train.dynamic_batch_enable"):
        source.lose(rows, "tokens are counted in its place (train.dynamic_batch_enable)")
        return source.whole(tokens) or source.whole("train.max_tokens_per_gpu")
    source.lose(tokens, "rows are counted in its place, without train.dynamic_batch_enable")
    return (source.whole(rows) or 1) * batch(source).whole_tokens


def _trl_pass(source: Source, role: str) -> int | None:
    return (source.whole("per_device_train_batch_size") or 1) * batch(source).whole_tokens


def recompute(name: str, megatron: str = "") -> Callable[[Source], str]:
    """Takes whether activations are computed again; of Megatron also which."""

    def take(source: Source) -> str:
        granularity = source.text(megatron) if megatron and source.given(megatron) else None
        is_full = source.flag(name)
        if granularity in ("full", "selective"):
            return granularity
        return "full" if is_full else "none"

    return take


def sampler_context(source: Source) -> int:
    """Longest prompt and completion of the sampler."""
    names = {"verl": f"{ROLLOUT}max_model_len", "trl": "vllm_max_model_length"}
    name = names.get(source.system)
    whole = batch(source).whole_tokens
    given = source.whole(name) if name else None
    if name and given is not None and given < whole:
        source.lose(name, f"prompt and completion together have {whole} tokens: that is taken")
    return max(whole, given or 0)


def sampler(source: Source) -> dict[str, Any]:
    """Type of the sampler, and where one stands apart as servers, those."""
    if source.system == "trl":
        return _trl_sampler(source)
    name = f"{ROLLOUT}name"
    if source.system == "verl":
        given = source.text(name) if source.given(name) else "vllm"
        if given == "hf":
            return {"type": "hf"}
        if given != "vllm":
            source.lose(name, "no such sampler here: vllm is taken")
    if source.system == "openrlhf" and source.whole("vllm.num_engines") == 0:
        return {"type": "hf"}
    return {"type": "vllm"}


def _trl_sampler(source: Source) -> dict[str, Any]:
    is_server = source.text("vllm_mode") == "server"
    url = source.text("vllm_server_base_url") if source.given("vllm_server_base_url") else None
    host, port = source.text("vllm_server_host"), source.whole("vllm_server_port")
    if not source.flag("use_vllm"):
        return {"type": "hf"}
    if not is_server:
        return {"type": "vllm"}
    local = "127.0.0.1" if host == "0.0.0.0" else host
    return {"type": "vllm_server", "urls": [url or f"http://{local}:{port}"]}


def put_sampler(draft: Draft, made: dict[str, Any]) -> None:
    """Puts the sampler, with what has to be said of its kind."""
    for key, value in made.items():
        draft.put(f"actor.rollout.{key}", value)
    if made["type"] == "hf":
        draft.say("actor.rollout", "Sampling with transformers is slow; vllm is the fast one.")
    if made["type"] == "vllm_server":
        draft.say(
            "actor.rollout",
            "These are stock servers of `vllm serve`, not those of `trl vllm-serve`: start them as "
            "docs/layouts.md says.",
        )


def memory(name: str) -> Callable[[Source], float | None]:
    """Takes the sampler's share of a GPU."""

    def take(source: Source) -> float | None:
        share = source.number(name)
        if sampler(source)["type"] != "vllm" or share is None:
            return None
        return min(share, math.nextafter(1.0, 0.0))

    return take


def vllm_only(name: str) -> Callable[[Source], Any]:
    """Takes a whole number that vLLM alone reads."""

    def take(source: Source) -> int | None:
        value = source.whole(name)
        return value if sampler(source)["type"] != "hf" else None

    return take


def eager(name: str) -> Callable[[Source], bool | None]:
    """Takes whether graph capture is skipped; else the sampler chooses."""

    def take(source: Source) -> bool | None:
        is_eager = source.flag(name)
        return True if is_eager and sampler(source)["type"] == "vllm" else None

    return take


def replays_routes(name: str) -> Callable[[Source], bool | None]:
    """Takes whether tokens go through the experts by which they were sampled."""

    def take(source: Source) -> bool | None:
        mode = source.text(name)
        if mode == "R2":
            source.lose(name, "routes are those of sampling: actor.rollout.replay_routes (R3)")
        return True if mode == "R3" else None

    return take
