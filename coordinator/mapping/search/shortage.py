"""What is missing where no plan exists: how many devices, for which role, or what to move away."""

from __future__ import annotations

import math
from dataclasses import replace

from rolemesh.coordinator.mapping.job.job import Job, Role
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.search.partitions import set_partitions
from rolemesh.coordinator.mapping.search.search import Search
from rolemesh.coordinator.mapping.simulators.costs import RoleCosts

_MOST_DEVICES = 1024
"""Devices up to which a fitting layout is looked for."""


def shortage(search: Search) -> str:
    """Why a search has found nothing: what each role lacks, or all of them together."""
    job, groups = search.job, search.groups
    texts = [text for role in job.roles if (text := _role_lacks(search, role))]
    if texts:
        return "; ".join(texts)
    wishes = job.wishes
    names = tuple(role.name for role in job.roles)
    least = math.inf
    for sets in set_partitions(names):
        if not wishes.allows(sets):
            continue
        sizes = [
            min(
                (
                    size
                    for kind in range(len(groups))
                    if (size := search.pool(roles, kind).least_size) is not None
                ),
                default=math.inf,
            )
            for roles in sets
        ]
        least = min(least, sum(sizes))
    total = sum(group.count for group in groups)
    if least < math.inf and least > total:
        return (
            f"the placement that is wished needs {least:g} devices, and there are {total}: "
            f"{least - total:g} more, or let roles share devices"
        )
    if not job.system.sleeps or any(group.device.kind == "cpu" for group in groups):
        return (
            "each role fits by itself, but those that would share devices do not fit together, and "
            f"{total} are too few to keep them apart: give more devices, or smaller models"
        )
    return (
        f"no placement fits the {total} devices with what is wished: give more devices, or take "
        "wishes back"
    )


def _role_lacks(search: Search, role: Role) -> str | None:
    """What a role lacks by itself; None where some layout fits."""
    job = search.job
    kind_wished = job.wishes.on.get(role.name)
    answers = []
    for group in search.groups:
        if kind_wished not in (None, group.device.name):
            continue
        most = min(group.count, job.wishes.devices.get(role.name, group.count))
        # Beside others that sleep, a role has the memory of their processes less.
        others = job.system.process_bytes * _mates(job, role)
        if _least(job, role, group, most, others) is not None:
            return None
        answers.append((group, most, others))
    group, most, others = answers[0]
    name = group.device.name
    wanted = _least(job, role, group, _MOST_DEVICES, others)
    moved = None
    if role.trains and True not in role.freedom.offload:
        freedom = replace(role.freedom, offload=(True,))
        moved = _least(job, replace(role, freedom=freedom), group, _MOST_DEVICES, others)
    offload = ""
    if moved is not None and (wanted is None or moved < wanted):
        more = moved - most
        offload = " or offload" if more <= 0 else f" or offload and {more} more"
    if wanted is None:
        needed = f"{role.name} fits on no number of {name} up to {_MOST_DEVICES}"
        remedy = f"{offload.removeprefix(' or ')}, " if offload else ""
        return f"{needed}: give {remedy}devices with more memory, or shorter rows"
    number = wanted - most
    return f"{role.name} needs {number} more {name} GPU{'s' if number > 1 else ''}{offload}"


def _mates(job: Job, role: Role) -> int:
    """Fewest roles that a role has to share a pool with, as the wishes have it."""
    names = tuple(one.name for one in job.roles)
    return min(
        len(pool) - 1
        for sets in set_partitions(names)
        if job.wishes.allows(sets)
        for pool in sets
        if role.name in pool
    )


def _least(job: Job, role: Role, group: DeviceGroup, most: int, others: float) -> int | None:
    """Fewest devices on which a role fits; None: no number up to `most` does."""
    number = 1
    while True:
        number = min(number, most)
        costs = RoleCosts(job, role, replace(group, count=number))
        for option in costs.options:
            if costs.seconds(option, others) is not None:
                return option.world_size
        if number == most:
            return None
        number *= 2
