"""Section `store` of a recipe: where a run keeps its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qs

from pydantic import AfterValidator, Field

from rolemesh.engine.specs import Names, Spec
from rolemesh.engine.specs.urls import masked_url


class EmbeddedStoreSpec(Spec):
    """A Valkey server started with the run, keeping its data in the run's folder."""

    type: Literal["embedded"] = "embedded"


def _without_password(url: str) -> str:
    # Not by urlsplit, which does not find the password of every URL that is wrong.
    place, _, parameters = url.partition("?")
    user = place.partition("//")[2].rpartition("@")[0]
    if ":" in user or "@" in parameters or "password" in parse_qs(parameters):
        raise ValueError(
            f"{masked_url(url)!r} has a password, which would stand in files and in the list of "
            "processes: write it into a file that you alone may read, and name that in "
            "password_file (--store-password-file)"
        )
    return url


class RedisStoreSpec(Spec):
    """Any Redis or Valkey server."""

    type: Literal["redis"] = "redis"
    url: Annotated[
        str,
        Field(pattern=r"^(redis|rediss|unix)://"),
        AfterValidator(_without_password),
        Names("url"),
    ]
    """URL of the server, e.g. redis://127.0.0.1:6379/0."""
    password_file: Path | None = None
    """File that holds the password of the server, or of the user that the URL names
    (redis://USER@HOST:6379/0); None: it asks for none."""


class MemoryStoreSpec(Spec):
    """Nothing outlives the process: for unit tests."""

    type: Literal["memory"] = "memory"


StoreSpec = Annotated[
    EmbeddedStoreSpec | RedisStoreSpec | MemoryStoreSpec, Field(discriminator="type")
]
