"""A recipe of what another system's settings say, with a comment for what it has no place for."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import get_args

from rolemesh.coordinator.imports.draft import Draft, inline
from rolemesh.coordinator.imports.source import ImportedError, Leftover, Source, SystemName
from rolemesh.coordinator.imports.tables.algorithm import ALGORITHM, SAMPLING
from rolemesh.coordinator.imports.tables.data import DATA
from rolemesh.coordinator.imports.tables.losses import CORRECTIONS, LOSSES, TEACHERS
from rolemesh.coordinator.imports.tables.models import MODELS
from rolemesh.coordinator.imports.values.batch import batch
from rolemesh.coordinator.imports.values.choices import choice
from rolemesh.coordinator.imports.values.data import NO_DATA, NO_REWARD
from rolemesh.coordinator.imports.values.placing import placing, put_pools
from rolemesh.coordinator.imports.values.teachers import verl_teachers, verl_teaches
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import read_recipe

TOPICS = (SAMPLING, ALGORITHM, LOSSES, CORRECTIONS, TEACHERS, MODELS, DATA)
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)

_NO_MODEL = "FILL-IN/model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A recipe that was made."""

    text: str
    missing: tuple[str, ...]
    """Fields that the user has to fill in."""
    lost: dict[str, str]
    """Fields without a counterpart, each with the reason."""


def imported(source: Source, command: str) -> Imported:
    """The recipe of a source.

    Args:
        source: Settings.
        command: What wrote it, for the first line.

    Raises:
        ImportedError: A value is wrong, or nothing here does what it asks for.
    """
    draft = _drafted(source)
    for name in source.read_and_given():
        # A trainer says whose settings the others are.
        if name != "trainer" and _is_without_effect(source, draft, name):
            source.lose(name, "it changes nothing here, with what else is given")
    left = source.leftover(table_fields(source.system))
    text = draft.text(_head(source, draft, command), _foot(source, left))
    try:
        read_recipe(text, "the recipe")
    except RecipeError as error:
        raise ImportedError(
            f"these settings of {source.title} make no recipe that is valid: {error}"
        ) from error
    return Imported(text=text, missing=tuple(draft.missing), lost=left.reasons)


def _drafted(source: Source) -> Draft:
    draft = Draft()
    draft.put("run.name", "")
    draft.put("algorithm.type", choice(source).type)
    for topic in TOPICS:
        for fact in topic.facts:
            fact.apply(source, draft)
    _finish(source, draft)
    return draft


def _is_without_effect(source: Source, draft: Draft, name: str) -> bool:
    """Whether the recipe is the same without a value."""
    other = source.without(name)
    try:
        return _drafted(other).body() == draft.body() and other.notes_here == source.notes_here
    except ImportedError:
        return False


def table_fields(system: SystemName) -> set[str]:
    """All fields of a system that the tables have."""
    return {name for topic in TOPICS for name in topic.fields(system)}


def _finish(source: Source, draft: Draft) -> None:
    """What several facts decide together."""
    tree = draft.tree
    if draft.get("actor.model.path") is None:
        draft.fill_in("actor.model.path", _NO_MODEL, "folder of the model, or hf:ORG/NAME.")
    model = draft.get("actor.model.path")
    if draft.get("actor.data") is None:
        data = {**NO_DATA, "max_prompt_tokens": batch(source).prompt_tokens}
        draft.fill_in("actor.data", data, "the prompts (docs/data.md).")
    kind = tree["algorithm"]["type"]
    several = verl_teachers(source) if source.system == "verl" else None
    if several is not None:
        draft.put("teacher", several)
    if draft.get("teacher") is None and (
        kind == "on_policy_distillation" or verl_teaches(source) == "beside"
    ):
        draft.fill_in("teacher.model.path", _NO_MODEL, "folder of the teacher, or hf:ORG/NAME.")
    if draft.get("reward") is None and kind != "on_policy_distillation":
        draft.fill_in("reward", NO_REWARD, _no_reward(source))
    elif draft.get("reward") and "FILL-IN" in inline(draft.get("reward")):
        draft.missing.append("reward")
        draft.say("reward", "FILL IN: which functions these names mean.")
    if kind == "ppo" and draft.get("critic.model.path") is None:
        if source.system == "openrlhf":
            draft.put("critic.model.path", model)
        else:
            draft.fill_in("critic.model.path", model, "the critic's model, if it is another one.")
    if kind != "ppo":
        tree.pop("critic", None)
    if draft.get("teacher") is None and (
        draft.get("algorithm.policy_loss.kl_in_loss")
        or draft.get("algorithm.advantages.kl_in_reward")
    ):
        if draft.get("actor.model.adapter") is not None:
            draft.put("reference", {}, "The actor's base, with its adapter off.")
        else:
            draft.put("reference.model.path", model)
            for path, value in draft.kept.items():
                draft.put(path, value)
    if draft.get("actor.rollout.type") == "vllm_server" and draft.get("actor.model.adapter"):
        draft.fill_in(
            "actor.rollout.shared_folder", "FILL-IN/shared", "folder that the servers see, too."
        )
    if draft.get("actor.optimizer.offload") is False:
        del tree["actor"]["optimizer"]["offload"]
    put_pools(draft, placing(source))


def _no_reward(source: Source) -> str:
    if source.system == "verl":
        return (
            "verl chooses one of its own scorers by the column data_source: name a function "
            "with verl's signature, e.g. python:FILE.py:compute_score (docs/rewards.md)."
        )
    return "who judges: a function, a server or a model (docs/rewards.md)."


def _head(source: Source, draft: Draft, command: str) -> list[str]:
    lines = [
        f"Made of settings of {source.title} by `{command}`. What is left out there has the "
        f"default of {source.title} here.",
        "",
        "  rolemesh check RECIPE    # problems that would stop a run, in seconds",
        "  rolemesh train RECIPE",
    ]
    if draft.missing:
        lines += ["", f"To fill in: {', '.join(draft.missing)}."]
    notes = [*source.given_notes, *source.notes_here]
    lines += ["", *notes] if notes else []
    return lines


def _begun(text: str) -> str:
    """A sentence's beginning in a capital, unless it is a name."""
    first = text.split()[0]
    return f"{text[0].upper()}{text[1:]}" if first.isalpha() and first.islower() else text


def _foot(source: Source, left: Leftover) -> list[str]:
    lines: list[str] = []
    if left.reasons:
        lines += [f"Without a counterpart here, of what was given ({len(left.reasons)}):"]
        by_reason: dict[str, list[str]] = {}
        for name, why in left.reasons.items():
            by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            lines += ["", f"{_begun(why)}:"]
            lines += [f"  {source.name_of(name)} = {source.shown_value(name)}" for name in names]
    for title, fields in (
        ("So it is here in any case:", left.as_here),
        (f"At the default of {source.title}, which asks for nothing here:", left.at_default),
    ):
        if fields:
            named = ", ".join(source.name_of(name) for name in fields)
            lines += ["", title]
            lines += [f"  {line}" for line in textwrap.wrap(named, 94, break_on_hyphens=False)]
    return lines
