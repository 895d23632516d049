"""Section `store` of a recipe: where a run keeps its records."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolemesh.engine.specs import Names, Spec


class EmbeddedStoreSpec(Spec):
    """A Valkey server started with the run, keeping its data in the run's folder."""

    type: Literal["embedded"] = "embedded"


class RedisStoreSpec(Spec):
    """Any Redis or Valkey server."""

    type: Literal["redis"] = "redis"
    url: Annotated[str, Names("url")] = Field(pattern=r"^(redis|rediss|unix)://")
    """URL of the server, e.g. redis://127.0.0.1:6379/0."""


class MemoryStoreSpec(Spec):
    """Nothing outlives the process: for unit tests."""

    type: Literal["memory"] = "memory"


StoreSpec = Annotated[
    EmbeddedStoreSpec | RedisStoreSpec | MemoryStoreSpec, Field(discriminator="type")
]
