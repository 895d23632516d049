"""Measures this machine: python -m rolemesh.services.preview.primitives cpu|cuda [THREADS].

Prints one JSON object a line: "primitive" as soon as each is known, and "machine" at the end.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings

import torch

from rolemesh.engine.fit.primitives import measured


def main() -> int:
    """Measures, and prints."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    kind = sys.argv[1]
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    for one in measured(device):
        _tell({"type": "primitive", **one})
    _tell(
        {
            "type": "machine",
            "name": torch.cuda.get_device_name(0) if kind == "cuda" else _processor(),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
    )
    return 0


def _processor() -> str:
    """Name of the processor, where the kernel tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _tell(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
