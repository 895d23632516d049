"""Plans of kills: which process of a run is killed in which phase, drawn from a seed.

The observer in `saboteur` carries a plan out from inside the coordinator, which learns of each
phase before anything else does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STORE = "store"
COORDINATOR = "coordinator"

FOLDER = "ROLEMESH_TEST_KILLS"
"""Variable with the folder of the files below."""
PLAN_FILE = "plan.json"
LOG_FILE = "kills.jsonl"
"""A line for each kill, and for each end of a recovery."""


@dataclass(frozen=True)
class Phase:
    """A moment of a run that the coordinator's observer is told of."""

    name: str
    service: str
    """Whose call it is; empty: any service's."""
    stage: str
    """What the call does, as the observer is told."""
    is_end: bool = False
    """The call has been answered; otherwise it has begun."""
    is_evaluation: bool = False
    in_recovery: bool = False
    """While the run recovers from the kill before."""


COMMON = (
    Phase("sampling", "actor", "generate"),
    Phase("scoring by the critic", "critic", "compute_values"),
    Phase("scoring by the reference", "reference", "compute_logprobs"),
    Phase("scoring by the reward", "reward", "compute_reward"),
    Phase("advantages", "actor", "compute_advantages"),
    Phase("update of the critic", "critic", "update"),
    Phase("update of the actor", "actor", "update"),
    Phase("actor updated", "actor", "update", is_end=True),
    Phase("cut of the actor", "actor", "save cut"),
    Phase("cut of the critic", "critic", "save cut"),
    Phase("actor cut", "actor", "save cut", is_end=True),
    Phase("checkpoint", "actor checkpoint", "save checkpoint"),
    Phase("actor's part of it renamed", "actor checkpoint", "save checkpoint", is_end=True),
    Phase("critic's part of it renamed", "critic checkpoint", "save checkpoint", is_end=True),
    Phase("evaluation", "actor", "generate", is_evaluation=True),
    Phase("attaching", "", "attach", in_recovery=True),
    Phase("loading again", "", "initialize", in_recovery=True),
    Phase("going back", "actor", "restore cut", in_recovery=True),
    Phase("gone back", "critic", "restore cut", is_end=True, in_recovery=True),
)

WITH_ROLLOUT = (
    *(phase for phase in COMMON if phase.stage != "generate"),
    Phase("sampling", "rollout-0", "generate"),
    Phase("evaluation", "rollout-1", "generate", is_evaluation=True),
    Phase("publication", "actor", "publish_weights"),
    Phase("weights published", "actor", "publish_weights", is_end=True),
    Phase("weights taken", "rollout-0", "update_weights"),
)

LATE_S = (0.0, 0.0, 0.01, 0.03, 0.1, 0.3)
"""How long after the beginning of its phase a kill may come: calls of a tiny model take so long."""


@dataclass(frozen=True)
class Kill:
    """One kill of a plan."""

    victim: str
    """Name of a service, "actor rank 1", STORE or COORDINATOR."""
    phase: Phase
    late_s: float
    from_step: int
    """Not before so many steps are made."""
    stop_s: float | None = None
    """It is stopped (SIGSTOP) for so long; 0: for good; None: it is killed."""


def plans(
    victims: Sequence[str],
    phases: Sequence[Phase],
    *,
    runs: int,
    kills: int,
    seed: int,
    apart: int = 2,
) -> list[list[Kill]]:
    """Deals pairs of victim and phase out to runs: each pair once before any comes again.

    Args:
        victims: Who may be killed.
        phases: When.
        runs: How many plans to make.
        kills: Kills of each.
        seed: Of the draw.
        apart: Steps that are made between two kills that are not of one recovery.
    """
    draw = random.Random(seed)
    # A recovery has to go on for a second kill in it.
    ordinary = _pairs(draw, victims, [phase for phase in phases if not phase.in_recovery])
    second = _pairs(draw, victims, [phase for phase in phases if phase.in_recovery])
    made = []
    for number in range(runs):
        # Every other run has a kill in a recovery, behind one that makes the run recover.
        has_second = number % 2 == 1
        plan = []
        for index in range(kills - has_second):
            victim, phase = ordinary.pop(0)
            ordinary.append((victim, phase))
            plan.append(Kill(victim, phase, draw.choice(LATE_S), 1 + apart * index))
        if has_second:
            first = next((i for i, kill in enumerate(plan) if _goes_back(kill.victim)), None)
            if first is None:
                first = 0
                plan[0] = Kill("actor", plan[0].phase, plan[0].late_s, plan[0].from_step)
            victim, phase = second.pop(0)
            second.append((victim, phase))
            plan.insert(first + 1, Kill(victim, phase, draw.choice(LATE_S[:4]), 0))
        made.append(plan)
    return made


def _goes_back(victim: str) -> bool:
    """Whether the run goes back when it is killed.

    The store is met again, and what is only read from may be replaced while the step goes on.
    """
    return victim == COORDINATOR or victim.startswith(("actor", "critic"))


def _pairs(
    draw: random.Random, victims: Sequence[str], phases: Sequence[Phase]
) -> list[tuple[str, Phase]]:
    """Each victim with each phase, so that all victims have come before one comes again."""
    orders = [draw.sample(phases, len(phases)) for _ in victims]
    return [
        (victims[number], orders[number][turn])
        for turn in range(len(phases))
        for number in draw.sample(range(len(victims)), len(victims))
    ]


def write_plan(folder: Path, plan: Sequence[Kill]) -> None:
    """Writes a plan for a run's saboteur."""
    (folder / PLAN_FILE).write_text(json.dumps([asdict(kill) for kill in plan], indent=1))


def read_plan(folder: Path) -> list[Kill]:
    """What `write_plan` wrote."""
    return [
        Kill(**(kill | {"phase": Phase(**kill["phase"])}))
        for kill in json.loads((folder / PLAN_FILE).read_text())
    ]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """What a saboteur has noted."""
    log = folder / LOG_FILE
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
