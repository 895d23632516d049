"""Runs the parts of a few minutes with a GPU one after another, and writes one JSON report.

Standard library alone: what a machine lacks is a line of the report. `minutes_parts` has the parts;
each is a process of its own, which is ended with all its children when its time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gather_wheels import wheels_in
from minutes_marks import marks
from minutes_processes import adopt_orphans, found_in, run_part

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
BUDGET_S = 540.0
INSTALL_LIMIT_S = 90.0


@dataclass(frozen=True)
class Part:
    """A part's place in the budget."""

    expected_s: float
    """On an H100: it is left out where less than this is left."""
    limit_s: float
    """The longest that it may take."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is set for it beside the script's own environment."""
    rehearsed_s: float = 20.0
    """What it takes in a rehearsal on two slow cores."""


PARTS: dict[str, Part] = {
    "probe": Part(20, 60, rehearsed_s=15),
    "tests_trainer": Part(45, 120, rehearsed_s=15),
    "speed_fixed": Part(85, 160, rehearsed_s=60),
    "speed_ragged": Part(65, 130),
    "speed_expandable": Part(20, 60, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "kernels": Part(35, 90),
    "memory": Part(35, 90),
    "ranks": Part(45, 120, rehearsed_s=25),
    "tests_ranks": Part(55, 150, rehearsed_s=15),
    "mesh": Part(70, 180, rehearsed_s=110),
    "flex": Part(40, 100),
    # From here on for more than the budget of one call.
    "tests_services": Part(60, 180, rehearsed_s=15),
    "tests_kernels": Part(60, 180, rehearsed_s=15),
    "deterministic": Part(
        45, 120, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}, 25
    ),
    "several_gpus": Part(60, 240, rehearsed_s=10),
    "vllm": Part(200, 600, rehearsed_s=10),
    "mesh_vllm": Part(200, 600, rehearsed_s=10),
    "trl": Part(300, 900, rehearsed_s=10),
}
"""In their order."""

COMMON = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # What is compiled once is there for all the processes of all the parts.
    "PYTHONDONTWRITEBYTECODE": "",
    # To ask whether there is a device must not start CUDA: ranks are forked later.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
REHEARSAL = {
    "GPU_MINUTES_REHEARSAL": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}


class Report:
    """The report's file: whole at any moment, and what a call before this one has found."""

    def __init__(self, path: Path, *, is_rehearsal: bool) -> None:
        self.path = path
        self.log = path.with_suffix(".log")
        self.running = path.with_suffix(".running.json")
        self._values: dict[str, Any] = {"parts": {}}
        if path.exists():
            self._values = json.loads(path.read_text())
            if bool(self._values.get("rehearsal")) != is_rehearsal:
                raise ValueError(
                    f"{path} is {'no ' if is_rehearsal else ''}report of a rehearsal: give "
                    "another --out"
                )
        self._values |= {
            "report": "rolemesh gpu minutes",
            "date": now(),
            "commit": commit(),
            "python": f"{sys.executable} {platform.python_version()}",
            "platform": platform.platform(),
            "rehearsal": is_rehearsal,
        }
        self.interrupt("the script was killed while it ran")

    @property
    def parts(self) -> dict[str, Any]:
        """By name."""
        parts: dict[str, Any] = self._values["parts"]
        return parts

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What the figures are held against."""
        found = {name: part.get("found", {}) for name, part in self.parts.items()}
        return list(marks(found, is_rehearsal=self._values["rehearsal"]))

    def begin(self, name: str) -> None:
        """Takes note that a part runs: whoever kills all of this leaves that much."""
        self.running.unlink(missing_ok=True)
        self.write(running=name)

    def put(self, name: str, part: dict[str, Any]) -> None:
        """Writes what became of a part; what it came to before is kept if it was no success."""
        before = self.parts.get(name, {})
        earlier = before.pop("earlier", [])
        if before.get("status") in ("failed", "interrupted"):
            earlier.append(before)
        self.parts[name] = part | ({"earlier": earlier} if earlier else {})
        self.write(running=None)

    def interrupt(self, reason: str) -> None:
        """Puts down what the part that runs had found, if one does."""
        if name := self._values.get("running"):
            found = found_in(self.running)
            self.put(name, {"status": "interrupted", "reason": reason, "found": found})
        self.running.unlink(missing_ok=True)

    def write(self, **values: Any) -> None:
        """Writes the file, with further values at its top."""
        self._values |= values
        probe = self.parts.get("probe", {}).get("found", {})
        self._values |= {name: probe[name] for name in ("device", "versions") if name in probe}
        self._values["marks"] = self.marks
        # The parts come last, they are long.
        self._values["parts"] = self._values.pop("parts")
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self._values, indent=1) + "\n")
        whole.replace(self.path)

    def has_failed(self) -> bool:
        """Whether a part has."""
        return any(part["status"] == "failed" for part in self.parts.values())


def run_parts(
    report: Report, given: argparse.Namespace, folder: Path, deadline: float, path: Sequence[Path]
) -> None:
    """Runs what is asked for, is not done and fits; raises KeyboardInterrupt when told to end."""
    common = {**COMMON, **(REHEARSAL if given.rehearse else {})}
    common |= {
        "PYTHONPATH": os.pathsep.join(
            [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "GPU_MINUTES_SHARED": str(folder / "shared"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    (folder / "shared").mkdir()
    stop = ""
    for name in given.only:
        part, before = PARTS[name], report.parts.get(name)
        status = "" if before is None else before["status"]
        if status == "ok" and name not in given.again:
            continue
        if stop:
            report.put(name, {"status": "skipped", "reason": stop})
            continue
        left = deadline - time.monotonic()
        expected = part.rehearsed_s if given.rehearse else part.expected_s
        if left < expected:
            # A failure says more than that there was no time to try again.
            if status not in ("failed", "interrupted"):
                reason = f"{left:.0f} s are left, it takes about {expected:.0f} s"
                report.put(name, {"status": "left out", "reason": reason})
            continue
        # Two slow cores may be busy besides.
        limit_s = part.limit_s * given.scale * (2 if given.rehearse else 1)
        report.begin(name)
        said = run_one(report, name, min(limit_s, left), common, folder)
        stop = str(said["found"].pop("stop", ""))
        report.put(name, said)
        print(f"{name}: {said['status']} ({said['seconds']} s)", file=sys.stderr, flush=True)


def run_one(
    report: Report, name: str, limit_s: float, common: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Runs a part in a folder for its temporary files, which goes with it."""
    own = folder / name
    own.mkdir()
    with report.log.open("a") as log:
        log.write(f"\n=== {name}, {now()}, at most {limit_s:.0f} s\n")
    try:
        return run_part(
            [sys.executable, str(HERE / "minutes_parts.py"), name],
            report.running,
            report.log,
            limit_s,
            {**common, "TMPDIR": str(own), **PARTS[name].environment},
        ) | {"date": now(), "commit": commit()}
    finally:
        shutil.rmtree(own, ignore_errors=True)


def install(wheels: Path, target: Path) -> dict[str, Any]:
    """Installs a folder of wheels without a network; says how many and how long it took."""
    names = wheels_in(wheels)
    if not names:
        raise ValueError(f"{wheels} holds no wheel: make gpu-wheels fills it, with a network")
    started = time.monotonic()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-compile", "--no-cache-dir", "--disable-pip-version-check"),
            *("--target", str(target), *map(str, names)),
        ],
        check=True,
        timeout=INSTALL_LIMIT_S,
    )
    return {
        "wheels": len(names),
        "bytes": sum(wheel.stat().st_size for wheel in names),
        "seconds": round(time.monotonic() - started, 1),
    }


def name_rolemesh(site: Path) -> None:
    """Says which version of rolemesh lies on the path: a run asks, and nothing is installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = site / f"rolemesh-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: rolemesh\nVersion: {project['version']}\n"
    )


def stop(number: int, frame: object) -> None:
    """Ends the part that runs; the report tells of those before it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_minutes.sh", description=(__doc__ or "")[:72])
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of this call")
    parser.add_argument("--out", type=Path, default=Path("gpu-minutes/report.json"))
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--only", help="parts, with commas between")
    parser.add_argument("--again", default="", help="parts to run though they are done")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the parts' limits")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--list", action="store_true", help="the parts and their seconds")
    given = parser.parse_args(arguments)
    given.again = [name for name in given.again.split(",") if name]
    given.only = given.only.split(",") if given.only else list(PARTS)
    for name in (*given.only, *given.again):
        if name not in PARTS:
            parser.error(f"there is no part {name!r}: parts are {', '.join(PARTS)}")
    return given


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; returns 0 unless one failed."""
    deadline = time.monotonic()
    given = parsed(arguments)
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:18} about {part.expected_s:4.0f} s, at most {part.limit_s:4.0f} s")
        return 0
    deadline += given.budget
    given.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = Report(given.out, is_rehearsal=given.rehearse)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(prefix="rm-gpu-") as temporary:
        folder = Path(temporary)
        path = [REPOSITORY / "src", REPOSITORY / "tests", HERE, folder / "site"]
        try:
            if given.wheels is not None:
                report.write(wheels=install(given.wheels, folder / "site"))
            name_rolemesh(folder / "site")
            run_parts(report, given, folder, deadline, path)
        except (ValueError, subprocess.SubprocessError) as error:
            report.write(error=f"the wheels could not be installed: {error}")
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            report.interrupt("the script was told to end while it ran")
    report.write(seconds=round(given.budget - (deadline - time.monotonic()), 1))
    for mark in report.marks:
        print(f"{mark['mark']}: {mark['value']}, {mark['aim']}", file=sys.stderr)
    print(given.out)
    return int(report.has_failed())


def now() -> str:
    """Date and time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def commit() -> str:
    """Of the checkout, "-dirty" after it where it was changed; empty outside of one.

    A copy that has no history is told by the variable GPU_MINUTES_COMMIT.
    """
    if told := os.environ.get("GPU_MINUTES_COMMIT"):
        return told
    try:
        return subprocess.run(
            ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
