"""What the process that estimates memory is asked of a recipe, and its answers by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rolemesh.coordinator.recipe.model_sizes import models_of, trained_models
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.pool_memory import RoleFound
from rolemesh.engine.specs import OwnFunctionSpec, RewardSpec, VllmSpec

_KINDS = {"actor": "policy", "reference": "policy", "teacher": "policy", "critic": "critic"}
_LOSSES = {"actor": "policy_loss", "critic": "value_loss", "reward": "reward_loss"}
_STAND_IN = {"actor": {"type": "ppo_policy"}, "critic": {"type": "ppo_value"}}
"""Losses for memory alone, where the recipe's is a function of the user, or there is none."""

_LEAST_ROW_TOKENS = 512
"""Row for recipes that do not bound theirs."""


def question_of(recipe: Recipe) -> dict[str, Any]:
    """What the process is asked: see `services/preview/memory.py`."""
    return {"models": list(_models(recipe)), "samplers": list(_samplers(recipe))}


def add_answer(found: dict[str, RoleFound], recipe: Recipe, answer: Mapping[str, Any]) -> None:
    """Adds an answer to what is known of its role. Models of one role add up."""
    role = answer["role"]
    known = found.get(role, RoleFound(role=role, trains=role in trained_models(recipe)))
    if answer["type"] == "sampler":
        numbers = {name: size for name, size in answer.items() if isinstance(size, int)}
        found[role] = replace(known, sampler=numbers)
        return
    found[role] = replace(
        known,
        rest=known.rest + answer["rest"],
        # Only one of several models computes at a time.
        peak=max(known.peak + answer["rest"], known.rest + answer["peak"]),
        at_rest=_sum(known.at_rest, answer["at_rest"]),
        at_peak=_sum(known.at_peak, answer["at_peak"]),
    )


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in (left or right)}


def _models(recipe: Recipe) -> Iterator[dict[str, Any]]:
    trained = trained_models(recipe)
    row_tokens, prompt_tokens = _row(recipe)
    for role, models in models_of(recipe).items():
        section: Any = recipe.section(role)
        for model in models:
            is_trained = role in trained
            yield {
                "role": role,
                "kind": "reward" if isinstance(section, RewardSpec) else _KINDS[kind_of(role)],
                "model": model.model_dump(mode="json"),
                "layout": (
                    section.train if hasattr(section, "train") else section.layout
                ).model_dump(mode="json"),
                "optimizer": section.optimizer.model_dump(mode="json") if is_trained else None,
                "loss": _loss(recipe, role) if is_trained else None,
                "average": recipe.actor_average if role == "actor" else None,
                # Scores of a reward differ by little, so that it computes exactly.
                "numerics": "exact"
                if isinstance(section, RewardSpec)
                else section.numerics or recipe.run.numerics,
                "row_tokens": row_tokens,
                "prompt_tokens": prompt_tokens,
            }


def _samplers(recipe: Recipe) -> Iterator[dict[str, Any]]:
    adapter = None if recipe.actor is None else recipe.actor.model.adapter
    for role in ("actor", "rollout"):
        section: Any = getattr(recipe, role)
        if section is not None and isinstance(section.rollout, VllmSpec):
            yield {
                "role": role,
                "path": str(section.model.path),
                "adapter": None if adapter is None else adapter.model_dump(mode="json"),
                "sampler": section.rollout.model_dump(mode="json"),
                "tp": section.rank_layout().generate.tp,
            }


def _loss(recipe: Recipe, role: str) -> Any:
    name = _LOSSES.get(role, "reward_loss")
    loss = getattr(recipe.algorithm, name, None)
    if loss is None or isinstance(loss, OwnFunctionSpec):
        return _STAND_IN.get(role, {"type": "bradley_terry"})
    return loss.model_dump(mode="json")


def _row(recipe: Recipe) -> tuple[int, int]:
    """Tokens of the longest row, and of its prompt."""
    sampler, sampling = recipe.sampler, recipe.sampling
    if sampler is None:
        models = [one for models in models_of(recipe).values() for one in models]
        longest = max([_LEAST_ROW_TOKENS, *(model.micro_batch_tokens for model in models)])
        return longest, 1
    completion = sampler.max_model_len if sampling is None else sampling.max_new_tokens
    return sampler.max_model_len, max(1, sampler.max_model_len - completion)
