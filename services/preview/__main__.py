"""Looks at a recipe's data and rewards: python -m rolemesh.services.preview < SPEC.

SPEC is a `PreviewSpec` in JSON. Prints one JSON object a line as soon as each is known: "models",
"reading" while rows are read, "data", "prompt", "lengths", "environment", "reward", "functions",
and "error" for what a role would fail with at its start. Always ends with exit code 0 unless it
cannot work at all: what is found is for the caller to judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from typing import Any

SHOWN_CHARACTERS = 2000
"""Most characters of a text that are printed."""
_READING_EVERY_S = 0.5


def main() -> int:
    """Reads the spec, looks, and prints."""
    try:
        from rolemesh.engine.granted.own_functions import OwnFunctions
        from rolemesh.engine.granted.user_code import UserCodeError
        from rolemesh.services.preview.looking import Preview, PreviewSpec, families_of
    except ModuleNotFoundError as error:
        _tell("error", what="packages", text=f"{error.name} is not installed here")
        return 0
    spec = PreviewSpec.model_validate_json(sys.stdin.read())
    try:
        families, faults = families_of(spec.models)
        for fault in faults:
            _tell("error", what="models", text=fault)
        if faults:
            return 0
        _tell("models", families=families)
        preview = Preview(spec, _Reading())
        _tell("data", **preview.counts())
        prompt, completion = preview.first()
        if prompt is not None:
            shown = prompt.text[:SHOWN_CHARACTERS]
            _tell(
                "prompt",
                text=shown,
                num_tokens=len(prompt.tokens),
                answer=prompt.answer[:SHOWN_CHARACTERS],
                completion=completion[:SHOWN_CHARACTERS],
            )
        lengths = preview.lengths()
        if lengths is not None:
            _tell("lengths", **lengths)
        teachers = preview.teachers()
        if teachers is not None:
            _tell("teachers", **teachers)
    except ModuleNotFoundError as error:
        _tell("error", what="packages", text=f"{error.name} is not installed here")
        return 0
    except ValueError as error:
        _tell("error", what="data", text=str(error))
        return 0
    if spec.environment is not None:
        try:
            # What the user's code prints is none of our lines.
            with contextlib.redirect_stdout(sys.stderr):
                name = preview.environment()
        except UserCodeError as error:
            _tell("error", what="environment", text=str(error))
        else:
            _tell("environment", name=name)
    for found in asyncio.run(preview.rewards()):
        _tell("reward", **found)
    if spec.own_functions:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                OwnFunctions(spec.own_functions)
        except UserCodeError as error:
            _tell("error", what="functions", text=str(error))
        else:
            _tell("functions", names=[one.function for one in spec.own_functions.values()])
    return 0


class _Reading:
    """Tells twice a second that rows are read."""

    def __init__(self) -> None:
        self._next = math.inf

    def __call__(self) -> None:
        now = time.monotonic()
        # Nothing is told of data that is read at once.
        is_first, is_due = math.isinf(self._next), now >= self._next
        if is_due:
            _tell("reading")
        if is_first or is_due:
            self._next = now + _READING_EVERY_S


def _tell(kind: str, **values: Any) -> None:
    print(json.dumps({"type": kind, **values}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
