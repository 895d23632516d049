"""What is evaluated: tasks with their rows and scorers, how they are drawn, and who is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.data import DataSpec, ReasoningGymSpec
from rolemesh.engine.specs.sampling.agents import AgentSpec
from rolemesh.engine.specs.sampling.environments import TurnEnvironmentSpec
from rolemesh.engine.specs.sampling.rollout import MOST_STOPS, SamplingSpec, StopText
from rolemesh.engine.specs.scores.rewards import (
    ClassifierRewardSpec,
    EnvironmentRewardSpec,
    ReasoningGymRewardSpec,
    RewardSourceSpec,
    SingleRewardSpec,
    named_sources,
)

TASK_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
"""A name stands in metrics and in names of files."""


class GymTaskSpec(Spec):
    """A reasoning-gym task with its own scorer."""

    task: str
    """Registered name of the task, e.g. "chain_sum"."""
    size: int = Field(default=100, ge=1)
    """Prompts, all distinct."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task's generator: equal seeds make equal prompts."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's config class."""
    question_template: str = "{question}"
    """Text of the user turn, as in data of a recipe."""
    system_prompt: str | None = None
    """Text of the system turn; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with."""
    answer_tag: str | None = Field(default=None, pattern=r"^[A-Za-z]\w*$")
    """The last <tag>...</tag> of a completion is its answer, e.g. "answer"; None: all of it is."""

    def evaluated(self, name: str) -> EvaluatedTaskSpec:
        """The task under a name, in the form of all tasks."""
        return EvaluatedTaskSpec(
            name=name,
            data=ReasoningGymSpec(
                **self.model_dump(exclude={"size", "answer_tag"}),
                train_size=0,
                held_out_size=self.size,
            ),
            reward=ReasoningGymRewardSpec(),
            answer_tag=self.answer_tag,
        )


class RowsTaskSpec(Spec):
    """Rows of any data, judged by a reward of a recipe."""

    data: DataSpec
    """Whose held-out rows are asked."""
    reward: RewardSourceSpec | None = None
    """Who judges; as reward.source of a recipe. None: the agent does."""
    agent: Annotated[AgentSpec, Field(discriminator="type")] | None = None
    """Who plays the rows, in sessions of the endpoint, and gives the reward; as actor.environment
    of a recipe. None: no agent does."""
    environment: Annotated[TurnEnvironmentSpec, Field(discriminator="type")] | None = None
    """What the policy talks to, turn by turn, before the reward judges; as actor.environment of a
    recipe. None, and no agent: a row is one completion."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens, that an environment may make; as
    rollout.max_model_len of a recipe. None: what the endpoint says."""
    num_prompts: int | None = Field(default=None, ge=1)
    """The first so many rows; None: all."""
    answer_tag: str | None = Field(default=None, pattern=r"^[A-Za-z]\w*$")
    """The last <tag>...</tag> of a completion is its answer; None: all of it is."""

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.agent is None and self.reward is None:
            raise ValueError("reward is left out: give it, or agent")
        if self.agent is not None and (self.reward is not None or self.answer_tag is not None):
            raise ValueError("agent is given beside reward or answer_tag: it judges by itself")
        if self.agent is not None and self.environment is not None:
            raise ValueError("agent is given beside environment: a row is played by one of them")
        if self.agent is not None and not self.agent.gives_reward:
            raise ValueError(
                "agent.gives_reward is false, and nothing else judges what it plays: let it give "
                "the reward"
            )
        return self

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        if self.environment is not None:
            return self
        if self.max_model_len is not None:
            raise ValueError(
                f"max_model_len is {self.max_model_len} without environment, whose episodes it "
                "bounds: leave it out"
            )
        if any(isinstance(source, EnvironmentRewardSpec) for source in self.sources):
            raise ValueError(
                "reward is of type 'environment', and there is none: give environment, or another "
                "reward"
            )
        return self

    @property
    def sources(self) -> list[SingleRewardSpec]:
        """The sources of the reward; none where an agent judges."""
        return [] if self.reward is None else [one.source for one in named_sources(self.reward)]

    @property
    def has_model(self) -> bool:
        """Whether a model judges, which the process that scores has to load."""
        return any(isinstance(source, ClassifierRewardSpec) for source in self.sources)


class EvaluatedTaskSpec(RowsTaskSpec):
    """A task that is asked."""

    name: str = Field(pattern=TASK_NAME)
    """Of the task, in tables, files and metrics."""


class DrawingSpec(Spec):
    """How completions are drawn."""

    samples: int = Field(default=1, ge=1, le=4096)
    """Completions a prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0 takes the likeliest token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens with this probability together."""
    top_k: int | None = Field(default=None)
    """Draw from so many likeliest tokens; None: from all, and the field is not sent."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion, in tokens."""
    stop: tuple[StopText, ...] = Field(default=(), max_length=MOST_STOPS)
    """Texts that end a completion, beside the model's own end of a turn."""
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=MOST_STOPS)
    """The same by tokens."""
    seed: int = Field(default=0, ge=0, lt=2**53)
    """Each completion has a seed of its own, of this one, its task, its prompt and its number."""

    def sampling(self) -> SamplingSpec:
        """The same as a sampler knows it."""
        return SamplingSpec(
            temperature=self.temperature or 1.0,
            greedy=self.temperature == 0,
            top_p=self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            max_new_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )


class AskedSpec(Spec):
    """Who is asked."""

    url: str
    """Base URL of an OpenAI endpoint, e.g. "http://127.0.0.1:8000/v1"."""
    model: str | None = None
    """Name of the model there; None: the first that it lists."""
    key_variable: str | None = None
    """Environment variable that holds its key."""
    tokenizer: Path | None = None
    """Folder of the policy's tokenizer: prompts are then rendered here as a run renders them, and
    sent as token ids to /completions. None: messages are sent to /chat/completions."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Requests at once."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one answer, in seconds."""


class EvaluationQuestion(Spec):
    """What `rolemesh.services.evaluation` reads."""

    asked: AskedSpec
    drawing: DrawingSpec
    tasks: tuple[EvaluatedTaskSpec, ...] = Field(min_length=1)
    data_tokenizer: Path | None = None
    """Folder of the tokenizer that measures rows where their data bounds them; None: that of
    `asked`."""
