r"""What recovery costs: seconds until a run goes on after a kill, and the cut's share of a step.

    python -m pytest -m slow tests/integration/test_kill_matrix.py --basetemp=DIR \
        -o tmp_path_retention_policy=all
    python tests/benchmarks/recovery.py --of DIR             # kills of the matrix
    python tests/benchmarks/recovery.py --quickstart 3       # the cut's share, 3 steps, 3 pairs

Prints one line of JSON. The services of the matrix are forked from a warm process: a start of their
own adds the import of torch, some seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.kill_plans import COORDINATOR, STORE, read_log  # noqa: E402
from support.quickstart_runs import quickstart_records  # noqa: E402


def kind_of(victim: str) -> str:
    if victim in (STORE, COORDINATOR):
        return victim
    return "rank" if " rank " in victim else "role"


def recovery_seconds(folder: Path) -> dict[str, list[float]]:
    """Seconds from a kill until the run goes on, by kind of victim; of second kills the first's.

    Args:
        folder: Of a killed run.
    """
    found: dict[str, list[float]] = defaultdict(list)
    first: dict[str, Any] | None = None
    for line in read_log(folder):
        if "victim" in line:
            first = first or line
        elif first is not None:
            found[kind_of(first["victim"])].append(line["at"] - first["at"])
            first = None
    return found


def of_matrix(directory: Path) -> dict[str, Any]:
    """What the kill matrix has found, from the folders of its runs.

    Args:
        directory: Its --basetemp.
    """
    found: dict[str, list[float]] = defaultdict(list)
    kills, lost = 0, 0
    for folder in sorted(log.parent for log in directory.glob("*/kills.jsonl")):
        if folder.is_symlink():
            # Pytest's name for the newest of a test.
            continue
        kills += sum("victim" in line for line in read_log(folder))
        for kind, seconds in recovery_seconds(folder).items():
            found[kind] += seconds
        summary = json.loads((folder / "run/summary.json").read_text())
        lost += sum(recovered["lost_steps"] for recovered in summary["recoveries"])
    return {
        "kills": kills,
        "lost_steps": lost,
        "seconds": {
            kind: {
                "kills": len(seconds),
                "median": round(statistics.median(seconds), 2),
                "worst": round(max(seconds), 2),
            }
            for kind, seconds in sorted(found.items())
        },
    }


def cut_share(steps: int, pairs: int) -> dict[str, Any]:
    """The quickstart with and without cuts, in turns; the first step of each is warm-up."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cuts: list[float] = []
    for number in range(pairs):
        # The order changes, so that neither is always the one after a quiet machine.
        for has_cuts in (True, False) if number % 2 == 0 else (False, True):
            records = quickstart_records(steps, run={"recovery": {"cuts": has_cuts}})
            seconds[has_cuts] += [record["time/step"] for record in records]
            cuts += [record["time/cut"] for record in records if has_cuts]
    return {
        "steps_each": len(cuts),
        "step_s_with_cuts": round(statistics.median(seconds[True]), 3),
        "step_s_without": round(statistics.median(seconds[False]), 3),
        "cut_s": round(statistics.median(cuts), 3),
        "cut_share": round(statistics.median(cuts) / statistics.median(seconds[True]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, help="--basetemp of the kill matrix")
    parser.add_argument("--quickstart", type=int, default=3, help="steps with and without cuts")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind for --quickstart")
    given = parser.parse_args()
    if given.of is not None:
        print(json.dumps(of_matrix(given.of)))
    else:
        print(json.dumps(cut_share(given.quickstart, given.pairs)))


if __name__ == "__main__":
    main()
