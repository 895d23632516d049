"""Folders of models that a recipe names, by role, and what each role reads of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rolemesh.coordinator.recipe.role_names import field_of, kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.model_folders.adapter_config import check_adapter
from rolemesh.engine.model_folders.model_files import check_model_files, check_sampled
from rolemesh.engine.specs import (
    AdapterSpec,
    ClassifierRewardSpec,
    RewardSpec,
    SingleRewardSpec,
    WeightedSumSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder, and what a role reads of it."""

    field: str
    """Of the recipe that names it."""
    path: Path
    num_layers: int | None = None
    """Layers that are kept; None for all."""
    head: Literal["lm_head", "score"] | None = None
    """What has to stand on top of the model."""
    has_weights: bool = True
    has_tokenizer: bool = False
    adapter: AdapterSpec | None = None
    """What stands beside the model's layers."""
    adapter_field: str = ""
    """Of the recipe that describes it, e.g. "actor.model.adapter"."""
    sampler: str = ""
    """Type of rollout that samples with the model; empty: none does."""
    is_scoring: bool = False
    """Whether a score head stands on the model in use, whatever the folder has."""

    def check(self) -> None:
        """Raises ModelFolderError or AdapterFolderError, as the role would.

        See `check_model_files`, `check_sampled` and `check_adapter`.
        """
        check_model_files(
            self.path,
            field=self.field,
            num_layers=self.num_layers,
            head=self.head,
            has_weights=self.has_weights,
            has_tokenizer=self.has_tokenizer,
        )
        if self.sampler:
            check_sampled(self.path, self.sampler, field=self.field)
        if self.adapter is not None:
            check_adapter(
                self.path,
                self.adapter,
                field=self.adapter_field,
                num_layers=self.num_layers,
                head="score" if self.is_scoring else "lm_head",
            )


def model_folders(recipe: Recipe, roles: Iterable[str]) -> Iterator[ModelFolder]:
    """The folders that these roles of a recipe load models, tokenizers or configs from."""
    for role in roles:
        section: Any = recipe.section(role)
        if isinstance(section, RewardSpec):
            yield from judge_folders(f"{role}.source", section.source)
            continue
        if section.model is None:
            # Of a teacher that servers hold.
            continue
        is_rollout = role == "rollout"
        # The rollout role samples with the adapter of the actor.
        owner = "actor" if is_rollout and recipe.actor is not None else role
        trained: Any = recipe.section(owner)
        rollout = getattr(section, "rollout", None)
        yield ModelFolder(
            field=f"{field_of(role)}.model.path",
            path=section.model.path,
            num_layers=None if is_rollout else section.model.num_layers,
            head="lm_head" if kind_of(role) in ("actor", "reference", "teacher") else None,
            # Those of a sampler come from the actor, unless it sends an adapter alone.
            has_weights=not is_rollout or trained.model.adapter is not None,
            has_tokenizer=is_rollout
            or role == "actor"
            or (kind_of(role) == "teacher" and section.prompt is not None),
            adapter=trained.model.adapter,
            adapter_field=f"{owner}.model.adapter",
            sampler="" if rollout is None else rollout.type,
            is_scoring=role == "critic",
        )


def judge_folders(field: str, source: SingleRewardSpec | WeightedSumSpec) -> Iterator[ModelFolder]:
    """The folders of the classifiers among the sources of a reward.

    Args:
        field: Where the reward stands, e.g. "reward.source".
        source: The reward.
    """
    sources: dict[str, SingleRewardSpec | WeightedSumSpec] = {field: source}
    if isinstance(source, WeightedSumSpec):
        sources = {
            f"{field}.rewards.{number}.source": one.source
            for number, one in enumerate(source.rewards)
        }
    for place, one in sources.items():
        if isinstance(one, ClassifierRewardSpec):
            yield ModelFolder(
                field=f"{place}.model.path",
                path=one.model.path,
                num_layers=one.model.num_layers,
                head=None if one.new_head else "score",
                has_tokenizer=True,
                adapter=one.model.adapter,
                adapter_field=f"{place}.model.adapter",
                is_scoring=True,
            )
