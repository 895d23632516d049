"""What identities (mutual TLS) cost a step of the quickstart.

    python tests/benchmarks/encryption.py --steps 3 --pairs 3

Prints one line of JSON: seconds of a step with and without, as medians over all steps of the pairs,
and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.quickstart_runs import quickstart_records

MODULES = {True: "rolemesh.coordinator.commands.cli", False: "support.plain_cli"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps of each run that count")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind")
    given = parser.parse_args()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(given.pairs):
        # The order changes, so that neither is always the one after a quiet machine.
        for is_encrypted in (True, False) if number % 2 == 0 else (False, True):
            records = quickstart_records(given.steps, run={}, module=MODULES[is_encrypted])
            seconds[is_encrypted] += [record["time/step"] for record in records]
    encrypted, plain = (statistics.median(seconds[key]) for key in (True, False))
    print(
        json.dumps(
            {
                "steps_each": len(seconds[True]),
                "step_s_encrypted": round(encrypted, 3),
                "step_s_plain": round(plain, 3),
                "ratio": round(encrypted / plain, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
