"""Sources of rewards that are not ours: whom to ask, how, and what is done when they fail.

A source may be written as one text (`outside_source`); the long form has every number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import CODE_PATTERN, Names
from rolemesh.engine.specs.own_functions import python_form
from rolemesh.engine.specs.urls import as_tuple, check_token_is_safe, check_url
from rolemesh.engine.specs.variables import TokenVariable, VariableName

FORMS = (
    "grpc://host:port, http://host/get_reward (OpenRLHF), http://host/verify (NeMo-Gym), "
    "python:module:function, python:path/to/file.py:function, or a mapping with a type"
)
"""What a source may be written as, for messages."""

_PLACE = re.compile(r"[\w./-]+")
"""A file or a module of a user."""


class FailSpec(Spec):
    """The step fails, with the reason; the run's state on disk stays as it is."""

    type: Literal["fail"] = "fail"


class DropGroupSpec(Spec):
    """All completions of the prompt are left out of the step, as if never sampled."""

    type: Literal["drop_group"] = "drop_group"


class GiveValueSpec(Spec):
    """The rows that could not be judged get a stated reward."""

    type: Literal["value"] = "value"
    value: float
    """Reward of a row for which no valid answer came, before the source's weight."""


FailurePolicySpec = Annotated[FailSpec | DropGroupSpec | GiveValueSpec, Field(discriminator="type")]
"""What becomes of rows whose reward could not be had after all tries."""


class OutsideRewardSpec(Spec):
    """What every outside source has."""

    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Stands in metrics, reward/<name>/...; None: the type."""
    batch_size: int = Field(default=16, ge=1)
    """Most rows of one request."""
    concurrency: int = Field(default=8, ge=1)
    """Most requests in flight at once, of each rank of the reward service."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Most seconds that one try may take."""
    minimum: float | None = None
    """A reward below is refused; None: any is taken."""
    maximum: float | None = None
    """A reward above is refused; None: any is taken."""
    on_failure: FailurePolicySpec = FailSpec()
    """What becomes of rows for which no valid answer came."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(
                f"minimum is {self.minimum} and maximum is {self.maximum}: give them the other "
                "way round"
            )
        return self


class EndpointRewardSpec(OutsideRewardSpec):
    """A source that is asked over the network. Asking twice must do no harm."""

    urls: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1), Names("url")]
    """Where it answers; several: replicas, of which the least busy is asked."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Most seconds that a request may take with all its tries: so long a run waits for a reward
    that is gone."""
    max_response_bytes: int = Field(default=16 * 2**20, ge=1)
    """An answer that is longer is refused, and not read further."""
    cache_rows: int = Field(default=0, ge=0)
    """Rewards remembered by all that is sent of a row, oldest use forgotten first; 0: none. Right
    only for a judge that gives the same row the same reward."""
    tries: int | None = Field(default=None, ge=1)
    """Times that a request is sent at most, while what fails may pass: no connection, no answer in
    time, 408, 429 or 5xx (gRPC: UNAVAILABLE); None: as often as fits into deadline_s."""
    hedge_after_s: float | None = Field(default=None, gt=0)
    """Send a second request when the first has no answer by then, and take what comes first;
    None: never."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row after which a replica is left alone."""
    breaker_pause_s: float = Field(default=5.0, gt=0)
    """Seconds until one request tries that replica again."""
    token_variable: Annotated[TokenVariable | None, Names("variable")] = None
    """Environment variable of the reward service that holds a bearer token, where its owner grants
    that; None: no token. Its name ends with TOKEN or KEY, and it is sent over TLS only, or to
    loopback."""

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for url in self.urls:
            check_url(url, self.schemes())
            if self.token_variable is not None:
                check_token_is_safe(url)
        return self

    @classmethod
    def schemes(cls) -> tuple[str, ...]:
        """Schemes that a URL of this source may have."""
        return ("http", "https")


# --- members ----------------------------------------------------------------------------------


class OpenRlhfRewardSpec(EndpointRewardSpec):
    """A server of OpenRLHF's remote reward form: POST {query, prompts, labels} -> {rewards}."""

    type: Literal["openrlhf"] = "openrlhf"
    tokenizer: Annotated[str | None, Names("path")] = None
    """Folder of the policy's tokenizer: `query` then has special tokens, as OpenRLHF sends it.
    None: it is prompt and completion as text."""


class SlimeRewardSpec(EndpointRewardSpec):
    """A server of slime's remote_rm form: POST {prompt, response, label} of one row -> a number."""

    type: Literal["slime"] = "slime"
    batch_size: Literal[1] = 1
    """The form takes one row a request."""
    reward_key: str | None = None
    """Which value of an answered mapping is the reward; None: "score", or the answer is a bare
    number."""


class NemoGymRewardSpec(EndpointRewardSpec):
    """A NeMo-Gym resources server: POST /verify of one row -> {reward}."""

    type: Literal["nemo_gym"] = "nemo_gym"
    batch_size: Literal[1] = 1
    """The form takes one row a request."""
    seeds_session: bool = False
    """POST /seed_session beside /verify before each row, and send its cookies along."""


class JudgeRewardSpec(EndpointRewardSpec):
    """A language model behind an OpenAI-compatible chat endpoint that grades by a rubric.

    Its answer is text, of which a number is read and nothing is ever run.
    """

    type: Literal["openai_judge"] = "openai_judge"
    batch_size: Literal[1] = 1
    """One row a request: a grade must not depend on the row's neighbours."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint knows it."""
    rubric: str = Field(min_length=1)
    """What earns which score, in words. {prompt}, {completion} and {answer} stand for the row's; a
    rubric without {completion} gets prompt and completion appended."""
    minimum: float = 0.0
    """Lowest score that the rubric gives; below is refused."""
    maximum: float = 10.0
    """Highest score that the rubric gives; above is refused. The reward is (score - minimum) /
    (maximum - minimum), 0 to 1."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of the model's answer."""
    seed: int = 0
    """Sent along, with temperature 0."""

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.minimum >= self.maximum:
            raise ValueError(
                f"minimum and maximum are both {self.minimum}: the score needs room between them"
            )
        return self


class GrpcRewardSpec(EndpointRewardSpec):
    """A server of rolemesh.v1.RewardService, which may leave every other service alone."""

    type: Literal["grpc"] = "grpc"

    @classmethod
    def schemes(cls) -> tuple[str, ...]:
        """Without TLS (grpc) and with it (grpcs)."""
        return ("grpc", "grpcs")


class KServeRewardSpec(EndpointRewardSpec):
    """A model behind the open inference protocol, version 2: ModelInfer over gRPC or HTTP.

    Texts go as BYTES tensors of shape [rows]; the reward is a tensor with one number a row.
    """

    type: Literal["kserve"] = "kserve"
    model: str = Field(min_length=1)
    """Name of the model at the server."""
    version: str = ""
    """Version of the model; empty: the server chooses."""
    prompt_input: str | None = "prompt"
    """Input tensor that takes prompts; None: prompts are not sent."""
    completion_input: str = "completion"
    """Input tensor that takes completions."""
    answer_input: str | None = None
    """Input tensor that takes expected answers; None: they are not sent."""
    output: str = "reward"
    """Output tensor that is the reward."""
    sends_column: bool = False
    """Input tensors have the shape [rows, 1], as Triton's models with a batch dimension take."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        named = [self.prompt_input, self.completion_input, self.answer_input]
        given = [name for name in named if name is not None]
        if len(set(given)) < len(given):
            raise ValueError(
                f"prompt_input, completion_input and answer_input are {named}: give each tensor a "
                "name of its own"
            )
        return self

    @classmethod
    def schemes(cls) -> tuple[str, ...]:
        """Either of gRPC and HTTP, with TLS or without."""
        return ("grpc", "grpcs", "http", "https")


class PythonRewardSpec(OutsideRewardSpec):
    """A function of the user's, in worker processes of their own with bounds on what they use.

    It runs in the sandbox that the host has, where the owner of the service grants it. What the
    policy writes is handed to it as text and never run.
    """

    type: Literal["python"] = "python"
    function: Annotated[str, Names("code")] = Field(pattern=CODE_PATTERN)
    """"path/to/file.py:name", "module:name" or an entry point, as the reward service finds it."""
    form: Literal["auto", "trl", "openrlhf", "verl"] = "auto"
    """How it is called; "auto" looks at the names of its parameters."""
    batch_size: int = Field(default=1024, ge=1)
    """Most rows of one call. A function that compares completions has to see them together."""
    concurrency: int = Field(default=1, ge=1)
    """Worker processes, of each rank of the reward service; each makes one call at a time."""
    memory_mib: int | None = Field(default=4096, ge=64)
    """Address space of a worker; None: no bound, as a function on a GPU needs."""
    cpu_s: float | None = Field(default=None, gt=0)
    """Processor time of one call, all threads together; None: as many seconds as timeout_s."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """What one call may print; more ends it."""
    environment: Annotated[tuple[VariableName, ...], Names("variable")] = ()
    """Further environment variables of the service that its workers get, e.g. a token's, where its
    owner grants that. Others, and so passwords, are kept from them, but for the usual ones such as
    PATH."""
    readable: tuple[Path, ...] = ()
    """Files and folders of the service's host that the function may read, beside Python modules
    that it can import, where the service's owner grants that."""
    network: Annotated[bool, Names("network")] = False
    """Whether the function may open connections, where the service's owner grants that."""


# --- the union ----------------------------------------------------------------------------

AnyOutsideRewardSpec = (
    OpenRlhfRewardSpec
    | SlimeRewardSpec
    | NemoGymRewardSpec
    | JudgeRewardSpec
    | GrpcRewardSpec
    | KServeRewardSpec
    | PythonRewardSpec
)
"""Every outside source; `RewardSourceSpec` has them beside ours."""


def outside_source(text: str) -> dict[str, Any]:
    """The long form of a source that is written as one text.

    Example: "http://h:5000/get_reward" is {"type": "openrlhf", "urls": ["http://h:5000/get_reward"]}.

    Raises:
        ValueError: It is none of the forms.
    """
    python = python_form(text)
    if python is not None:
        return python
    scheme, _, rest = text.partition("://")
    if scheme in ("grpc", "grpcs") and rest:
        return {"type": "grpc", "urls": [text]}
    if scheme in ("http", "https") and rest:
        is_verify = urlsplit(text).path.rstrip("/").endswith("/verify")
        return {"type": "nemo_gym" if is_verify else "openrlhf", "urls": [text]}
    raise ValueError(f"{text!r} is no source of rewards{_near(text)}: give {FORMS}")


def _near(text: str) -> str:
    """The form that a text is probably meant to have, as a question; empty where none is near."""
    place, _, name = text.removeprefix("python:").partition(":")
    if not _PLACE.fullmatch(place) or (name and not name.isidentifier()):
        return ""
    if not name and not place.endswith(".py"):
        return ""
    file = place if place.endswith(".py") else f"{place}.py"
    return f" (did you mean python:{file}:{name or 'FUNCTION'}?)"
