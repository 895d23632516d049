"""Rollout services that join a run and leave it, while its steps go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, until
from support.fake_runs import Recorder, make_run, read_lines

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run import changing, registered
from rolemesh.coordinator.run.changing import SERVICES_OPERATION
from rolemesh.coordinator.run.registered import RegisteredServices
from rolemesh.coordinator.run.summary import RunSummary
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import PreconditionError

ROLES = (*PPO_ROLES, "rollout")
MESH = "m"
STEPS = 6
SYNC = {"type": "sync", "batch_size": 2}
BLOCKS = {"type": "sync", "batch_size": 2, "block_rows": 2}
FIRST, SECOND, THIRD = (f"rollout-{number}" for number in range(3))
LEASE_S = 1.0


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "LOOK_S", 0.01)
    monkeypatch.setattr(changing, "ABSENT_S", 0.2)
    monkeypatch.setattr(registered, "LOOK_S", 0.01)


def recipe(sampler: dict[str, Any] = SYNC, **services: Any) -> Recipe:
    rollout = {"registers": True, "replicas": 1, "most_replicas": 3, **services}
    values = fake_recipe(
        roles=ROLES,
        pools=split_pools(ROLES),
        prompts_per_step=6,
        steps=STEPS,
        recovery={"attempts": 3, "pause_s": 0.0, "wait_s": 20.0},
        evaluation={"num_prompts": 4},
    ).model_dump(mode="json")
    values |= {"certificates": "/certs", "services": {"rollout": rollout}}
    values["schedule"] = {"sampler": sampler}
    return Recipe.model_validate(values)


class Scene:
    """A run over fakes, and a store in which rollout services register."""

    def __init__(self, mesh: FakeMesh, directory: Path, sampler: dict[str, Any] = SYNC) -> None:
        self.mesh = mesh
        self.directory = directory
        self.store = MemoryStateStore()
        self.recorder = Recorder()
        self.recipe = recipe(sampler)
        found = RegisteredServices(self.store, MESH, self.recipe)
        self.run: TrainingRun = make_run(
            mesh, directory, self.recipe, self.store, registered=found, observer=self.recorder
        )
        self.run._lost.addresses = {
            name: fake.address
            for name, fake in mesh.roles.items()
            if fake.role != "rollout" or name == FIRST
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
                role="rollout",
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
        fake = self.mesh.roles[service]
        gate = fake.gates.setdefault(method, asyncio.Event())

        def is_there() -> bool:
            return any(
                call.name == f"{service}.{method}" and call.step == step and call.state == "running"
                for call in self.mesh.calls
            )

        while not is_there():
            # Calls of earlier steps go on.
            gate.set()
            await asyncio.sleep(0)
            if not is_there():
                gate.clear()
                await asyncio.sleep(0.002)
        gate.clear()
        assert is_there(), "the call was made while the test looked away"
        try:
            yield
        finally:
            gate.set()
            fake.gates.pop(method, None)

    async def told(self, text: str) -> None:
        await until(lambda: any(text in event for event in self.recorder.events))

    def sampled(self, service: str) -> list[int]:
        """Steps of training in which the service has answered."""
        calls = [call for call in self.mesh.of("rollout.Generate") if call.service == service]
        return sorted({call.step for call in calls if call.state == "done"})

    @property
    def numbers(self) -> list[float]:
        """Services that each step began with."""
        records = read_lines(self.directory / "metrics.jsonl")
        return [record["services/rollout"] for record in records]

    async def journal(self) -> list[tuple[int, list[str], list[str], list[str]]]:
        """Step, who joined before it, who had left, and who is there."""
        entries = await self.store.read_journal(self.run.run_id)
        return [
            (
                entry.step,
                list(entry.result["joined"]),
                sorted(entry.result["left"]),
                list(entry.result["services"]["rollout"]),
            )
            for entry in entries
            if entry.operation == SERVICES_OPERATION
        ]

    async def loaded(self, service: str) -> None:
        await until(lambda: f"{service}.Initialize ends" in self.mesh.log)


@contextlib.asynccontextmanager
async def scene(directory: Path, sampler: dict[str, Any] = SYNC) -> AsyncIterator[Scene]:
    async with fake_mesh(ROLES, replicas=3, has_cuts=True) as mesh:
        made = Scene(mesh, directory, sampler)
        made.register(FIRST)
        yield made
        for task in made._kept.values():
            task.cancel()


def learnt(directory: Path) -> list[dict[str, float]]:
    names = ("step", "kl/mean", "score", "eval/score", "completion_length/mean")
    records = read_lines(directory / "metrics.jsonl")
    assert len(records) == STEPS
    return [{name: record[name] for name in names if name in record} for record in records]


async def undisturbed(directory: Path, sampler: dict[str, Any] = SYNC) -> list[dict[str, float]]:
    async with scene(directory, sampler) as alone:
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


async def test_a_service_joins_and_leaves_between_steps_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during("actor", "Update", 4):
            made.drain(SECOND)
            await made.told(f"{SECOND} leaves in step 4: it drains")
        check_went_on(made, await task)
        assert made.numbers == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
        assert made.sampled(SECOND) == [3, 4]
        assert await made.journal() == [
            (3, [SECOND], [], [FIRST, SECOND]),
            (5, [], [SECOND], [FIRST]),
        ]
        await made.told(f"{SECOND} at {made.mesh.roles[SECOND].address} joins: it takes part from")
        record = await made.store.get_run(made.run.run_id)
        assert [name for name in record.services if "rollout" in name] == [FIRST]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


def repeats() -> list[Any]:
    """Calls during which the service leaves, and how; one for each of them is not slow."""
    # The updates read the tokens, some of which lie on the service that leaves.
    calls = [(SECOND, "UpdateWeights"), (SECOND, "Generate"), ("actor", "ComputeAdvantages")]
    fast = [("Generate", BLOCKS, "drains"), ("ComputeAdvantages", BLOCKS, "dies")]
    fast.append(("UpdateWeights", SYNC, "lease ends"))
    return [
        pytest.param(
            *(service, method, sampler, way),
            marks=() if (method, sampler, way) in fast else pytest.mark.slow,
        )
        for service, method in calls
        for sampler in (SYNC, BLOCKS)
        for way in ("drains", "lease ends", "dies")
    ]


@pytest.mark.parametrize(("service", "method", "sampler", "way"), repeats())
async def test_others_make_what_a_service_that_leaves_within_a_step_has_not_made(
    service: str, method: str, sampler: dict[str, Any], way: str, tmp_path: Path
) -> None:
    async with scene(tmp_path, sampler) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during(service, method, 4):
            if way == "drains":
                made.drain(SECOND)
            elif way == "lease ends":
                made.unregister(SECOND)
            else:
                made.unregister(SECOND)
                await made.mesh.roles[SECOND].stop()
            await made.told(f"{SECOND} leaves in step 4")
            await made.mesh.roles[SECOND].stop()
        summary = await task
        # A process that dies may be missed by its lease or by its connection first.
        check_went_on(made, summary, deaths=len(summary.recoveries))
        assert len(summary.recoveries) <= (way == "dies")
        assert made.numbers == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed", sampler)


async def test_a_death_that_the_run_goes_on_after_is_told_as_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during(SECOND, "Generate", 3):
            await made.mesh.roles[SECOND].stop()
            made.run.service_lost(SECOND, f"{SECOND} was killed by signal 9")
            # The watcher says the same a little later.
            made.run.service_lost(SECOND, f"{SECOND} is gone")
        summary = await task
        check_went_on(made, summary, deaths=1)
        assert summary.recoveries[0].cause == f"{SECOND} was killed by signal 9"
        # Its lease, which goes on, does not bring it back.
        assert made.numbers == [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]


async def test_a_service_that_joins_gets_weights_that_the_others_have_already(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        # The evaluation before the first step has brought the weights that it samples with.
        async with made.during(FIRST, "Generate", 0):
            made.register(SECOND)
            await made.loaded(SECOND)
        check_went_on(made, await task)
        assert made.numbers == [2.0] * STEPS
        taken = [call.step for call in made.mesh.calls if call.name == f"{SECOND}.UpdateWeights"]
        assert 1 in taken
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_service_that_left_may_come_back_as_another_process(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 1):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during("actor", "Update", 2):
            made.unregister(SECOND)
            await made.mesh.restart(SECOND)
            await made.told(f"{SECOND} leaves in step 2")
            made.mesh.log.clear()
            made.register(SECOND, "b")
        async with made.during("actor", "Update", 3):
            await made.loaded(SECOND)
        check_went_on(made, await task)
        assert made.numbers == [1.0, 2.0, 1.0, 2.0, 2.0, 2.0]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_run_that_keeps_too_few_waits_for_others(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during(FIRST, "Generate", 3):
            made.drain(FIRST)
            await made.told(f"{FIRST} leaves: it drains, and too few are left without it")
        made.register(THIRD)
        summary = await task
        assert summary.state is RunState.SUCCEEDED
        assert {call.key[1] for call in made.mesh.calls} == {1, 2}
        assert made.sampled(THIRD) == [3, 4, 5, 6]
        (recovered,) = summary.recoveries
        assert recovered.lost_steps == 0
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_service_that_cannot_take_part_is_told_of_and_left_out(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.mesh.roles[SECOND].failures["Initialize"] = PreconditionError(
            "run 'other' holds the rollout", reason="ALREADY_INITIALIZED"
        )
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.told(f"{SECOND} at {made.mesh.roles[SECOND].address} cannot join: run")
        check_went_on(made, await task)
        assert made.numbers == [1.0] * STEPS


@pytest.mark.parametrize(
    ("sampler", "services", "said"),
    [
        ({"type": "sync"}, {}, "schedule.sampler.batch_size is not given"),
        (
            {"type": "one_step_ahead", "batch_size": 2},
            {},
            "schedule.sampler.type is 'one_step_ahead'",
        ),
        ({**SYNC, "weights": "nccl"}, {}, "schedule.sampler.weights is 'nccl'"),
        (SYNC, {"registers": False}, "most_replicas is 3, but registers is false"),
        (SYNC, {"replicas": 3}, "most_replicas is 3 and replicas, the least, is 3"),
        ({**SYNC, "batch_size": 6}, {}, "make 1 calls of them"),
    ],
)
def test_what_cannot_change_is_refused(
    sampler: dict[str, Any], services: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        recipe(sampler, **services)
