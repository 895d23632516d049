"""Sources of rewards."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.models import ModelSpec


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


RewardSourceSpec = Annotated[
    ArithmeticRewardSpec | ReasoningGymRewardSpec | ClassifierRewardSpec | EnvironmentRewardSpec,
    Field(discriminator="type"),
]
