"""The search against trying everything: partitions, costs and the chosen plan."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mapping_jobs import LLAMAS, job, step

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.job import Job, Role, Wishes
from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout, layouts
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import HYBRIDFLOW, ROLEMESH, System
from rolemesh.coordinator.mapping.job.tasks import Step, Task, TaskKind, Timeline
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.devices import DEVICES
from rolemesh.coordinator.mapping.search.partitions import Sets, set_partitions
from rolemesh.coordinator.mapping.search.search import Search
from rolemesh.coordinator.mapping.simulators import costs as costs_module
from rolemesh.coordinator.mapping.simulators.costs import Option, RoleCosts, _undominated
from rolemesh.coordinator.mapping.simulators.generation import sampler_bytes
from rolemesh.coordinator.mapping.simulators.memory import RankBytes
from rolemesh.coordinator.mapping.simulators.moves import switch_seconds

ALGORITHMS = ("ppo", "remax", "safe_rlhf", "grpo")
WORK = Work(prompts=64, prompt_tokens=128, completions=Lengths.fixed(128), mini_batch_rows=16)
PLAIN = Freedom(
    most_slices=2, cuts_over_data=(False,), micro_batch_tokens=(512,), recompute=("none",),
    offload=(False,),
)  # fmt: skip
BARE = replace(HYBRIDFLOW, process_bytes=1 << 20)
ASLEEP = replace(ROLEMESH, process_bytes=1 << 20)


def test_partitions_are_counted_by_bell_numbers() -> None:
    for number, bell in enumerate((1, 1, 2, 5, 15, 52, 203)):
        roles = [f"role{index}" for index in range(number)]
        found = set_partitions(roles)
        assert len(found) == bell
        assert len({frozenset(map(frozenset, sets)) for sets in found}) == bell
        assert all(sorted(itertools.chain(*sets)) == roles for sets in found)
        assert [len(sets) for sets in found] == sorted(len(sets) for sets in found)


def test_a_timeline_overlaps_what_the_dataflow_lets_overlap() -> None:
    apart = {"actor": 0, "critic": 1, "reference": 2, "reward": 3}
    timeline = Timeline(step("ppo"), apart)
    assert timeline.ends([10, 1, 2, 4, 5, 7]) == [10, 11, 12, 14, 19, 21]
    queued = Timeline(step("ppo"), {**apart, "reward": 2})
    assert queued.ends([10, 1, 2, 4, 5, 7]) == [10, 11, 12, 16, 21, 23]


def test_a_sampler_that_is_ahead_runs_beside_the_step() -> None:
    tasks = (
        Task(index=0, role="actor", kind=TaskKind.PUBLISH, method="publish_weights"),
        Task(index=1, role="rollout", kind=TaskKind.TAKE, method="update_weights", after=(0,)),
        Task(index=2, role="rollout", kind=TaskKind.GENERATE, method="generate", after=(1,)),
        Task(index=3, role="actor", kind=TaskKind.UPDATE, method="update", after=(2,)),
    )
    pools = {"actor": 0, "rollout": 1}
    assert Timeline(Step(tasks), pools).period([1, 2, 10, 6]) == 19
    ahead = Timeline(Step(tasks, frozenset({"rollout"})), pools)
    assert ahead.period([1, 2, 10, 6]) == 12
    assert ahead.period([1, 2, 3, 6]) == 7


# Trying everything. Of the code under test it uses the costs of one role on one layout alone.


def brute_partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    if not roles:
        yield []
        return
    first, *others = roles
    for size in range(len(others) + 1):
        for mates in itertools.combinations(others, size):
            rest = [role for role in others if role not in mates]
            for sets in brute_partitions(rest):
                yield [[first, *mates], *sets]


Finish = Callable[[Sequence[float]], float]


def brute_finish(step: Step, place: Mapping[str, int]) -> Finish:
    """Runs the step: each pool works through its calls in order."""
    befores = [
        [
            one.index
            for one in step.tasks
            if one.index in task.after
            or (one.index < task.index and place[one.role] == place[task.role])
        ]
        for task in step.tasks
    ]

    def finish(seconds: Sequence[float]) -> float:
        ends: list[float] = []
        for own, before in zip(seconds, befores, strict=True):
            ends.append(max((ends[one] for one in before), default=0.0) + own)
        return max(ends)

    return finish


class Brute:
    """Every plan of a job on some groups of devices."""

    def __init__(self, wanted: Job, groups: Sequence[DeviceGroup]) -> None:
        self.job, self.groups = wanted, groups
        self.costs = {
            (role.name, kind): RoleCosts(wanted, role, group)
            for role in wanted.roles
            for kind, group in enumerate(groups)
        }
        self.raw = {key: self.options(costs) for key, costs in self.costs.items()}
        self.best_of: dict[Sets, float] = {}
        self.pools: dict[tuple[tuple[str, ...], int, int], list[dict[int, float]]] = {}
        # Else too many: layouts that are worse in everything are tried on few devices only.
        self.is_reduced = sum(group.count for group in groups) > 3

    def options(self, costs: RoleCosts) -> list[Option]:
        role = costs.role
        found = []
        for layout in layouts(
            role.model, costs.group.count, role.freedom, trains=role.trains, samples=role.samples
        ):
            seconds = tuple(costs._task_s(task, layout) for task in costs.tasks)
            found.append(Option(layout, costs._bytes(layout), seconds))
        return found

    def run(self) -> float:
        names = [role.name for role in self.job.roles]
        for sets in brute_partitions(names):
            key = tuple(tuple(name for name in names if name in one) for one in sets)
            for kinds in itertools.product(range(len(self.groups)), repeat=len(sets)):
                self.best_of[key] = min(
                    self.best_of.get(key, math.inf), self.partition(sets, kinds)
                )
        return min(self.best_of.values())

    def partition(self, sets: list[list[str]], kinds: tuple[int, ...]) -> float:
        place = {role: number for number, one in enumerate(sets) for role in one}
        best, finish = math.inf, brute_finish(self.job.step, place)
        ranges = [range(1, self.groups[kind].count + 1) for kind in kinds]
        for sizes in itertools.product(*ranges):
            used = [0] * len(self.groups)
            for kind, size in zip(kinds, sizes, strict=True):
                used[kind] += size
            # Every device has a pool: with fewer no plan gets faster.
            if any(
                number != group.count if kind in kinds else number
                for kind, (number, group) in enumerate(zip(used, self.groups, strict=True))
            ):
                continue
            ways = [
                self.pool(tuple(one), kind, size)
                for one, kind, size in zip(sets, kinds, sizes, strict=True)
            ]
            for chosen in itertools.product(*ways):
                seconds = [0.0] * len(self.job.step.tasks)
                for way in chosen:
                    for task, value in way.items():
                        seconds[task] = value
                best = min(best, finish(seconds))
        return best

    def pool(self, roles: tuple[str, ...], kind: int, size: int) -> list[dict[int, float]]:
        key = (roles, kind, size)
        if key not in self.pools:
            self.pools[key] = self.make_pool(*key)
        return self.pools[key]

    def make_pool(self, roles: tuple[str, ...], kind: int, size: int) -> list[dict[int, float]]:
        """Seconds by task of all layouts that fit."""
        system = self.job.system
        sleeps = system.sleeps and len(roles) > 1
        fitting = [
            [one for one in self.raw[role, kind] if one.world_size <= size] for role in roles
        ]
        if self.is_reduced and not sleeps:
            fitting = [distinct(one) for one in fitting]
        if self.is_reduced and (sleeps or len(roles) == 1):
            # Roles that sleep do not touch each other.
            ways = [
                fastest([self.one(roles, kind, role, option, 0) for option in options])
                for role, options in zip(roles, fitting, strict=True)
            ]
            return [
                {task: value for one in chosen for task, value in one.items()}
                for chosen in itertools.product(*ways)
            ]
        found = []
        for options in itertools.product(*fitting):
            total = 0 if sleeps else sum(one.bytes.rest for one in options)
            parts = [
                self.one(roles, kind, role, option, total - (0 if sleeps else option.bytes.rest))
                for role, option in zip(roles, options, strict=True)
            ]
            if all(part is not None for part in parts):
                found.append({task: value for one in parts for task, value in (one or {}).items()})
        return fastest(found) if self.is_reduced else found

    def one(
        self, roles: tuple[str, ...], kind: int, role: str, option: Option, others_rest: int
    ) -> dict[int, float] | None:
        """Seconds of a role's tasks in a pool; None where it does not fit."""
        system, group = self.job.system, self.groups[kind]
        others = others_rest + system.process_bytes * (len(roles) - 1)
        usable = group.device.memory_bytes * (1 - system.spare)
        if option.bytes.peak + system.process_bytes + others > usable:
            return None
        own = self.costs[role, kind].seconds(option, others)
        if own is None:
            return None
        tasks = [task for task in self.job.step.tasks if task.role in roles]
        seconds = dict(zip([task.index for task in tasks if task.role == role], own, strict=True))
        if system.sleeps and len(roles) > 1:
            move = switch_seconds(option.bytes.rest, group)
            for at, task in enumerate(tasks):
                if task.role == role:
                    after = tasks[(at + 1) % len(tasks)]
                    moves = (tasks[at - 1].role != role) + (after.role != role)
                    seconds[task.index] += moves * move
        return seconds


def fastest(ways: Sequence[dict[int, float] | None]) -> list[dict[int, float]]:
    """Those that no other one beats in every task."""
    kept: list[dict[int, float]] = []
    for way in ways:
        if way is None or any(all(one[task] <= way[task] for task in way) for one in kept):
            continue
        kept = [one for one in kept if not all(way[task] <= one[task] for task in way)] + [way]
    return kept


def distinct(options: list[Option]) -> list[Option]:
    """Without options that another one is no worse than in seconds, bytes and way of sampling."""

    def numbers(one: Option) -> tuple[float, ...]:
        return (*one.seconds, one.bytes.rest, one.bytes.peak)

    kept: list[Option] = []
    for one in options:
        rivals = [two for two in kept if two.sampling == one.sampling]
        if any(
            all(a <= b for a, b in zip(numbers(two), numbers(one), strict=True)) for two in rivals
        ):
            continue
        kept.append(one)
    return kept


def cluster(
    gpus: int, memory: int = 1 << 34, kinds: Sequence[str] = ("a100-80",)
) -> list[DeviceGroup]:
    return [
        group_of(replace(DEVICES[kind], memory_bytes=memory), gpus, per_machine=4) for kind in kinds
    ]


def tiny(algorithm: str, system: System, freedom: Freedom = PLAIN) -> Job:
    return job(algorithm, "tiny", system=system, freedom=freedom, work=WORK)


def agree(wanted: Job, groups: Sequence[DeviceGroup]) -> Search:
    brute = Brute(wanted, groups)
    best = brute.run()
    search = Search(wanted, groups)
    found = search.run(kept=60)
    assert set(brute.best_of) == set(set_partitions([role.name for role in wanted.roles]))
    for placement in found.placements:
        assert placement.period == pytest.approx(brute.best_of[placement.sets], rel=1e-7)
    feasible = {sets for sets, period in brute.best_of.items() if period < math.inf}
    assert {placement.sets for placement in found.placements} == feasible
    if best < math.inf:
        chosen = search.run(kept=1).placements[0]
        assert chosen.period == pytest.approx(best, rel=1e-7)
        place = {role: number for number, one in enumerate(chosen.sets) for role in one}
        assert brute_finish(wanted.step, place)(chosen.seconds) == pytest.approx(best, rel=1e-7)
    return search


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("system", [BARE, ASLEEP], ids=["stay", "sleep"])
def test_the_plan_is_the_exhaustive_optimum_on_few_gpus(algorithm: str, system: System) -> None:
    agree(tiny(algorithm, system), cluster(3))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "safe_rlhf" else ())
        for name in ALGORITHMS
    ],
)
def test_the_plan_is_the_exhaustive_optimum_on_16_gpus(algorithm: str) -> None:
    agree(tiny(algorithm, ASLEEP), cluster(16))


@pytest.mark.parametrize("memory", [23 << 20, 26 << 20, 40 << 20])
def test_the_plan_is_the_optimum_where_memory_is_short(memory: int) -> None:
    # Roles that stay take each other's memory, and the sampler gets what is left.
    freedom = replace(PLAIN, micro_batch_tokens=(256, 512), recompute=("none", "full"))
    small = replace(BARE, process_bytes=1 << 16)
    wanted = job("grpo", "tiny", system=small, freedom=freedom, work=WORK)
    agree(wanted, cluster(3, memory=(1 << 30) + 60 * (memory >> 1)))


@pytest.mark.parametrize("spare_mb", range(5, 17, 2))
def test_what_other_roles_hold_decides_how_many_rows_a_sampler_runs(
    monkeypatch: pytest.MonkeyPatch, spare_mb: int
) -> None:
    monkeypatch.setattr(costs_module, "_BUDGET_STEP", 1 << 12)
    small = replace(BARE, process_bytes=1 << 16)
    wanted = job("ppo", "tiny", system=small, freedom=PLAIN, work=WORK)
    fixed = sampler_bytes(wanted.role("actor").model, Layout(), small, 1024).fixed
    agree(wanted, cluster(2, memory=int((fixed + spare_mb * 10**6) / 0.9)))


def test_pools_of_several_kinds_are_used_for_what_suits_them() -> None:
    wanted = tiny("grpo", ASLEEP)
    search = agree(wanted, cluster(3, kinds=("h100", "rtx4090")))
    assert search.run(1).placements[0].kinds


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_no_bound_cuts_the_optimum(seed: int) -> None:
    """Random graphs, and random costs that no simulator would give."""
    draw = random.Random(seed)
    names = ["a", "b", "c", "d"][: draw.randint(1, 4)]
    tasks: list[Task] = []
    for index in range(draw.randint(len(names), 7)):
        role = names[index] if index < len(names) else draw.choice(names)
        after = tuple(one for one in range(index) if draw.random() < 0.4)
        tasks.append(Task(index=index, role=role, kind=TaskKind.SCORE, method="f", after=after))
    roles = tuple(Role(name=name, model=Model.from_config(LLAMAS["tiny"])) for name in names)
    wanted = Job(roles=roles, step=Step(tuple(tasks)), work=WORK, system=BARE)
    groups = cluster(draw.randint(1, 6), memory=100 << 20)
    options: dict[str, list[Option]] = {}
    for role in roles:
        options[role.name] = []
        for index in range(draw.randint(1, 4)):
            layout = Layout(dp=draw.randint(1, groups[0].count), micro_batch_tokens=index + 1)
            rest = draw.randint(0, 50) << 20
            held = RankBytes(rest=rest, peak=rest + (draw.randint(0, 40) << 20))
            seconds = tuple(float(draw.randint(1, 9)) for _ in wanted.step.of(role.name))
            options[role.name].append(Option(layout, held, seconds))
    brute = Brute(wanted, groups)
    brute.raw = {(name, 0): found for name, found in options.items()}
    brute.is_reduced = False
    best = brute.run()
    search = Search(wanted, groups)
    for role in roles:
        search.costs(role.name, 0).__dict__["options"] = _undominated(options[role.name])
    found = search.run(kept=1)
    if best == math.inf:
        assert not found.placements
    else:
        assert found.placements[0].period == pytest.approx(best)


def test_a_search_repeats_itself_and_prefers_the_coarser_of_equal_plans() -> None:
    wanted = tiny("ppo", ASLEEP)
    first, second = (Search(wanted, cluster(8)).run() for _ in range(2))
    assert first == second
    # On one device nothing can be apart.
    assert [one.sets for one in Search(wanted, cluster(1)).run().placements] == [
        (("actor", "critic", "reference", "reward"),)
    ]


def test_wishes_are_kept() -> None:
    names = ("actor", "critic", "reference", "reward")
    wishes = Wishes(together=(("actor", "critic"),), apart=(("actor", "reward"),))
    wanted = replace(tiny("ppo", ASLEEP), wishes=wishes)
    for placement in Search(wanted, cluster(8)).run(60).placements:
        pool = next(one for one in placement.sets if "actor" in one)
        assert "critic" in pool
        assert "reward" not in pool
    few = replace(wanted, wishes=Wishes(devices={"actor": 2}))
    for placement in Search(few, cluster(8)).run(60).placements:
        at = next(index for index, one in enumerate(placement.sets) if "actor" in one)
        assert placement.sizes[at] <= 2
    kinds = replace(wanted, wishes=Wishes(on=dict.fromkeys(names, "h100")))
    best = Search(kinds, cluster(2, kinds=("h100", "l40s"))).run(1).placements[0]
    assert set(best.kinds) == {0}


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        (
            Wishes(together=(("actor", "critic"),), apart=(("critic", "actor"),)),
            "critic and actor are to be apart, and also together",
        ),
        (
            Wishes(
                together=(("actor", "critic"), ("critic", "reward")), apart=(("reward", "actor"),)
            ),
            "reward and actor are to be apart, and also together",
        ),
        (Wishes(devices={"judge": 2}), "names the role 'judge', but the roles with a model are"),
        (Wishes(devices={"actor": 0}), "actor is to have 0 devices: give at least 1"),
        (Wishes(on={"actor": "h100"}), "actor is to be on 'h100', but the cluster has a100-80"),
    ],
)
def test_wishes_that_contradict_each_other_are_named(wishes: Wishes, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Search(replace(tiny("ppo", ASLEEP), wishes=wishes), cluster(4))
