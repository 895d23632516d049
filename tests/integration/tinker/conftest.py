"""A server for each file of the folder, as its WORLD says, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.tinker_servers import (
    ANN,
    BOB,
    Logprobs,
    TinkerClient,
    TinkerWorld,
    owners_app,
    tinker_world,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TinkerWorld]:
    wanted = getattr(request.module, "WORLD", {})
    async with tinker_world(tmp_path_factory.mktemp("tinker"), **wanted) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: TinkerWorld) -> AsyncIterator[TinkerClient]:
    """Of a server without keys."""
    async with world.client() as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def ann(world: TinkerWorld) -> AsyncIterator[TinkerClient]:
    async with world.client(owners_app(world), ANN) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def bob(world: TinkerWorld) -> AsyncIterator[TinkerClient]:
    async with world.client(owners_app(world), BOB) as client:
        yield client


@pytest.fixture(scope="module")
def base(world: TinkerWorld) -> Logprobs:
    return world.base_logprobs()
