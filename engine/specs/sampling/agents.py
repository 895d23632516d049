"""Specs of agents: programs that own their loop, and ask the policy through a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import Names
from rolemesh.engine.specs.urls import check_token_is_safe, check_url
from rolemesh.engine.specs.variables import TokenVariable, VariableName


class AgentLimits(Spec):
    """What holds for the session of one trajectory, whatever runs in it."""

    max_turns: int = Field(default=16, ge=1)
    """Calls of the policy, at most; one more is refused with status 400."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy samples in all calls together, at most; None: only max_new_tokens of
    sampling bounds each call, and rollout.max_model_len the whole."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Most seconds that a trajectory may take; then it has failed."""
    at_once: int = Field(default=64, ge=1, le=4096)
    """Trajectories that run at the same time; further ones wait."""
    on_failure: Literal["fail", "retry", "drop_row", "drop_group"] = "fail"
    """What follows when the agent fails, takes too long, makes no call, or gives no reward where it
    has to. fail: the generation fails. retry: the trajectory begins again, `retries` times at most,
    and then the generation fails. drop_row: its rows are left out of the step. drop_group: those of
    all samples of its prompt are."""
    retries: int = Field(default=2, ge=1, le=100)
    """How often a trajectory begins again, with on_failure retry."""
    gives_reward: bool = True
    """Whether the agent gives the reward. False: the reward role judges what was said."""


class ConfinedAgentLimits(AgentLimits):
    """What holds besides for code of yours that the service runs, within a sandbox."""

    memory_mib: int | None = Field(default=4096, ge=64)
    """Address space of each process; None: no bound."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """What one trajectory may print; more ends its process."""
    variables: Annotated[tuple[VariableName, ...], Names("variable")] = ()
    """Further environment variables of the service that it sees, where its owner grants that."""
    readable: tuple[Path, ...] = ()
    """Files and folders of the service's host that it may read, where its owner grants that."""
    network: Annotated[bool, Names("network")] = False
    """Whether it may open connections to more than the endpoint, where the service's owner grants
    that."""


class ProgramAgentSpec(ConfinedAgentLimits):
    """A program, in a process of its own for each trajectory, within a sandbox.

    It finds in its environment OPENAI_BASE_URL, OPENAI_API_KEY, ROLEMESH_SESSION (a URL, to which
    it may post {"reward": x} as /end), ROLEMESH_MODEL, and ROLEMESH_TASK, the path of a JSON file
    with the row of the data. It ends with exit code 0. The last line that it prints may be a JSON
    object with `reward`, and `call_rewards` of single calls.
    """

    type: Literal["program"] = "program"
    command: Annotated[tuple[str, ...], Field(min_length=1), Names("command")]
    """Program and arguments. "python" is the interpreter of the service. What of them is a file
    must lie in a folder of code that the service's owner has granted."""


class PythonAgentSpec(ConfinedAgentLimits):
    """A function of yours, `async def run(task, client)`: many run in one process.

    `task` is the row of the data as a dict, and `client` an AsyncOpenAI of this trajectory's
    session, with `model` set by its caller to "policy" or whatever endpoint.model_name is. It
    returns the reward, or a dict with `reward` and `call_rewards`, or None.
    """

    type: Literal["python_agent"] = "python_agent"
    run: Annotated[str, Names("code")]
    """The function: "path/to/file.py:name" or "module:name", as the service's process finds it,
    where its owner grants that."""


class HttpAgentSpec(AgentLimits):
    """A server of agents: it is told where the policy answers, and calls it back.

    Each trajectory is a POST of {"task": row, "base_url": ..., "api_key": ..., "model": ...,
    "session": URL}. The answer, 200 with {"reward": x, "call_rewards": {...}}, comes when the
    trajectory is over; `reward` may be left out where gives_reward is false.
    """

    type: Literal["http"] = "http"
    url: Annotated[str, Names("url")]
    """Of the server, with the path that starts a trajectory."""
    token_variable: Annotated[TokenVariable | None, Names("variable")] = None
    """Environment variable of this service that holds the server's token, where the service's owner
    grants that; it is sent over TLS only, or to loopback."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        check_url(url, ("http", "https"))
        return url

    def model_post_init(self, context: object) -> None:
        """Refuses to send a token in clear."""
        if self.token_variable is not None:
            check_token_is_safe(self.url)


AgentSpec = ProgramAgentSpec | PythonAgentSpec | HttpAgentSpec
