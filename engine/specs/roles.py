"""A role's section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.data import DataSpec
from rolemesh.engine.specs.models.adapters import AdapterSpec
from rolemesh.engine.specs.models.sections import (
    AnyOptimizerSpec,
    GenerateSpec,
    LayoutSpec,
    ModelSpec,
    Numerics,
    OptimizerSpec,
    check_optimizer,
)
from rolemesh.engine.specs.own_functions import OwnFunctionSpec
from rolemesh.engine.specs.sampling.agents import AgentSpec
from rolemesh.engine.specs.sampling.endpoint import EndpointSpec
from rolemesh.engine.specs.sampling.environments import EnvironmentSpec
from rolemesh.engine.specs.sampling.rollout import RolloutSpec
from rolemesh.engine.specs.scores.rewards import ClassifierRewardSpec, RewardSourceSpec
from rolemesh.engine.specs.scores.teacher_prompts import SelfTeacherSpec


class RoleSpec(Spec):
    """A role's section of a recipe."""

    numerics: Numerics | None = None
    """How this role computes. None: as run.numerics says, or "exact" for clients without a recipe.
    It has no effect on reward and cost, which compute exactly: scores differ by little."""

    @property
    def chosen_numerics(self) -> Numerics:
        """What `numerics` says, or "exact"."""
        return self.numerics or "exact"

    def rank_layout(self) -> HybridLayout:
        """How the role's ranks stand to each other; one rank unless a role says otherwise."""
        return HybridLayout(TrainLayout())


def check_endpoint(
    endpoint: EndpointSpec | None,
    environment: EnvironmentSpec | None,
    rollout: RolloutSpec | None,
) -> None:
    """Refuses an endpoint where no sampler of this kind serves one.

    Args:
        endpoint: Of a role.
        environment: Of its rows; agents need an endpoint.
        rollout: Its sampler.

    Raises:
        ValueError: Names the fields.
    """
    if endpoint is None:
        if rollout is not None and isinstance(environment, AgentSpec):
            raise ValueError(
                f"environment.type is {environment.type!r}, which asks the policy at an endpoint, "
                "and there is none: give endpoint, e.g. `endpoint: {}`"
            )
        return
    if rollout is None or rollout.type != "vllm":
        given = "left out" if rollout is None else repr(rollout.type)
        raise ValueError(
            f"endpoint is given, but rollout.type is {given}: an endpoint is served by vLLM in the "
            "service's own process; give rollout type vllm, or leave endpoint out"
        )


class ActorSpec(RoleSpec):
    """The actor: trains the policy and rolls it out."""

    model: ModelSpec
    optimizer: AnyOptimizerSpec = OptimizerSpec()
    """What steps the weights: AdamW, or with type muon Muon for the matrices of the layers."""
    rollout: RolloutSpec | None = None
    """The actor's own sampler; None: it holds none, since a rollout role samples, or none does."""
    data: DataSpec
    """The prompts, or the rows with given answers."""
    environment: EnvironmentSpec | None = None
    """What the policy talks to while it samples; None: a completion is one turn."""
    endpoint: EndpointSpec | None = None
    """Where programs ask the policy over HTTP, in OpenAI's protocol or with token ids; None:
    nowhere. Served where rollout.type is vllm, by rank 0 for all ranks of the service."""
    pretraining_data: DataSpec | None = None
    """Rows that keep what pretraining taught, for a loss beside the main one."""
    own_functions: Mapping[str, OwnFunctionSpec] = Field(default_factory=dict)
    """Functions of yours that losses and estimators may be, by names of your choice for messages:
    for clients that make their own steps. A run adds those of its section algorithm."""
    teacher: SelfTeacherSpec | None = None
    """What it does where it is asked as its own teacher: for clients that make their own steps. A
    run says it of its section teacher; leave it out of a recipe."""
    train: LayoutSpec = LayoutSpec()
    """Layout of training and scoring."""
    generate: GenerateSpec = GenerateSpec()
    """Layout of generation, on the same ranks."""

    @model_validator(mode="after")
    def _check_layouts(self) -> Self:
        self.rank_layout()
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        check_optimizer(self.optimizer, self.model)
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.model.num_layers is not None and self.rollout is not None:
            raise ValueError(
                f"model.num_layers is {self.model.num_layers}, but the sampler has all layers of "
                "the model and takes weights for no fewer: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        check_endpoint(self.endpoint, self.environment, self.rollout)
        return self

    def rank_layout(self) -> HybridLayout:
        """Both layouts as rank arithmetic."""
        return HybridLayout(self.train.layout(), self.generate.layout())


class ModelFolderSpec(Spec):
    """A Hugging Face model folder of which weights are not read."""

    path: Path
    """Folder with config.json and tokenizer, or hf:ORG/NAME as in model.path."""
    adapter: AdapterSpec | None = None
    """What the actor trains beside the folder's weights, which are then read, too. A run tells its
    services; leave it out of a recipe."""


class RolloutRoleSpec(RoleSpec):
    """The rollout role: samples apart from the trainer, with weights that the actor publishes."""

    model: ModelFolderSpec
    """Folder of the same model as the actor's."""
    rollout: RolloutSpec
    """What samples."""
    data: DataSpec
    """The same as the actor's: both number the prompts."""
    environment: EnvironmentSpec | None = None
    """What the policy talks to while it samples; None: a completion is one turn."""
    endpoint: EndpointSpec | None = None
    """Where programs ask the policy over HTTP, as in the actor's section; of several services of
    the role each answers at a port of its own (port 0)."""
    layout: LayoutSpec = LayoutSpec()
    """How sampling is spread over ranks: tp slices a model, dp are generation replicas."""

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.layout.fsdp is not None:
            raise ValueError(
                f"layout.fsdp is {self.layout.fsdp}: a sampler holds whole slices on each of its "
                "dp replicas; leave fsdp out"
            )
        if self.layout.ep != 1:
            raise ValueError(
                f"layout.ep is {self.layout.ep}: a sampler holds all experts on each of its dp "
                "replicas; leave ep out"
            )
        if self.layout.cp != 1:
            raise ValueError(
                f"layout.cp is {self.layout.cp}: a sampler's dp replicas each have whole rows; "
                "leave cp out"
            )
        return self

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        check_endpoint(self.endpoint, self.environment, self.rollout)
        return self

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic: all that would train in an actor generates here."""
        return HybridLayout(
            self.layout.layout(), GenerateLayout(pp=self.layout.pp, tp=self.layout.tp)
        )


CRITIC_LEARNING_RATE = 1e-5
"""A value head begins without knowledge, and a policy must not move far in a step."""


class CriticSpec(RoleSpec):
    """The critic: a value head on a language model."""

    model: ModelSpec
    optimizer: AnyOptimizerSpec = OptimizerSpec(learning_rate=CRITIC_LEARNING_RATE)
    """Its learning rate is 1e-5 where the recipe leaves it out, ten times the actor's."""
    train: LayoutSpec = LayoutSpec()
    """Layout of training and scoring."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _own_rate(cls, given: Any) -> Any:
        """Other keys of the section leave the critic its own learning rate."""
        is_section = isinstance(given, Mapping)
        return {"learning_rate": CRITIC_LEARNING_RATE, **given} if is_section else given

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        check_optimizer(self.optimizer, self.model)
        return self

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.train.layout())


class ReferenceSpec(RoleSpec):
    """The frozen reference policy."""

    model: ModelSpec | None = None
    """The policy. None: the actor's own base, which the actor scores with its adapter off; then
    there is no service of the role."""
    layout: LayoutSpec = LayoutSpec()
    """How the model is spread over ranks."""

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.layout.layout())


class RewardSpec(RoleSpec):
    """The reward role: judges trajectories, and learns to where it is given what that takes."""

    source: RewardSourceSpec
    """Who judges: one source, or a weighted sum of several."""
    layout: LayoutSpec = LayoutSpec()
    """How a model-based reward is spread over ranks."""
    optimizer: AnyOptimizerSpec | None = None
    """Trains the source, which must then be a classifier; None: it stays as it is."""
    data: DataSpec | None = None
    """What it is trained on: pairs of completions. Given with optimizer, and only then."""

    @model_validator(mode="before")
    @classmethod
    def _from_source(cls, data: Any) -> Any:
        """A text or a list in place of the section is its source."""
        return {"source": data} if isinstance(data, str | list | tuple) else data

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if (self.optimizer is None) != (self.data is None):
            given, absent = (
                ("data", "optimizer") if self.optimizer is None else ("optimizer", "data")
            )
            raise ValueError(
                f"{given} is given without {absent}: give both to train the reward model, or "
                "neither"
            )
        if self.optimizer is not None and not isinstance(self.source, ClassifierRewardSpec):
            raise ValueError(
                f"optimizer is given, but source.type is {self.source.type!r}, which has nothing "
                "to train: leave optimizer and data out, or take a 'classifier'"
            )
        is_new = isinstance(self.source, ClassifierRewardSpec) and self.source.new_head
        if self.optimizer is None and is_new:
            raise ValueError(
                "source.new_head is true without optimizer: an untrained head scores everything "
                "0; give optimizer and data, or a folder with a trained head"
            )
        if isinstance(self.source, ClassifierRewardSpec):
            check_optimizer(self.optimizer, self.source.model)
        return self

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.layout.layout())


class CostSpec(RewardSpec):
    """The cost role: a second reward, of what is to be kept low (arXiv 2310.12773).

    It learns as a reward does, to score the chosen completion of a pair higher. So the chosen one
    must be the one that costs more: where data has it the other way round, set data.columns to
    {chosen: rejected, rejected: chosen}.
    """
