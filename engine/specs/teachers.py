"""A teacher that vLLM servers hold: who is asked, and what becomes of rows without an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rolemesh.engine.specs.outside_rewards import DropGroupSpec, FailSpec
from rolemesh.engine.specs.servers import ServersSpec


class TeacherServerSpec(ServersSpec):
    """Servers of vLLM that score the policy's tokens; asked by token ids, at /v1/completions.

    They give log-probs at temperature 1 alone. `vllm serve --max-logprobs` bounds how many of the
    likeliest tokens they tell.
    """

    model: str = Field(min_length=1)
    """Name of the teacher at the servers, of a model or of an adapter."""
    policy_folder: Path | None = None
    """Folder of the policy's model, of which config and tokenizer are read: the servers' tokens are
    held against these. None: the actor's model.path where a run starts both services itself;
    otherwise nothing is compared."""
    on_failure: Annotated[FailSpec | DropGroupSpec, Field(discriminator="type")] = FailSpec()
    """What becomes of rows that could not be scored."""

    @property
    def may_drop(self) -> bool:
        """Whether rows may come without scores, to be left out of the step."""
        return isinstance(self.on_failure, DropGroupSpec)
