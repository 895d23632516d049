"""The parts of the first hour with GPUs, one a process: first_hour_parts.py PART RESULT.json.

Each writes what it finds as it goes, so that a part which is ended early still tells something.
None has run on a GPU yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from first_hour import SKIPPED
from first_hour_checks import devices, tests_gpu
from first_hour_meshes import mesh, trl
from first_hour_ranks import fsdp, nccl
from first_hour_speed import publication, trainer_sleep, update_speed
from first_hour_tools import Found, Skip

PARTS: dict[str, Callable[[Found], None]] = {
    **{part.__name__: part for part in (devices, nccl, tests_gpu, trainer_sleep, fsdp, mesh)},
    "update_speed": update_speed,
    "update_speed_triton": update_speed,
    **{part.__name__: part for part in (publication, trl)},
}
"""By name, in the order of the script, which gives the second `update_speed` other kernels."""


def main(name: str, path: str) -> int:
    """Runs one part."""
    found = Found(Path(path))
    try:
        PARTS[name](found)
    except Skip as reason:
        found["skipped"] = str(reason)
        return SKIPPED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
