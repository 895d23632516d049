"""Runs over fakes whose services of one role register, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, hold_call, until
from support.fake_runs import Recorder, make_run, read_lines

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.attempts import changing
from rolemesh.coordinator.run.attempts.changing import SERVICES_OPERATION
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.services import registered
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import RunState

MESH = "m"
STEPS = 6
SYNC = {"type": "sync", "batch_size": 2}
LEASE_S = 1.0
METHODS = {
    "rollout": "Generate",
    "reward": "ComputeReward",
    "reference": "ComputeLogprobs",
}
"""What a service of each role is asked for in each step."""


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for services often, since steps of fakes are short."""
    monkeypatch.setattr(changing, "LOOK_S", 0.01)
    monkeypatch.setattr(changing, "ABSENT_S", 0.2)
    monkeypatch.setattr(registered, "LOOK_S", 0.01)


def mesh_roles(role: str) -> tuple[str, ...]:
    """Roles of a mesh in which services of this role change."""
    return (*PPO_ROLES, "rollout") if role == "rollout" else PPO_ROLES


def changing_recipe(
    role: str = "rollout", sampler: dict[str, Any] = SYNC, **services: Any
) -> Recipe:
    """One whose role may have one to three services."""
    roles = mesh_roles(role)
    values = fake_recipe(
        roles=roles,
        pools=split_pools(roles),
        prompts_per_step=6,
        steps=STEPS,
        recovery={"attempts": 3, "pause_s": 0.0, "wait_s": 20.0},
        evaluation={"num_prompts": 4},
    ).model_dump(mode="json")
    own = {"registers": True, "replicas": 1, "most_replicas": 3, **services}
    values |= {"certificates": "/certs", "services": {role: own}}
    values["schedule"] = {"sampler": sampler}
    return Recipe.model_validate(values)


class Scene:
    """A run over fakes, and a store in which the services of a role register."""

    def __init__(self, mesh: FakeMesh, directory: Path, sampler: dict[str, Any], role: str) -> None:
        self.mesh = mesh
        self.role = role
        self.directory = directory
        self.store = MemoryStateStore()
        self.recorder = Recorder()
        self.recipe = changing_recipe(role, sampler)
        found = RegisteredServices(self.store, MESH, self.recipe)
        self.run: TrainingRun = make_run(
            mesh, directory, self.recipe, self.store, registered=found, observer=self.recorder
        )
        self.run._lost.addresses = {
            name: fake.address
            for name, fake in mesh.roles.items()
            if fake.role != role or name == f"{role}-0"
        }
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()

    def register(self, service: str, process: str = "a") -> None:
        """Keeps a service in the registry."""
        self._leaving.discard(service)
        self._kept[service] = asyncio.create_task(self._keep(service, process))

    def drain(self, service: str) -> None:
        self._leaving.add(service)

    def unregister(self, service: str) -> None:
        """Renews its lease no more."""
        self._kept.pop(service).cancel()

    async def _keep(self, service: str, process: str) -> None:
        while True:
            one = Registration(
                mesh=MESH,
                role=self.role,
                number=int(service[-1]),
                address=self.mesh.roles[service].address,
                incarnation=process * 32,
                is_leaving=service in self._leaving,
            )
            await self.store.enter(one, LEASE_S)
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def during(self, service: str, method: str, step: int) -> AsyncIterator[None]:
        """Holds a call of a service in a step until the end of the block."""
        gate = await hold_call(self.mesh, service, method, step)
        try:
            yield
        finally:
            gate.set()
            self.mesh.roles[service].gates.pop(method, None)

    async def told(self, text: str) -> None:
        await until(lambda: any(text in event for event in self.recorder.events))

    def answered(self, service: str) -> list[int]:
        """Steps of training in which the service has answered."""
        name = f"{self.role}.{METHODS[self.role]}"
        calls = [call for call in self.mesh.of(name) if call.service == service]
        return sorted({call.step for call in calls if call.state == "done"})

    @property
    def numbers(self) -> list[float]:
        """Services that each step began with."""
        records = read_lines(self.directory / "metrics.jsonl")
        return [record[f"services/{self.role}"] for record in records]

    async def journal(self) -> list[tuple[int, list[str], list[str], list[str]]]:
        """Step, who joined before it, who had left, and who is there."""
        entries = await self.store.read_journal(self.run.run_id)
        return [
            (
                entry.step,
                list(entry.result["joined"]),
                sorted(entry.result["left"]),
                list(entry.result["services"][self.role]),
            )
            for entry in entries
            if entry.operation == SERVICES_OPERATION
        ]

    async def loaded(self, service: str) -> None:
        await until(lambda: f"{service}.Initialize ends" in self.mesh.log)


@contextlib.asynccontextmanager
async def scene(
    directory: Path, sampler: dict[str, Any] = SYNC, role: str = "rollout"
) -> AsyncIterator[Scene]:
    """A mesh in which one service of the role has registered, of three that could."""
    async with fake_mesh(mesh_roles(role), replicas=3, of=role, has_cuts=True) as mesh:
        made = Scene(mesh, directory, sampler, role)
        made.register(f"{role}-0")
        yield made
        for task in made._kept.values():
            task.cancel()


def learnt(directory: Path) -> list[dict[str, float]]:
    """What a run of all steps has learnt."""
    names = ("step", "kl/mean", "reward/mean", "held_out/score", "completion_length/mean")
    records = read_lines(directory / "metrics.jsonl")
    assert len(records) == STEPS
    return [{name: record[name] for name in names if name in record} for record in records]


async def undisturbed(
    directory: Path, sampler: dict[str, Any] = SYNC, role: str = "rollout"
) -> list[dict[str, float]]:
    """The same of a run with one service."""
    async with scene(directory, sampler, role) as alone:
        await alone.run.execute()
        assert alone.numbers == [1.0] * STEPS
        assert await alone.journal() == []
    return learnt(directory)


def check_went_on(made: Scene, summary: RunSummary, *, deaths: int = 0) -> None:
    """One attempt made all steps; only deaths are recoveries."""
    assert summary.state is RunState.SUCCEEDED
    assert made.mesh.roles["actor"].weight == expected_weight(STEPS)
    assert {call.key[1] for call in made.mesh.calls} == {1}
    assert [one.restarted for one in summary.recoveries] == [()] * deaths


async def leaves_within_a_step(
    directory: Path,
    service: str,
    method: str,
    way: str,
    sampler: dict[str, Any] = SYNC,
    role: str = "rollout",
) -> Scene:
    """A run in which the role's second service leaves while a call of the fourth step is made.

    Others make what it has not made, and the run learns what one that is left alone learns.

    Args:
        directory: For all files.
        service: Whose call is made then.
        method: The call.
        way: How it leaves: "drains", "lease ends" or "dies".
        sampler: Of the recipe.
        role: Whose service leaves.
    """
    second = f"{role}-1"
    async with scene(directory, sampler, role) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(second)
            await made.loaded(second)
        async with made.during(service, method, 4):
            if way == "drains":
                made.drain(second)
            else:
                made.unregister(second)
            if way == "dies":
                await made.mesh.roles[second].stop()
            await made.told(f"{second} leaves in step 4")
            await made.mesh.roles[second].stop()
        summary = await task
        # A process that dies may be missed by its lease or by its connection first.
        check_went_on(made, summary, deaths=len(summary.recoveries))
        assert len(summary.recoveries) <= (way == "dies")
        assert made.numbers == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    assert learnt(directory) == await undisturbed(directory / "undisturbed", sampler, role)
    return made
