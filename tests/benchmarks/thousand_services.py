"""Measures runs of 1,000 services in virtual time, with losses, and dispatch to as many.

    python tests/benchmarks/thousand_services.py [--samplers 996] [--losses 10] [--rounds 5]

PPO with calls of given seconds, 4 steps, processes that are lost at random times of the first
32 virtual seconds, 16 s until a new one answers; each schedule in a process of its own. Then
`dispatch.py --only at_once`: milliseconds from ready to sent of 1,000 calls in one instant.

Prints tables in Markdown: virtual seconds are the same on every machine, processor's seconds,
memory and dispatch are not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

SCHEDULES = ("sync", "one_step_ahead", "async")
STEPS, STEP_S = 4, 8.0
COLUMNS = (
    "schedule", "services", "steps made, each once", "seconds of a step", "of all steps",
    "processes lost", "recoveries", "seconds of a recovery", "seconds of work lost",
    "processor's seconds", "MiB resident",
)  # fmt: skip


def row(schedule: str, samplers: int, losses: int) -> list[str]:
    """What a run comes to, as cells of the table."""
    from support.simulated import ppo, simulated

    from rolemesh.coordinator.dataflow.loop.collector import collect_seldom
    from rolemesh.coordinator.simulation.faults import Faults

    # As `rolemesh simulate` does.
    collect_seldom()
    recipe = ppo(samplers=samplers, sampler={"type": schedule}, steps=STEPS)
    began = time.process_time()
    outcome = simulated(
        recipe,
        tokens=2.0 * 2 * recipe.run.prompts_per_step,
        faults=Faults(seed=5, losses=losses, within_s=STEPS * STEP_S),
    )
    spent_s = time.process_time() - began
    assert outcome.commits == tuple(range(1, STEPS + 1)), outcome.commits
    seconds = [one.seconds for one in outcome.recoveries]
    return [
        schedule,
        str(outcome.services),
        str(len(outcome.commits)),
        f"{statistics.median(outcome.step_seconds):.2f}",
        f"{outcome.step_ends[-1]:.1f}",
        str(len(outcome.losses)),
        str(len(seconds)),
        f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-",
        f"{outcome.lost_s:.1f}",
        f"{spent_s:.0f}",
        str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024),
    ]


def dispatched(rounds: int) -> dict[str, Any]:
    """Percentiles of the instant, in milliseconds."""
    import dispatch

    dispatch.collect_seldom()
    return asyncio.run(dispatch.load_of_simulated(rounds, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samplers", type=int, default=996)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    # What one has held must not count for the next.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as own:
        for schedule in SCHEDULES:
            cells = own.submit(row, schedule, arguments.samplers, arguments.losses).result()
            print("| " + " | ".join(cells) + " |", flush=True)
        found = own.submit(dispatched, arguments.rounds).result()
    print()
    for name, clock in (("at_once", "by the clock"), ("at_once_cpu", "processor's time")):
        told = found[name]
        rounds = ", ".join(f"{one:.0f}" for one in told["p99_by_round"])
        print(f"1,000 calls in one instant, ms {clock}: p50 {told['p50']:.1f}, "
              f"p99 {told['p99']:.1f} (by round {rounds})")  # fmt: skip
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
