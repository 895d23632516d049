"""The parts, one a process: minutes_parts.py PART RESULT.json.

Each writes what it finds as it goes, so that a part which is ended early still tells something.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from gather_wheels import installed, lacking
from gpu_minutes import PARTS
from minutes_processes import SKIPPED

MODULES = {
    "probe": "minutes_probe",
    "speed_fixed": "minutes_speed",
    "deterministic": "minutes_speed",
    "speed_ragged": "minutes_ragged",
    "speed_expandable": "minutes_ragged",
    "kernels": "minutes_kernels",
    "memory": "minutes_memory",
    "ranks": "minutes_ranks",
    "several_gpus": "minutes_ranks",
    "mesh": "minutes_mesh",
    "mesh_vllm": "minutes_mesh",
    "trl": "minutes_mesh",
    "flex": "minutes_kernels",
    **dict.fromkeys(
        ("tests_trainer", "tests_ranks", "tests_services", "tests_kernels", "vllm"), "minutes_tests"
    ),
}
"""Where each part stands, as a function of its name. They are imported when they are needed: what a
machine lacks is to be found in a second, before torch is."""


def end(number: int, frame: FrameType | None) -> None:
    """Takes temporary files and children along."""
    raise SystemExit(128 + number)


def main(name: str, path: str) -> int:
    """Runs one part."""
    signal.signal(signal.SIGTERM, end)
    # Where it stood when its time was over; then `end` is called.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    if missing := lacking(installed()):
        said = f"missing or too old: {', '.join(missing)}: give --wheels (make gpu-wheels)"
        Path(path).write_text(json.dumps({"stop": said}))
        print(said, file=sys.stderr)
        return 1
    from minutes_tools import IS_REHEARSAL, Found, Skip

    found = Found(Path(path))
    try:
        if not IS_REHEARSAL:
            check_device(found)
        getattr(importlib.import_module(MODULES[name]), name)(found)
    except Skip as reason:
        found["skipped"] = str(reason)
        return SKIPPED
    return 0


def check_device(found: object) -> None:
    """Skips this part and all that follow where there is no GPU."""
    import torch
    from minutes_tools import Skip

    if not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} sees no CUDA device (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
        found["stop"] = reason  # type: ignore[index]
        raise Skip(reason)


assert MODULES.keys() == PARTS.keys()

if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
