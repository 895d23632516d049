"""Runs the parts of the first hour with GPUs one after another, and prints one JSON report.

Standard library alone: what a machine lacks is a line of the report. `first_hour_parts` has the
parts; each is a process of its own, which is ended with all its children when its time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKIPPED = 77
"""Exit code of a part that cannot be done here; its result says why."""
PROBE_LIMIT_S = 120.0
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
LAST_LINES = 25
"""Of the log of a part that failed."""

LIMITS_S = {
    "devices": 60.0,
    "nccl": 240.0,
    "tests_gpu": 900.0,
    "trainer_sleep": 240.0,
    "fsdp": 240.0,
    "mesh": 600.0,
    "update_speed": 360.0,
    "update_speed_triton": 360.0,
    "publication": 240.0,
    "trl": 300.0,
}
"""The parts in their order, and the longest that each may take."""
ENVIRONMENTS = {
    "update_speed": {"ROLEMESH_KERNELS": "torch"},
    "update_speed_triton": {"ROLEMESH_KERNELS": "triton"},
}
"""What is set for a part beside the script's own environment.

The same updates by either kernels, each in a process of its own: a kernel that does not compile, or
that writes where it should not, is a part that failed, and takes no other figure with it.
"""

_PROBE = """
import torch
print(f"torch {torch.__version__} sees no CUDA device" if not torch.cuda.is_available() else "")
"""


def no_device() -> str:
    """Why nothing can be done on a GPU here; empty where there is one."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"torch did not say within {PROBE_LIMIT_S:.0f} s whether there is a device"
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{sys.executable} cannot look for a device: {last}"
    return probe.stdout.strip()


def run_part(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a part and ends it, and all that it started, at its limit.

    Args:
        command: Of the part; it is given a file for its result as the last argument.
        folder: For the result and the log; exists.
        limit_s: Seconds that it may take.
        environment: What is set for it beside the environment of this process.

    Returns:
        "status" (ok, failed, skipped), "seconds", what it found, and why it failed or was skipped.
    """
    result, log = folder / "result.json", folder / "log.txt"
    started = time.monotonic()
    with log.open("wb") as output:
        part = subprocess.Popen(
            [*command, str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code: int | None = part.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(part)
    report: dict[str, Any] = {"status": "ok", "seconds": round(time.monotonic() - started, 1)}
    # What it had found when it was ended counts too.
    found = json.loads(result.read_text()) if result.exists() else {}
    reason = found.pop("skipped", "")
    report["found"] = found
    if code == SKIPPED:
        return report | {"status": "skipped", "reason": reason}
    if code == 0:
        return report
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    how = f"did not end within {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
    return report | {"status": "failed", "error": how, "log": lines}


def end_group(part: subprocess.Popen[bytes]) -> None:
    """Ends a part's process group: also what it left behind when it ended by itself.

    Not waited for longer than that: a process that hangs in the driver cannot be ended.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(part.pid, number)
        except ProcessLookupError:
            break
        try:
            part.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def stop(number: int, frame: object) -> None:
    """Ends the part that runs; the report tells of those before it."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; returns 0 unless one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(LIMITS_S), help="parts, with commas between")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--out", type=Path, help="file for the report as well")
    parser.add_argument("--list", action="store_true", help="the parts and their limits")
    given = parser.parse_args(arguments)
    if given.list:
        print(json.dumps(LIMITS_S, indent=1))
        return 0
    names = given.only.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"--only has {unknown[0]!r}: parts are {', '.join(LIMITS_S)}")
    signal.signal(signal.SIGTERM, stop)
    report: dict[str, Any] = {
        "report": "rolemesh first hour",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": f"{sys.executable} {platform.python_version()}",
        "platform": platform.platform(),
        "commit": commit(),
        "parts": {},
    }
    parts = report["parts"]
    missing = no_device()
    try:
        with tempfile.TemporaryDirectory(prefix="rolemesh-first-hour-") as folder:
            for name in names:
                if missing:
                    parts[name] = {"status": "skipped", "reason": missing}
                    continue
                print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
                own = Path(folder) / name
                own.mkdir()
                command = [sys.executable, str(HERE / "first_hour_parts.py"), name]
                limit_s = LIMITS_S[name] * given.scale
                parts[name] = run_part(command, own, limit_s, ENVIRONMENTS.get(name))
                print(f"{parts[name]['status']} ({parts[name]['seconds']} s)", file=sys.stderr)
    except KeyboardInterrupt:
        for name in names:
            parts.setdefault(name, {"status": "skipped", "reason": "interrupted before its end"})
    text = json.dumps(report, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return int(any(part["status"] == "failed" for part in parts.values()))


def commit() -> str:
    """Of the checkout; empty outside of one."""
    try:
        return subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
