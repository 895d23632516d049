"""The card of a trained model for the Hugging Face hub: what its run's folder says of it.

Names and numbers alone: no path of this machine, no address, no prompt.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rolemesh.coordinator.recipe.hub.hf_names import HfName, is_hf_name


def has_adapter(config: Mapping[str, Any]) -> bool:
    """Whether the recipe of a run trains an adapter in place of the actor's model."""
    return bool(config["actor"]["model"].get("adapter"))


def model_card(
    name: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    run_id: str,
    step: int,
    *,
    is_merged: bool = False,
) -> str:
    """The text of README.md.

    Args:
        name: Of the model at the hub, ORG/NAME.
        config: The recipe, as config.yaml of the run has it.
        summary: How the run ended, as summary.json has it; empty where it has not.
        run_id: Of the run.
        step: Of the checkpoint.
        is_merged: Whether an adapter has become a part of its base.
    """
    algorithm = str(config["algorithm"]["type"])
    base = _hf_name(config["actor"]["model"]["path"])
    data = list(_data_names(config["actor"].get("data") or {}))
    is_adapter = has_adapter(config) and not is_merged
    library = "peft" if is_adapter else "transformers"
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if base is not None:
        header["base_model"] = base.repo
        if is_adapter:
            header["base_model_relation"] = "adapter"
    if data:
        header["datasets"] = sorted({one.repo for one in data})
    header["tags"] = ["rolemesh", algorithm]
    rows = "\n".join(
        f"| {key} | {_cell(value)} |"
        for key, value in _facts(config, summary, run_id, step, base, data, is_merged)
    )
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {name.partition('/')[2]}\n\n"
        f"Trained with rolemesh, by the algorithm `{algorithm}`.\n\n"
        f"| what | in this run |\n|---|---|\n{rows}\n"
    )


def _facts(
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    run_id: str,
    step: int,
    base: HfName | None,
    data: list[HfName],
    is_merged: bool,
) -> Iterator[tuple[str, Any]]:
    run, algorithm, actor = config["run"], config["algorithm"], config["actor"]
    yield "run", run_id
    yield "checkpoint", f"after {step} of {run['steps']} steps"
    yield "base model", _told(base) if base else "not from the hub"
    if has_adapter(config):
        adapter = actor["model"]["adapter"]
        merged = ", merged into the base model" if is_merged else ""
        scaling = "" if adapter["scaling"] == "standard" else f", {adapter['scaling']}"
        yield (
            "adapter",
            f"LoRA, rank {adapter['rank']}, alpha {adapter['alpha']:g}{scaling}{merged}",
        )
    if actor.get("data"):
        kind = str(actor["data"]["type"])
        yield "data", ", ".join(map(_told, data)) or f"not from the hub ({kind})"
    if config.get("reward"):
        source = config["reward"]["source"]
        parts = source.get("rewards") or [{"source": source}]
        yield "reward", ", ".join(str(part["source"]["type"]) for part in parts)
    sampling = algorithm.get("sampling")
    if sampling:
        each = sampling["samples_per_prompt"]
        yield "a step", f"{run['prompts_per_step']} prompts, {each} completions each"
        yield "longest completion", f"{sampling['max_new_tokens']} tokens"
    else:
        yield "a step", f"{run['prompts_per_step']} rows"
    yield "learning rate", f"{actor['optimizer']['learning_rate']:g}"
    yield "seed", run["seed"]
    held_out = summary.get("held_out") or {}
    for when in ("before", "after"):
        found = held_out.get(when)
        if found and found["score"] is not None:
            yield (
                f"held-out score after {found['step']} steps",
                f"{found['score']:.3f} (standard error {found['standard_error']:.3f}, "
                f"{found['num_prompts']} prompts)",
            )
    if summary.get("tokens"):
        yield "tokens of training rollouts", f"{summary['tokens']:,}"
    yield "rolemesh", importlib.metadata.version("rolemesh")


def _data_names(section: Mapping[str, Any]) -> Iterator[HfName]:
    """The data sets of the hub that a section names, those of a mixture included."""
    for source in section.get("sources") or ():
        yield from _data_names(source["data"])
    name = _hf_name(section.get("path") or "")
    if name is not None:
        yield name


def _hf_name(path: str) -> HfName | None:
    return HfName.parse(path) if is_hf_name(path) else None


def _told(name: HfName) -> str:
    return f"{name.repo}, commit {name.revision}"


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
