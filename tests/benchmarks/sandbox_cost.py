"""Measures what a sandbox costs a reward function and an environment.

    python tests/benchmarks/sandbox_cost.py [--rounds 20]

start    milliseconds until a worker has loaded a small function, and those of its processor.
call     milliseconds of a call of 64 rows.
turn     milliseconds of a turn of an environment; without a sandbox it is in the same process.

The kinds that this host has are measured in turns. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.outside_rows import reward_rows

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.sandbox.bubblewrap import bubblewrap, why_not
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sandbox.landlock import landlock_abi
from rolemesh.engine.specs import PythonEnvironmentSpec, PythonRewardSpec
from rolemesh.services.reward.outside.functions.reward import FunctionReward

CALLS, TURNS = 20, 1000
FUNCTION = Path(__file__).parents[1] / "support" / "hostile_rewards.py"
ENVIRONMENT = """
from rolemesh.engine.environments.base import Environment, Observation

class Echo(Environment):
    def reset(self, row): ...
    def step(self, text, end): return Observation(text=text, reward=1.0)
"""


def kinds() -> dict[str, Sandbox]:
    """Those of this host."""
    found = {"none": Sandbox(kind="none")}
    if landlock_abi():
        found["landlock"] = Sandbox(kind="landlock", abi=landlock_abi())
    program = bubblewrap()
    if program is not None and not why_not(program):
        found["bubblewrap"] = Sandbox(kind="bubblewrap", program=program)
    return found


async def function(sandbox: Sandbox) -> dict[str, float]:
    """One worker: its start, and its calls."""
    reward = FunctionReward("it", PythonRewardSpec(function=f"{FUNCTION}:behave"), sandbox)
    rows = reward_rows(*["fine"] * 64)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    await reward.open()
    loaded = time.perf_counter()
    for _ in range(CALLS):
        await reward.judge(rows)
    called = time.perf_counter()
    await reward.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "start_ms": 1e3 * (loaded - started),
        "processor_ms": 1e3 * processor_s,
        "call_ms": 1e3 * (called - loaded) / CALLS,
    }


def turn_ms(sandbox: Sandbox, file: Path) -> float:
    """Median over turns."""
    make = environment_maker(PythonEnvironmentSpec(environment=f"{file}:Echo"), sandbox)
    environment = make()
    environment.reset(Prompt(prompt_id=0, text="Q", tokens=[1], answer="", metadata="{}"))
    seconds = []
    for _ in range(TURNS):
        started = time.perf_counter()
        environment.step("x" * 500, end="end_token")  # type: ignore[call-arg]
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Prints medians by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds()}
    for _ in range(rounds):
        for kind, sandbox in kinds().items():
            found[kind].append(asyncio.run(function(sandbox)))
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "own.py")).write_text(ENVIRONMENT)
        turns = {kind: turn_ms(sandbox, file) for kind, sandbox in kinds().items()}
    told = {
        kind: {
            **{name: statistics.median(one[name] for one in all_) for name in all_[0]},
            "least_start_ms": min(one["start_ms"] for one in all_),
            "turn_ms": turns[kind],
        }
        for kind, all_ in found.items()
    }
    rounded = {
        kind: {name: round(value, 3) for name, value in values.items()}
        for kind, values in told.items()
    }
    print(json.dumps({"benchmark": "sandbox_cost", "rounds": rounds, **rounded}))


if __name__ == "__main__":
    main()
