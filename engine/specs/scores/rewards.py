"""Sources of rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.models.sections import ModelSpec
from rolemesh.engine.specs.scores.outside_rewards import (
    AnyOutsideRewardSpec,
    DropGroupSpec,
    OutsideRewardSpec,
    outside_source,
)


class ArithmeticRewardSpec(Spec):
    """Graded reward of verifiable arithmetic: how close a completion is to the bare number."""

    type: Literal["arithmetic"] = "arithmetic"
    exact: float = 1.0
    """The completion is the answer and nothing else."""
    contained: float = Field(default=0.2, ge=0)
    """Most that a right last number with other text around it can earn; text shrinks it."""
    form: float = Field(default=0.1, ge=0)
    """A bare number, but a wrong one."""


class ReasoningGymRewardSpec(Spec):
    """The task's own scorer (reasoning-gym's score_answer), 0 to 1."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


class ClassifierRewardSpec(Spec):
    """A Hugging Face sequence classifier: the reward is a logit of its head."""

    type: Literal["classifier"] = "classifier"
    model: ModelSpec
    """Folder of an AutoModelForSequenceClassification and its tokenizer."""
    label: int = Field(default=0, ge=0)
    """Index of the logit that is the reward."""
    new_head: bool = False
    """The folder is a causal LM without such a head: begin with one of a single label, at zero."""

    @model_validator(mode="after")
    def _check_label(self) -> Self:
        if self.new_head and self.label != 0:
            raise ValueError(
                f"label is {self.label} with new_head, which has the label 0 alone: leave label out"
            )
        return self


class EnvironmentRewardSpec(Spec):
    """What the environment gave while the trajectory was sampled: give the actor an environment."""

    type: Literal["environment"] = "environment"
    full_score: float | None = None
    """Reward of a trajectory that is right in full, for the accuracy; None: there is no such."""


def _from_text(source: Any) -> Any:
    """The long form of a source that is one text."""
    if not isinstance(source, str):
        return source
    if source in _OWN_TYPES:
        raise ValueError(f"{source!r} is a type: write source: {{type: {source}}}")
    return outside_source(source)


def _from_list(source: Any) -> Any:
    """The long form of a source that is one text, or several in a list."""
    if isinstance(source, list | tuple):
        return {"type": "weighted_sum", "rewards": source}
    return _from_text(source)


OwnRewardSpec = (
    ArithmeticRewardSpec | ReasoningGymRewardSpec | ClassifierRewardSpec | EnvironmentRewardSpec
)
"""A source that the reward service judges with by itself."""

_OWN_TYPES = frozenset(one.model_fields["type"].default for one in get_args(OwnRewardSpec))

SingleRewardSpec = Annotated[OwnRewardSpec | AnyOutsideRewardSpec, Field(discriminator="type")]
"""A source that is no sum of others."""


class WeightedRewardSpec(Spec):
    """One of several sources."""

    source: Annotated[SingleRewardSpec, BeforeValidator(_from_text)]
    """Who judges; the short forms are taken too, e.g. "http://host/get_reward"."""
    weight: float = 1.0
    """Factor of its rewards in the sum."""
    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Stands in metrics, reward/<name>/...; None: the source's name or type."""

    @model_validator(mode="before")
    @classmethod
    def _from_source(cls, data: Any) -> Any:
        """A text in place of the mapping is its source."""
        return {"source": data} if isinstance(data, str) else data


class WeightedSumSpec(Spec):
    """The weighted sum of several sources; what does not apply to a row adds nothing to it."""

    type: Literal["weighted_sum"] = "weighted_sum"
    rewards: tuple[WeightedRewardSpec, ...] = Field(min_length=1)
    """The sources with their weights; a row's reward is the sum of weight times reward."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        given = [reward.name for reward in self.rewards if reward.name is not None]
        twice = next((name for name in given if given.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards has the name {twice!r} twice: give each one of its own")
        return self


RewardSourceSpec = Annotated[
    Annotated[SingleRewardSpec | WeightedSumSpec, Field(discriminator="type")],
    BeforeValidator(_from_list),
]
"""Where rewards come from: a mapping with a type, or one text, or a list of weighted sources."""


def named_sources(source: SingleRewardSpec | WeightedSumSpec) -> list[WeightedRewardSpec]:
    """The sources that rewards come from, each with a name of its own.

    Example: two http sources without names are "openrlhf" and "openrlhf-2".
    """
    rewards = (
        source.rewards
        if isinstance(source, WeightedSumSpec)
        else (WeightedRewardSpec(source=source),)
    )
    taken = {reward.name for reward in rewards if reward.name is not None}
    named = []
    for reward in rewards:
        name = reward.name
        if name is None:
            own = getattr(reward.source, "name", None) or reward.source.type
            name, number = own, 1
            while name in taken:
                number += 1
                name = f"{own}-{number}"
            taken.add(name)
        named.append(reward.model_copy(update={"name": name}))
    return named


def may_drop_groups(source: SingleRewardSpec | WeightedSumSpec) -> bool:
    """Whether rows of this source may come without a reward, to be left out of the step."""
    return any(
        isinstance(reward.source, OutsideRewardSpec)
        and isinstance(reward.source.on_failure, DropGroupSpec)
        for reward in named_sources(source)
    )
