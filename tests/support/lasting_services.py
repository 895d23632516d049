"""Services that outlive a run, so that many runs of the real coordinator take turns over them."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from support.mesh_runs import tiny_recipe
from support.services import serving

from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.services.runtime.calls.role import Role

P = ParamSpec("P")
T = TypeVar("T")

CHANGING = ("time/", "memory/", "coordinator/", "experience/", "dataflow/", "tokens_per_second")
"""Beginnings of the names of metrics that say how a step went, not what came out. So do those that
end in "_bytes"."""


@dataclass(frozen=True)
class MadeRun:
    """What a run left behind."""

    directory: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """Metrics of each step, all of them."""
        return _lines(self.directory / "metrics.jsonl")

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Metrics of each step that follow from recipe and seed."""
        return [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(CHANGING) and not name.endswith("_bytes")
            }
            for record in self.records
        ]

    @property
    def graphs(self) -> list[list[dict[str, Any]]]:
        """Nodes of each step."""
        return [graph["nodes"] for graph in _lines(self.directory / "dataflow.jsonl")]

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of each file of weights and optimizer state, and of the exported model."""
        newest = sorted((self.directory / "checkpoints").iterdir())[-1]
        files = [*newest.rglob("*.safetensors"), *(self.directory / "model").glob("*.safetensors")]
        hashes = {
            str(file.relative_to(self.directory)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in files
            # Roles of one process share a generator, which no result here depends on.
            if not file.name.startswith("random-")
        }
        assert len(hashes) >= 3, sorted(hashes)
        return hashes


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class LastingServices:
    """A service of each role, initialised anew by each run."""

    def __init__(self, addresses: dict[str, str], model: Path, folder: Path) -> None:
        self.addresses = addresses
        self.model = model
        self.folder = folder
        self._num_runs = 0

    def recipe(self, **changes: Any) -> Recipe:
        """A tiny recipe over these services; `changes` are dotted paths with "__".

        Where a pool has the rollout role, there is one, with the actor's data and back end.
        """
        values = tiny_recipe(self.model, **changes)
        if any("rollout" in pool["roles"] for pool in values.get("pools", {}).values()):
            actor = values["actor"]
            values["rollout"] = {
                "model": {"path": str(self.model)},
                **{name: actor[name] for name in ("rollout", "data")},
            }
        values["services"] = {
            role: {"address": address}
            for role, address in self.addresses.items()
            if kind_of(role) in values
        }
        values["store"] = {"type": "memory"}
        return Recipe.model_validate(values)

    async def train(self, recipe: Recipe) -> MadeRun:
        """Makes a run from beginning to end, with a coordinator of its own on this loop."""
        self._num_runs += 1
        directory = self.folder / f"run-{self._num_runs}"
        run = TrainingRun(
            recipe, directory=directory, addresses=self.addresses, store=MemoryStateStore()
        )
        await run.execute()
        return MadeRun(directory)


def _in_turn(turn: threading.Lock, work: Callable[P, T]) -> Callable[P, T]:
    """One at a time: transformers cannot load two models at once in one process."""

    @functools.wraps(work)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with turn:
            return work(*args, **kwargs)

    return locked


@asynccontextmanager
async def lasting_services(
    roles: Sequence[Role] | Mapping[str, Role], model: Path, folder: Path
) -> AsyncIterator[LastingServices]:
    """Serves the roles on the test's own loop, each with a compute thread of its own.

    By their names in recipes, where these are not those of their kinds.
    """
    if not isinstance(roles, Mapping):
        roles = {role.name: role for role in roles}
    turn = threading.Lock()
    for role in roles.values():
        role.initialize = _in_turn(turn, role.initialize)  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        addresses = {
            name: (await stack.enter_async_context(serving(role))).runtime.address
            for name, role in roles.items()
        }
        yield LastingServices(addresses, model, folder)
