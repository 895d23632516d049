"""Wheel and sdist as an index would serve them, the same bytes each time: `make dist`.

Made in a copy, so that neither an older build nor this machine's file modes get in. Times are those
of SOURCE_DATE_EPOCH, else of the last commit, else of 1980. Needs `build` and setuptools.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = (
    *("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"),
    *("coordinator", "engine", "protos", "services", "src"),
)
"""What a distribution is made of."""

_OLDEST = 315532800
"""1980: a zip file knows no earlier year."""


def main() -> None:
    """Writes both into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write; distributions in it are removed")
    out: Path = parser.parse_args().out.absolute()
    time_s = source_time_s()
    with tempfile.TemporaryDirectory(prefix="rolemesh-dist-") as folder:
        source = Path(folder) / "source"
        copy_sources(source)
        made = Path(folder) / "dist"
        build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel"]
        subprocess.run(
            [*build, "--outdir", str(made), str(source)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(time_s)},
            umask=0o022,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        out.mkdir(parents=True, exist_ok=True)
        for old in [*out.glob("rolemesh-*.whl"), *out.glob("rolemesh-*.tar.gz")]:
            old.unlink()
        for wheel in made.glob("*.whl"):
            shutil.copyfile(wheel, out / wheel.name)
        for sdist in made.glob("*.tar.gz"):
            repack(sdist, out / sdist.name, time_s)


def source_time_s() -> int:
    """The time that files in a distribution get."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
        try:
            given = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return _OLDEST
    return max(int(given), _OLDEST)


def copy_sources(target: Path) -> None:
    """Copies what a distribution is made of, with links as links and plain modes."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    target.mkdir()
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copyfile(path, target / name)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def repack(sdist: Path, target: Path, time_s: int) -> None:
    """The same archive in one order, and of no user: setuptools writes the clock into it."""
    with (
        tarfile.open(sdist) as old,
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=time_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime = time_s
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


if __name__ == "__main__":
    main()
