"""A found plan for people and programs: pools, layouts, seconds, bytes, and who comes next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.tasks import TaskKind
from rolemesh.coordinator.mapping.search.partitions import pool_numbers
from rolemesh.coordinator.mapping.search.search import Found, Placement, Search
from rolemesh.coordinator.mapping.simulators.costs import Option

UNMEASURED = "no machine like this has been measured: seconds are assumptions"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRole:
    """A role of a plan."""

    role: str
    layout: str
    """As `Layout.described`."""
    ranks: int
    option: Option
    rest_bytes: int
    """On each of its devices, between calls."""
    peak_bytes: int
    """While it trains or scores."""
    sampler_bytes: int
    """What its sampler may take; 0: it has none."""
    rows_together: int
    """Rows that a replica of its sampler decodes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPool:
    """A pool of a plan."""

    name: str
    device: str
    """Kind of its devices."""
    kind: int
    """Number of their group in the cluster."""
    first: int
    """Number of its first device in that group."""
    size: int
    roles: tuple[PlannedRole, ...]
    most_bytes: int
    """Most that a device holds at any time of a step."""
    device_bytes: int
    """Memory of a device."""
    busy: float
    """Share of a step in which one of its roles is at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTask:
    """A task of the predicted step."""

    name: str
    pool: str
    """"" where it needs no device."""
    start: float
    end: float
    is_ahead: bool = False
    """It samples for a later step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """The best plan with other pools."""

    sets: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    period: float
    reason: str
    """Why it loses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a search found for a job."""

    period: float
    """Predicted seconds of a step."""
    tokens_per_s: float
    """Tokens of prompts and completions, as the paper counts throughput."""
    tokens: float
    """Tokens that a step samples or reads, prompts included, as the metric `tokens` has them."""
    pools: tuple[PlannedPool, ...]
    tasks: tuple[PlannedTask, ...]
    idle_devices: int
    """Devices that would change nothing."""
    runners_up: tuple[RunnerUp, ...]
    partitions: int
    """Ways to put the roles into pools that were looked at."""
    notes: tuple[str, ...] = ()
    """What stands in the way of starting it."""
    rows: str
    """What a step was taken to compute: rows, and tokens of prompts and completions."""
    basis: str = UNMEASURED
    """What the seconds stand on."""

    @property
    def utilisation(self) -> float:
        """Share of all devices' time in which a role is at work on them."""
        used = sum(pool.size * pool.busy for pool in self.pools)
        return used / (sum(pool.size for pool in self.pools) + self.idle_devices)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        told = asdict(self)
        for pool in told["pools"]:
            for role in pool["roles"]:
                option = role.pop("option")
                role["cut"] = option["layout"]
        return {**told, "utilisation": self.utilisation}


def plan_of(search: Search, found: Found) -> Plan:
    """The cheapest plan of a search that has found one, and those after it."""
    best = found.placements[0]
    job, groups = search.job, search.groups
    pools_of = pool_numbers(best.sets)
    ends, busy = search.timeline(best.sets).ends(best.seconds), _busy(search, best)
    firsts = dict.fromkeys(range(len(groups)), 0)
    pools = []
    for number, (roles, kind, size) in enumerate(
        zip(best.sets, best.kinds, best.sizes, strict=True)
    ):
        share = busy[number] / best.period
        pools.append(_pool(search, best, number, roles, kind, firsts[kind], share))
        firsts[kind] += size
    tasks = tuple(
        PlannedTask(
            name=task.name,
            pool=pools[pools_of[task.role]].name if task.role in pools_of else "",
            start=end - seconds,
            end=end,
            is_ahead=task.role in job.step.ahead,
        )
        for task, seconds, end in zip(job.step.tasks, best.seconds, ends, strict=True)
    )
    return Plan(
        period=best.period,
        tokens_per_s=job.work.rows * job.work.row_tokens / best.period,
        tokens=_tokens(job),
        pools=tuple(pools),
        tasks=tasks,
        idle_devices=sum(group.count for group in groups) - sum(best.sizes),
        runners_up=tuple(
            RunnerUp(
                sets=other.sets,
                sizes=other.sizes,
                period=other.period,
                reason=_reason(search, best, other),
            )
            for other in found.placements[1:]
        ),
        partitions=len(found.placements) + len(found.bounds),
        notes=tuple(_notes(search, best)),
        rows=(
            f"{job.work.rows} rows of {job.work.prompt_tokens:g} tokens of prompt and "
            f"{job.work.completions.mean:.4g} of completion in the mean "
            f"(at most {job.work.completions.longest:.4g}), optimizer steps of "
            f"{job.work.mini_batch_rows} rows"
        ),
    )


def _tokens(job: Job) -> float:
    shares = [task.share for task in job.step.tasks if task.method in ("generate", "read")]
    return sum(shares) * job.work.rows * job.work.row_tokens


def _notes(search: Search, best: Placement) -> Iterator[str]:
    for roles, kind, options in zip(best.sets, best.kinds, best.options, strict=True):
        group = search.groups[kind]
        wide = [
            role
            for role, option in zip(roles, options, strict=True)
            if group.device.kind == "gpu" and option.world_size > group.per_machine
        ]
        if wide:
            yield (
                f"{' and '.join(wide)}: more ranks than the {group.per_machine} devices of a "
                "machine. `rolemesh train` starts the ranks of a service on one host: start such a "
                "service on several hosts yourself (docs/hosts.md), or plan for one: --at-most "
                f"{wide[0]}={group.per_machine}"
            )


def _pool(
    search: Search,
    best: Placement,
    number: int,
    roles: Sequence[str],
    kind: int,
    first: int,
    busy: float,
) -> PlannedPool:
    system, group = search.job.system, search.groups[kind]
    sleeps = system.sleeps and group.device.kind == "gpu"
    options = best.options[number]
    rests = [option.bytes.rest for option in options]
    planned, most = [], 0
    for index, (role, option) in enumerate(zip(roles, options, strict=True)):
        costs = search.costs(role, kind)
        others = system.process_bytes * (len(roles) - 1)
        if not sleeps:
            others += sum(rests) - rests[index]
        together = budget = 0
        if costs.role.samples:
            generated = costs.generation(option, others)
            assert generated is not None  # the search has chosen it
            together, budget = generated.together, costs.budget(option, others)
        planned.append(
            PlannedRole(
                role=role,
                layout=option.layout.described(),
                ranks=option.world_size,
                option=option,
                rest_bytes=option.bytes.rest,
                peak_bytes=option.bytes.peak,
                sampler_bytes=budget,
                rows_together=together,
            )
        )
        own_rest = 0 if costs.role.only_samples else option.bytes.rest
        at_once = max(option.bytes.peak, own_rest + budget)
        most = max(most, at_once + others + system.process_bytes)
    return PlannedPool(
        name=roles[0],
        device=group.device.name,
        kind=kind,
        first=first,
        size=best.sizes[number],
        roles=tuple(planned),
        most_bytes=most,
        device_bytes=group.device.memory_bytes,
        busy=busy,
    )


def _reason(search: Search, best: Placement, other: Placement) -> str:
    """Why another placement loses: what grew most on its critical path, and idle pools."""
    step = search.job.step
    path, best_path = (search.timeline(one.sets).critical(one.seconds) for one in (other, best))
    grown = max(path, key=lambda task: other.seconds[task] - best.seconds[task])
    more = other.seconds[grown] - best.seconds[grown]
    added = [task for task in path if task not in best_path]
    waited = sum(other.seconds[task] for task in added)
    text = f"{100 * (other.period / best.period - 1):.1f} % slower"
    if waited > max(more, 0.0):
        names = " and ".join(step.tasks[task].name for task in added)
        text += f": the step waits for {names}, {waited:.3g} s"
    elif more > 0:
        task = step.tasks[grown]
        text += (
            f": {task.name} takes {other.seconds[grown]:.3g} s on "
            f"{_devices(other, task.role)} instead of {best.seconds[grown]:.3g} s on "
            f"{_devices(best, task.role)}"
        )
    busy = _busy(search, other)
    idlest = min(range(len(busy)), key=lambda number: busy[number])
    share = 1 - busy[idlest] / other.period
    if len(busy) > 1 and share > 0.05:
        text += f"; {'+'.join(other.sets[idlest])} idle for {100 * share:.0f} % of the step"
    return text


def _busy(search: Search, placement: Placement) -> list[float]:
    """Seconds of a step in which a role of each pool is at work."""
    pools = pool_numbers(placement.sets)
    busy = [0.0] * len(placement.sets)
    for task, seconds in zip(search.job.step.tasks, placement.seconds, strict=True):
        if task.role in pools:
            busy[pools[task.role]] += seconds
    return busy


def _devices(placement: Placement, role: str) -> str:
    for roles, options in zip(placement.sets, placement.options, strict=True):
        if role in roles:
            number = options[roles.index(role)].world_size
            return f"{number} device{'s' if number > 1 else ''}"
    return "no device"


def phases(plan: Plan, search: Search) -> dict[str, float]:
    """Seconds of the step's tasks by phase, whether or not they overlap."""
    names = {
        TaskKind.GENERATE: "generation",
        TaskKind.UPDATE: "training",
        TaskKind.PUBLISH: "weights",
        TaskKind.TAKE: "weights",
    }
    found: dict[str, float] = {}
    for task, planned in zip(search.job.step.tasks, plan.tasks, strict=True):
        name = names.get(task.kind, "preparation")
        found[name] = found.get(name, 0.0) + planned.end - planned.start
    return found
