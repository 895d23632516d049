"""The endpoint of a service that samples: where programs ask the policy over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import Names
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.engine.specs.variables import TokenVariable


class EndpointSpec(Spec):
    """OpenAI's protocol, and tokens in and out, over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs a certificate and a
    token_variable."""
    port: int = Field(default=0, ge=0, lt=2**16)
    """Port to listen on; 0 takes a free one, which the service logs and tells the run."""
    certificate: Path | None = None
    """PEM file, readable by its owner alone, with a key and the certificate that clients are shown;
    None: they are talked to in clear, which only loopback may be."""
    token_variable: Annotated[TokenVariable | None, Names("variable")] = None
    """Environment variable of this service that holds the key of the endpoint, where the service's
    owner grants that; its name ends with TOKEN or KEY. With that key a client may sample and open
    sessions; with a session's own key it may use that session. None: who reaches the port may
    sample and open sessions."""
    model_name: str = Field(default="policy", min_length=1, max_length=256)
    """What clients call the model."""
    tool_parser: str | None = None
    """vLLM's parser of the tool calls that the model writes, e.g. "hermes". None: by the model's
    family, or none where that is not known; then tool_choice can only be "none"."""
    reasoning_parser: str | None = None
    """vLLM's parser of what the model thinks before it answers, e.g. "qwen3"; None: all is answer.
    """
    chat_template: Path | None = None
    """Jinja file that renders messages; None: the template of the model's folder."""
    max_sessions: int = Field(default=10_000, ge=1)
    """Sessions that are remembered. Those that have ended make room, the oldest first; if all are
    open, no new one is opened."""
    max_memory_mib: int = Field(default=1024, ge=1)
    """Memory for calls of sessions; bounded likewise."""
    max_waiting_calls: int = Field(default=4096, ge=1)
    """Calls that are being sampled or wait for it; one more is refused with status 503."""
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    """Longest request."""

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        if is_loopback(self.host):
            return self
        lacking = [
            name for name in ("certificate", "token_variable") if getattr(self, name) is None
        ]
        if lacking:
            raise ValueError(
                f"host is {self.host}, which other machines can reach, without "
                f"{' and '.join(lacking)}: give both, or host 127.0.0.1"
            )
        return self
