"""Opens the store that a recipe names, and closes it again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from redis.exceptions import RedisError

from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, RedisStoreSpec, StoreSpec
from rolemesh.coordinator.state.errors import StoreRefusedError
from rolemesh.coordinator.state.files import read_secret
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.store import StateStore
from rolemesh.engine.specs.urls import masked_url


@asynccontextmanager
async def open_store(
    spec: StoreSpec, directory: Path, *, on_restart: Callable[[str], None] | None = None
) -> AsyncIterator[StateStore]:
    """Opens the store and checks that it answers. An embedded server ends with the block.

    Args:
        spec: Section `store` of the recipe.
        directory: Folder of the run; an embedded server keeps its data in its subfolder store.
        on_restart: Is told when an embedded server ended unasked, and what became of it.

    Raises:
        ValueError: The URL or the password's file cannot be read, or the server refuses its user,
            password or database.
        StoreUnavailableError: No server answers at the URL.
        EmbeddedStoreError: The embedded server does not start.
    """
    if isinstance(spec, EmbeddedStoreSpec):
        async with (
            EmbeddedValkey(directory / "store", on_restart=on_restart) as server,
            _redis(server.url) as store,
        ):
            yield store
    elif isinstance(spec, RedisStoreSpec):
        password = (
            None
            if spec.password_file is None
            else read_secret(spec.password_file, "store.password_file")
        )
        async with _redis(spec.url, password) as store:
            yield store
    else:
        yield MemoryStateStore()


@asynccontextmanager
async def _redis(url: str, password: str | None = None) -> AsyncIterator[RedisStateStore]:
    store = RedisStateStore(url, password=password)
    try:
        try:
            await store.ping()
        except (StoreRefusedError, RedisError, TypeError) as refused:
            error = refused.__cause__ or refused
            # TypeError: a parameter of the URL that the client does not know.
            raise ValueError(
                f"store.url is {masked_url(url)!r}, which cannot be used "
                f"({type(error).__name__}: {error}): correct number, parameters, user and "
                "password_file"
            ) from refused
        yield store
    finally:
        await store.close()
