"""Doors of a coordinator over a run that goes on, and certificates of the mesh that it is in."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.fake_run import fill_store

from rolemesh.coordinator.api.credentials import TOKEN_FILE
from rolemesh.coordinator.api.doors.doors import Doors, open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.sdk import AsyncClient, RetryPolicy
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.members.identity import Identity

QUICK = RetryPolicy(budget_s=0)
TOKEN = "s3cret"
GIVEN = {"ROLEMESH_API_TOKEN": TOKEN}
RUN = "live"


@contextlib.asynccontextmanager
async def doors(
    folder: Path,
    *,
    given: dict[str, str] | None = None,
    certificates: Path | None = None,
    is_external: bool = False,
    **api: Any,
) -> AsyncIterator[Doors]:
    """Opens doors with these settings, and with variables in `given` for its environment.

    The run behind them is one that a client drives, if it is external.
    """
    store = MemoryStateStore()
    await fill_store(store, RUN, folder / RUN, num_steps=2, is_live=True)
    if is_external:
        await store.update_run(RUN, algorithm="external", state=RunState.RUNNING)
    async with open_doors(
        StoreOperations(store),
        ApiSpec.model_validate(api),
        folder=folder,
        certificates=certificates,
        environment=given or {},
    ) as opened:
        yield opened


async def asked(doors: Doors, **settings: Any) -> str:
    """The run's id, as a client of the SDK gets it."""
    async with AsyncClient(doors.address, retry=QUICK, **settings) as client:
        return (await client.get_run(RUN)).run_id


def made_token(folder: Path) -> str:
    """The token that was made in a folder."""
    return (folder / TOKEN_FILE).read_text().strip()


def bearer(token: str) -> dict[str, str]:
    """The header with a token."""
    return {"authorization": f"Bearer {token}"}


def written(identity: Identity, place: Path) -> Path:
    """Writes an identity as `rolemesh certs` does."""
    place.touch(mode=0o600)
    place.write_bytes(identity.pem())
    return place
