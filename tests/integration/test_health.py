"""Runs of fake roles in which a step goes wrong, and what each rule of run.health does about it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_models import STRIDE
from support.fake_recipes import GRPO, PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh
from support.fake_runs import Recorder, kill_during, make_run
from support.run_results import learnt
from support.slow_cases import mostly_slow

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.steps.health import UnhealthyError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import JournalEntry, RunState, RunStream
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import coordinator_pb2

STEPS, BAD = 5, 3
Reported = Callable[[str, Any], Mapping[str, float]]

# Rule, its section, the call that reports the fault, and the fault.
FAULTS: dict[str, tuple[str, dict[str, Any], str, dict[str, float]]] = {
    "actor_grad_norm": (
        "grad_norm", {"above": {"actor": 10}}, "actor.Update", {"grad_norm": 50.0}
    ),
    "critic_grad_norm": (
        "grad_norm", {"above": {"actor": 10, "critic": 9}}, "critic.Update", {"grad_norm": 9.5}
    ),
    "kl": ("kl", {"above": 2.0}, "actor.ComputeAdvantages", {"kl/mean": 2.5}),
    "entropy": ("entropy", {"below": 0.01}, "actor.Update", {"entropy": 0.001}),
    "length": (
        "length", {"growth": 2.0, "first_steps": 2},
        "actor.Generate", {"completion_length/mean": 17.0},
    ),
    "truncated": ("length", {"truncated": 0.5}, "actor.Generate", {"finished_fraction": 0.25}),
    "mismatch": (
        "mismatch", {"above": 0.1}, "actor.Update", {"sampler_logprob_diff_mean": 0.4}
    ),
    "reward": ("reward", {"fall": 3.0, "over": 2}, "reward.ComputeReward", {"reward/mean": -4.0}),
    "metric": ("not_finite", {}, "actor.Update", {"loss": math.nan}),
    "infinite": ("not_finite", {}, "critic.Update", {"loss": math.inf}),
}  # fmt: skip
EVERY = (*FAULTS, "loss")
FEW = mostly_slow(
    [number for number, fault in enumerate(EVERY) if fault in ("kl", "critic_grad_norm", "loss")],
    [(fault,) for fault in EVERY],
)
"""Where the rule does not matter, which all are held to by what is skipped: a metric from before
the updates, one of an update, and a refusal."""


def in_step(call: str, fault: Mapping[str, float], step: int = BAD) -> Reported:
    """The fault, whenever the step is made for the first time."""

    def reported(name: str, key: Any) -> Mapping[str, float]:
        is_it = (name, key.step, key.lineage) == (call, step, 0)
        return fault if is_it and not key.operation.startswith("evaluate.") else {}

    return reported


def refused(call: str, step: int = BAD) -> Reported:
    """A service that does not compute on with a NaN."""

    def reported(name: str, key: Any) -> Mapping[str, float]:
        if (name, key.step, key.lineage) == (call, step, 0):
            raise PreconditionError("gradient norm is nan", reason="LOSS_NOT_FINITE")
        return {}

    return reported


def recipe(health: dict[str, Any], **settings: Any) -> Any:
    run = {"steps": STEPS, "evaluation": {"num_prompts": 4, "every_steps": 2}, "health": health}
    roles = settings.pop("roles", PPO_ROLES)
    recovery = {"attempts": 3, "pause_s": 0.01}
    return fake_recipe(
        **{"recovery": recovery, **run, **settings}, roles=roles, pools=split_pools(roles)
    )


def sampled(mesh: FakeMesh) -> list[tuple[int, int, int]]:
    """(step, lineage, first prompt) of each call that sampled for training, in order."""
    return [
        (call.step, call.request.key.lineage, call.request.prompts.start)
        for call in mesh.of("actor.Generate")
    ]


@pytest.mark.parametrize("fault", EVERY)
async def test_a_step_that_is_skipped_leaves_only_its_record(fault: str, tmp_path: Path) -> None:
    rule, section, call, value = FAULTS.get(fault, ("not_finite", {}, "actor.Update", {}))
    recorder, store = Recorder(), MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step(call, value) if value else refused(call)
        wanted = recipe({rule: {**section, "do": "skip"}})
        run = make_run(mesh, tmp_path, wanted, store, observer=recorder)
        summary = await run.execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS - 1)
        assert sampled(mesh) == [(step, 0, 3 * (step - 1)) for step in range(1, STEPS + 1)]
        # 2 optimizer steps a step, of all but one.
        assert mesh.roles["actor"].policy_version == 2 * (STEPS - 1)
        assert all(fake.released_through == STEPS for fake in mesh.roles.values())
    assert summary.state is RunState.SUCCEEDED
    assert summary.recoveries == ()
    records = learnt(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    marked = [record for record in records if "health/skipped" in record]
    assert [(one["step"], one["health/skipped"], one[f"health/{rule}"]) for one in marked] == [
        (BAD, 1.0, 1.0)
    ]
    assert all(math.isfinite(number) for number in marked[0].values())
    (told,) = [text for text in recorder.events if f"run.health.{rule} struck" in text]
    assert told.startswith(f"step {BAD}: ")
    assert "its updates are undone, and the run goes on with the next prompts" in told
    entries = await store.read_entries(run.run_id, RunStream.EVENTS)
    events = [coordinator_pb2.RunEvent.FromString(entry.payload) for entry in entries]
    assert [event.step for event in events if event.note.text == told] == [BAD - 1]


@pytest.mark.parametrize("fault", FEW)
async def test_a_run_that_goes_back_draws_the_step_anew(fault: str, tmp_path: Path) -> None:
    rule, section, call, value = FAULTS.get(fault, ("not_finite", {}, "critic.Update", {}))
    recorder, store = Recorder(), MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step(call, value) if value else refused(call)
        wanted = recipe({rule: {**section, "do": "roll_back", "back": 2}})
        run = make_run(mesh, tmp_path, wanted, store, observer=recorder)
        summary = await run.execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        # The cut of step 1 was still kept.
        assert sampled(mesh) == [
            (1, 0, 0), (2, 0, 3), (3, 0, 6), (2, 1, 3), (3, 1, 6), (4, 1, 9), (5, 1, 12),
        ]  # fmt: skip
    assert summary.state is RunState.SUCCEEDED
    records = learnt(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record.get("health/roll_backs", 0.0) for record in records] == [0, 1, 1, 1, 1]
    stored = await store.read_metrics(run.run_id)
    assert [int(entry.values["step"]) for entry in stored] == [0, 1, 2, 3, 4, 5]
    (told,) = [text for text in recorder.events if f"run.health.{rule} struck" in text]
    assert "the run goes back to step 1, and samples anew from there" in told
    marker = json.loads((tmp_path / f"checkpoints/step-{STEPS:08}/COMMITTED").read_text())
    assert marker["roll_backs"] == [1]


@pytest.mark.parametrize("fault", FEW)
async def test_a_run_that_is_stopped_says_why_and_keeps_the_step_before(
    fault: str, tmp_path: Path
) -> None:
    rule, section, call, value = FAULTS.get(fault, ("not_finite", {}, "actor.Update", {}))
    store, wanted = MemoryStateStore(), recipe({rule: section})
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step(call, value) if value else refused(call)
        run = make_run(mesh, tmp_path, wanted, store)
        with pytest.raises(RunError) as ended:
            await run.execute()
    said = "LOSS_NOT_FINITE" if fault == "loss" else f"step {BAD}: run.health.{rule} struck"
    assert said in str(ended.value)
    # A refusal says more than a rule could.
    assert isinstance(ended.value, UnhealthyError) == (fault != "loss")
    record = await store.get_run(run.run_id)
    assert (record.state, record.step) == (RunState.FAILED, BAD - 1)
    assert said in record.failure
    assert (tmp_path / f"checkpoints/step-{BAD - 1:08}/COMMITTED").is_file()


async def test_metrics_that_are_no_numbers_may_be_switched_off(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step("actor.Update", {"loss": math.nan})
        wanted = recipe({"not_finite": {"enabled": False}})
        summary = await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert summary.state is RunState.SUCCEEDED


async def test_a_norm_that_names_no_role_is_of_the_one_that_learns(tmp_path: Path) -> None:
    roles = ("actor", "reference", "reward")
    async with fake_mesh(roles=roles, has_cuts=True) as mesh:
        mesh.reported = in_step("actor.Update", {"grad_norm": 50.0})
        section = {"grad_norm": {"above": {"actor": 10}, "do": "skip"}}
        wanted = recipe(section, algorithm=GRPO, roles=roles)
        await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
    skipped = [record["step"] for record in learnt(tmp_path) if "health/skipped" in record]
    assert skipped == [BAD]


async def test_a_rule_waits_for_its_steps_in_a_row(tmp_path: Path) -> None:
    bad = (2, 4, 5)
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = lambda name, key: (
            {"kl/mean": 3.0} if name == "actor.ComputeAdvantages" and key.step in bad else {}
        )
        wanted = recipe({"kl": {"above": 2.0, "steps": 2, "do": "skip"}})
        await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS - 1)
    skipped = [record["step"] for record in learnt(tmp_path) if "health/skipped" in record]
    assert skipped == [5]


async def test_the_most_severe_of_several_rules_decides(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step("actor.Update", {"entropy": 0.0, "grad_norm": 99.0})
        wanted = recipe(
            {"grad_norm": {"above": {"actor": 10}, "do": "skip"}, "entropy": {"below": 0.01}}
        )
        with pytest.raises(UnhealthyError, match=r"run\.health\.entropy struck: entropy is 0,"):
            await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()


@pytest.mark.parametrize(
    ("health", "text", "made"),
    [
        (
            {"kl": {"above": 2.0, "do": "skip"}, "most_skips": 2},
            r"the run ends, since 2 steps in a row were skipped \(run\.health\.most_skips\)", 4,
        ),
        (
            {"kl": {"above": 2.0, "do": "roll_back"}, "most_roll_backs": 2},
            r"since it has gone back 2 times \(run\.health\.most_roll_backs\)", 2,
        ),
    ],
)  # fmt: skip
async def test_what_is_undone_again_and_again_ends_the_run(
    health: dict[str, Any], text: str, made: int, tmp_path: Path
) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = lambda name, key: (
            {"kl/mean": 3.0} if name == "actor.ComputeAdvantages" and key.step >= BAD else {}
        )
        run = make_run(mesh, tmp_path, recipe(health), store)
        with pytest.raises(UnhealthyError, match=text):
            await run.execute()
        assert mesh.roles["actor"].weight == expected_weight(2)
    assert (await store.get_run(run.run_id)).step == made


async def test_without_cuts_nothing_can_be_skipped(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        mesh.reported = refused("actor.Update")
        wanted = recipe({"not_finite": {"do": "skip"}})
        with pytest.raises(UnhealthyError, match="no cuts are kept in memory"):
            await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()


@pytest.mark.parametrize(("every", "lands"), [(2, 2), (3, 0)])
async def test_a_run_that_goes_far_back_makes_the_steps_before_as_they_were(
    every: int, lands: int, tmp_path: Path
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = in_step("actor.Update", {"entropy": 0.0}, step=5)
        wanted = recipe(
            {"entropy": {"below": 0.01, "do": "roll_back", "back": 3}},
            checkpoint={"every_steps": every},
        )
        summary = await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        again = sampled(mesh)[STEPS:]
        # From the state that is left, each step with the lineage that it had.
        assert again == [
            (step, int(step > 2), 3 * (step - 1)) for step in range(lands + 1, STEPS + 1)
        ]
    assert summary.state is RunState.SUCCEEDED


async def test_a_rule_without_its_metric_is_told_of(tmp_path: Path) -> None:
    recorder = Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        wanted = recipe({"mismatch": {"above": 0.1}})
        await make_run(mesh, tmp_path, wanted, MemoryStateStore(), observer=recorder).execute()
    told = "run.health.mismatch cannot strike: the steps report no sampler_logprob_diff_mean"
    assert recorder.events.count(told) == 1


AHEAD = ({"type": "one_step_ahead"}, {"type": "async", "max_staleness": 2})


# All pairs of a sampler, an action and a kind of fault.
@pytest.mark.parametrize(
    ("sampler", "action", "is_refused"),
    [
        pytest.param(
            AHEAD[number], action, is_refused, marks=marks,
            id=f"{AHEAD[number]['type']}-{action}-{'refusal' if is_refused else 'metric'}",
        )
        for number in range(2)
        for place, action in enumerate(("skip", "roll_back"))
        for is_refused in (False, True)
        for marks in [() if (number + place + is_refused) % 2 else pytest.mark.slow]
    ],
)  # fmt: skip
async def test_what_was_sampled_ahead_of_an_undone_step_is_sampled_anew(
    sampler: dict[str, Any], action: str, is_refused: bool, tmp_path: Path
) -> None:
    roles = (*PPO_ROLES, "rollout")
    async with fake_mesh(roles, replicas=2, has_cuts=True) as mesh:
        mesh.reported = (
            refused("actor.Update") if is_refused else in_step("actor.Update", {"entropy": 0.0})
        )
        rule = {"not_finite": {"do": action}, "entropy": {"below": 0.01, "do": action}}
        wanted = recipe(
            rule, roles=roles, sampler=sampler, services={"rollout": {"replicas": 2}},
            evaluation={"num_prompts": 0},
        )  # fmt: skip
        summary = await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        made = STEPS - 1 if action == "skip" else STEPS
        assert mesh.roles["actor"].weight == expected_weight(made)
        newest = max(call.key[1] for call in mesh.of("rollout.Generate"))
        again = [call for call in mesh.of("rollout.Generate") if call.key[1] == newest]
        first = BAD + 1 if action == "skip" else BAD
        assert {call.step for call in again} == set(range(first, STEPS + 1))
        # A completion is its policy's weight and less than a stride.
        weights = {
            number // STRIDE * STRIDE
            for call in again
            if call.step == first
            for number in mesh.columns[
                mesh.roles[call.service].address,
                f"{call.service}/{call.step}/{call.key[3]}/{call.key[4]}",
            ]["tokens"]
        }  # fmt: skip
        assert max(weights) <= expected_weight(BAD - 1)
    assert summary.state is RunState.SUCCEEDED
    bound = sampler.get("max_staleness", 1)
    records = learnt(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(0 <= record.get("staleness/max", 0) <= bound for record in records)


UNDOING: dict[str, dict[str, Any]] = {
    "skip": {"entropy": {"below": 0.01, "do": "skip"}},
    "roll_back": {"entropy": {"below": 0.01, "do": "roll_back", "back": 2}},
}
_UNDISTURBED: dict[str, list[dict[str, float]]] = {}
"""Records of runs that are the same each time, by what undoes their step."""


async def undisturbed(action: str, reported: Reported, directory: Path) -> list[dict[str, float]]:
    if action not in _UNDISTURBED:
        async with fake_mesh(has_cuts=True) as mesh:
            mesh.reported = reported
            wanted = recipe(UNDOING[action])
            await make_run(mesh, directory, wanted, MemoryStateStore()).execute()
        _UNDISTURBED[action] = learnt(directory)
    return _UNDISTURBED[action]


@pytest.mark.parametrize("victim", ["actor", "critic"])
@pytest.mark.parametrize(
    ("action", "method", "step"),
    [
        ("skip", "RestoreCut", BAD - 1),
        ("skip", "SaveCut", BAD),
        ("roll_back", "RestoreCut", BAD - 2),
    ],
)
async def test_a_service_killed_while_a_step_is_undone_changes_nothing(
    action: str, method: str, step: int, victim: str, tmp_path: Path
) -> None:
    reported = in_step("actor.Update", {"entropy": 0.0})
    expected = await undisturbed(action, reported, tmp_path / "undisturbed")
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = reported
        run = make_run(
            mesh, tmp_path / "killed", recipe(UNDOING[action]), MemoryStateStore(),
            restart=mesh.restart, loss_grace_s=0.2,
        )  # fmt: skip
        summary = await kill_during(run, mesh, "actor", method, victim, step)
        assert mesh.restarted == [victim]
    assert len(summary.recoveries) == 1
    assert learnt(tmp_path / "killed") == expected


class HaltingStore(MemoryStateStore):
    """A store during whose append of one operation the coordinator's process ends."""

    def __init__(self, operation: str, step: int, *, is_written: bool) -> None:
        super().__init__()
        self.awaited = (operation, step)
        self.is_written = is_written
        self.halted = asyncio.Event()

    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        is_it = (entry.operation, entry.step) == self.awaited and not self.halted.is_set()
        if is_it and not self.is_written:
            await self._halt()
        appended = await super().append_journal(run_id, entry)
        if is_it:
            await self._halt()
        return appended

    async def _halt(self) -> None:
        self.halted.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("action", "operation", "step"),
    [
        ("skip", "actor.restore_cut", BAD - 1),
        ("skip", "critic.save_cut", BAD),
        ("skip", "step.commit", BAD),
        ("roll_back", "run.roll_back", BAD - 2),
        ("roll_back", "run.rewind", BAD - 2),
        ("roll_back", "actor.restore_cut", BAD - 2),
    ],
)
async def test_a_coordinator_killed_while_a_step_is_undone_goes_on_the_same_way(
    action: str, operation: str, step: int, is_written: bool, tmp_path: Path
) -> None:
    reported, folder = in_step("actor.Update", {"entropy": 0.0}), tmp_path / "killed"
    expected = await undisturbed(action, reported, tmp_path / "undisturbed")
    wanted = recipe(UNDOING[action])
    store = HaltingStore(operation, step, is_written=is_written)
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.reported = reported
        run = make_run(mesh, folder, wanted, store)
        task = asyncio.create_task(run.execute())
        await store.halted.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        progress, _ = await reached(store, run.run_id, folder)
        again = make_run(mesh, folder, wanted, store, run_id=run.run_id, resumed=progress)
        summary = await again.execute()
    assert summary.state is RunState.SUCCEEDED
    assert learnt(folder) == expected
