"""Specs of environments, which a policy talks to while it is sampled, turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import Names
from rolemesh.engine.specs.sampling.agents import AgentSpec
from rolemesh.engine.specs.variables import VariableName


class TurnLimits(Spec):
    """Bounds of an episode, besides those of sampling.

    `max_new_tokens` of sampling bounds the whole completion, what the environment says included.
    """

    max_turns: int = Field(default=4, ge=1)
    """Turns of the policy, at most."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one turn of the policy, at most. A turn that is cut there is not the last: the
    environment answers it. None: only the budget of the completion cuts a turn, and ends it."""
    max_observation_tokens: int = Field(default=64, ge=1)
    """Tokens of one observation, at most; a longer one keeps its first. Of messages, the tokens of
    their contents; what the chat template puts around them comes on top."""


class ReasoningGymEnvironmentSpec(Spec):
    """One turn, judged by the scorer of the reasoning-gym task that made the prompt, 0 to 1."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    max_turns: Literal[1] = 1
    """Always 1: a task asks once."""
    max_observation_tokens: Literal[0] = 0
    """Always 0: the task says nothing after the answer."""


class CalculatorEnvironmentSpec(TurnLimits):
    """A calculator to ask on the way: `<calc>12*7</calc>` is answered by `<result>84</result>`.

    A turn without a call is the last one. The reward is `exact` when the last number of that turn
    is the answer of the data, else 0.
    """

    type: Literal["calculator"] = "calculator"
    exact: float = 1.0
    """Reward of the right answer."""


class PythonEnvironmentSpec(TurnLimits):
    """An environment of your own: a subclass of rolemesh.engine.environments.base.Environment."""

    type: Literal["python"] = "python"
    environment: Annotated[str, Names("code")]
    """The class: "path/to/file.py:Name", "module:Name" or an entry point's name, as the service's
    process finds it, where its owner grants that."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Most seconds that one call of `reset` or `step` may take, and of `__init__` where the class
    runs in a process of its own; then the generation fails. A coroutine is cancelled; for another
    call that process is ended, and all calls in flight in it fail."""
    memory_mib: int | None = Field(default=4096, ge=64)
    """Address space of that process, which holds all instances of a rank; None: no bound, as a
    class on a GPU needs."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """What one call may print there; more ends it. While several are in flight, they may print as
    many times that together."""
    variables: Annotated[tuple[VariableName, ...], Names("variable")] = ()
    """Further environment variables of the service that the class sees, where its owner grants
    that."""
    readable: tuple[Path, ...] = ()
    """Files and folders of the service's host that the class may read, beside Python modules that
    it can import, where the service's owner grants that."""
    network: Annotated[bool, Names("network")] = False
    """Whether the class may open connections, where the service's owner grants that."""


TurnEnvironmentSpec = (
    ReasoningGymEnvironmentSpec | CalculatorEnvironmentSpec | PythonEnvironmentSpec
)
"""Environments that answer the policy's turns, which the sampler asks for."""

EnvironmentSpec = Annotated[TurnEnvironmentSpec | AgentSpec, Field(discriminator="type")]
