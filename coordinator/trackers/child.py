"""The process of one outside tracker: reads the run from standard input, answers each line.

Lines are JSON objects: {"spec", "run", "config"} first, then {"step", "scalars"} each, then
{"state"}. Each is answered with {"of": "start", "log" or "finish"}, and "error" where it failed.
What the tracker's package prints goes to standard error, which is the log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from rolemesh.coordinator.recipe.sections.trackers import TrackerSpec
from rolemesh.coordinator.trackers.registry import make_tracker
from rolemesh.coordinator.trackers.tracker import RunFacts, Tracker
from rolemesh.engine.specs.urls import masked_text

EXIT_NOT_STARTED = 3
"""The tracker could not be started: there is nothing to log to."""

_LONGEST_ERROR = 2_000
"""Characters; the log has all of it."""


def main() -> int:
    """Serves one tracker until its run has ended."""
    # Before any package can print: standard output belongs to the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answered(of: str, work: Callable[..., None], *arguments: Any) -> bool:
            answer = {"of": of}
            try:
                work(*arguments)
            except Exception as error:
                # The package's code, or a user's: it may raise anything.
                print(masked_text(traceback.format_exc()), end="", file=sys.stderr)
                answer["error"] = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            return "error" not in answer

        first = json.loads(sys.stdin.readline())
        tracker: Tracker | None = None

        def start() -> None:
            nonlocal tracker
            tracker = make_tracker(TypeAdapter(TrackerSpec).validate_python(first["spec"]))
            tracker.start(RunFacts(**first["run"]), first["config"])

        if not answered("start", start) or tracker is None:
            return EXIT_NOT_STARTED
        for line in sys.stdin:
            told: dict[str, Any] = json.loads(line)
            if "state" in told:
                answered("finish", tracker.finish, told["state"])
                return 0
            answered("log", tracker.log, told["step"], told["scalars"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
