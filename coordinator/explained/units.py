"""Units of the numbers in a recipe.

A suffix says the unit of most names (`wait_s`, `memory_mib`). The others stand here by name, and
by section and name where one name means two things.
"""

from __future__ import annotations

from collections.abc import Mapping

_BY_SUFFIX: Mapping[str, str] = {
    "_s": "seconds",
    "_mib": "MiB",
    "_gib": "GiB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_rows": "rows",
    "_steps": "steps",
    "_port": "port",
    "_weight": "factor",
    "_coefficient": "factor",
}

_BY_SECTION: Mapping[str, str] = {
    "GradNormSpec.above": "L2 norm",
    "KlSpec.above": "nats a token",
    "MismatchSpec.above": "nats a token",
    "PythonRewardSpec.concurrency": "processes",
    "MuonSpec.ns_steps": "iterations",
    "MuonSpec.warmup_steps": "optimizer steps",
    "OptimizerSpec.warmup_steps": "optimizer steps",
    "RewardFallSpec.below": "reward",
    "RunSpec.samples": "trajectories",
    "AdaptiveKlSpec.target": "nats a trajectory",
    "SyncSamplerSpec.batch_size": "prompts",
    "OneStepAheadSpec.batch_size": "prompts",
    "AsyncSamplerSpec.batch_size": "prompts",
    "MixedSourceSpec.weight": "share",
    "PpoValueLossSpec.clip": "reward",
    "VllmSpec.max_model_len": "tokens",
    "HfSpec.max_model_len": "tokens",
    "VllmServerSpec.max_model_len": "tokens",
}

_BY_NAME: Mapping[str, str] = {
    "alpha": "factor",
    "at_once": "trajectories",
    "attempts": "failures",
    "back": "steps",
    "batch_size": "rows",
    "below": "nats a token",
    "beta": "factor",
    "betas": "factor",
    "breaker_failures": "failures",
    "buffer": "tokens",
    "centering": "factor",
    "clip_high": "ratio",
    "clip_low": "ratio",
    "coefficient": "factor",
    "concurrency": "requests",
    "contained": "reward",
    "cost_limit": "cost",
    "cut_share": "share",
    "dp": "ranks",
    "dropout": "share",
    "dual_clip": "ratio",
    "epochs": "passes",
    "eps": "number",
    "exact": "reward",
    "fall": "standard deviations",
    "form": "reward",
    "fsdp": "ranks",
    "full_score": "reward",
    "gamma": "factor",
    "gpu_memory_utilization": "share",
    "growth": "ratio",
    "held_out_size": "prompts",
    "horizon": "trajectories",
    "importance_cap": "ratio",
    "initial_multiplier": "factor",
    "keep": "checkpoints",
    "kl_in_loss": "factor",
    "label": "index",
    "label_smoothing": "share",
    "lam": "factor",
    "least_gain": "share",
    "learning_rate": "rate",
    "margin": "score",
    "max_grad_norm": "L2 norm",
    "max_length": "tokens",
    "max_multiplier": "factor",
    "max_num_seqs": "sequences",
    "max_rounds": "rounds",
    "max_sessions": "sessions",
    "max_staleness": "steps",
    "max_turns": "turns",
    "max_waiting_calls": "calls",
    "maximum": "reward",
    "min_std": "reward",
    "min_delta": "metric",
    "min_learning_rate": "rate",
    "minimum": "reward",
    "momentum": "factor",
    "most_roll_backs": "times",
    "most_skips": "steps",
    "multiplier_rate": "rate",
    "norm_length": "tokens",
    "num_layers": "layers",
    "num_prompts": "prompts",
    "of_best": "share",
    "optimizer_steps": "optimizer steps",
    "over": "steps",
    "patience": "evaluations",
    "pass_at": "completions",
    "penalty": "reward",
    "port": "port",
    "pp": "ranks",
    "prompts_per_step": "prompts",
    "rank": "rows of A",
    "replicas": "services",
    "most_replicas": "services",
    "retries": "times",
    "sample_ratio": "share",
    "samples_per_prompt": "completions",
    "seed": "number",
    "steps": "steps",
    "steps_per_trial": "steps",
    "temperature": "factor",
    "tokens": "tokens",
    "threads": "threads",
    "top_k": "tokens",
    "top_p": "share",
    "tp": "ranks",
    "train_size": "prompts",
    "tries": "times",
    "truncated": "share",
    "value": "reward",
    "weight": "factor",
    "weight_decay": "factor",
}


def unit_of(section: str, name: str) -> str:
    """The unit of a number; empty where no rule knows it.

    Args:
        section: Name of the section's class, e.g. "KlSpec".
        name: Of the key, e.g. "above".
    """
    found = _BY_SECTION.get(f"{section}.{name}") or _BY_NAME.get(name)
    if found is not None:
        return found
    return next((unit for suffix, unit in _BY_SUFFIX.items() if name.endswith(suffix)), "")
