"""Servers of vLLM that run elsewhere: who is asked, and for how long."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import Names
from rolemesh.engine.specs.urls import as_tuple, check_token_is_safe, check_url
from rolemesh.engine.specs.variables import TokenVariable


class ServersSpec(Spec):
    """What is said of servers, whatever they are asked for. Asking twice must do no harm."""

    urls: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1), Names("url")]
    """Of the servers, e.g. http://host:8000; all serve the same model. Requests go to the least
    busy one."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most requests of each rank that are in flight at one server."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Most seconds until the answer to a request is whole; of one that comes token by token, until
    the next token."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Most seconds for which a request is tried again: so long a run waits for servers that are
    gone."""
    breaker_failures: int = Field(default=3, ge=1)
    """Failures in a row after which a server is left alone."""
    breaker_pause_s: float = Field(default=5.0, gt=0)
    """Seconds until one request tries that server again."""
    token_variable: Annotated[TokenVariable | None, Names("variable")] = None
    """Environment variable of this service that holds the servers' --api-key, where the service's
    owner grants that; None: no key. Its name ends with TOKEN or KEY, and it is sent over TLS only,
    or to loopback."""

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for url in self.urls:
            check_url(url, ("http", "https"))
            if self.token_variable is not None:
                check_token_is_safe(url)
        plain = [url.rstrip("/") for url in self.urls]
        if len(set(plain)) < len(plain):
            raise ValueError(f"urls is {list(self.urls)}: give each server once")
        return self
