"""`make audit`: what it takes for a clean answer, and what for none at all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import stat
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", REPOSITORY / "requirements" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOLE = {"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["9.9"]}


def told(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(packages), "fixes": []})


CANARY = told({"name": "jinja2", "version": "2.4.1", "vulns": [HOLE]})
CLEAN = told({"name": "sound", "version": "1.0", "vulns": []})


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "some.lock"
    path.write_text("# A lock.\nsound==1.0 \\\n    --hash=sha256:0\n")
    return path


def service(folder: Path, canary: str, others: str) -> list[str]:
    """A pip-audit whose service knows this."""
    (folder / "canary").write_text(canary)
    (folder / "others").write_text(others)
    program = folder / "pip-audit"
    program.write_text(
        "#!/bin/sh\necho nobody answers >&2\n"
        f'case "$*" in *canary.txt*) cat {folder}/canary ;; *) cat {folder}/others ;; esac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return [str(program)]


def test_packages_without_a_hole_pass(audit: ModuleType, tmp_path: Path, lock: Path) -> None:
    said = audit.audit_holes(service(tmp_path, CANARY, CLEAN), [lock])
    assert said == "no known hole in 1 locked packages"


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        (told({"name": "jinja2", "version": "2.4.1", "vulns": []}), "nothing was audited"),
        (told({"name": "jinja2", "skip_reason": "not found"}), "could not be asked for: jinja2"),
        ("", "said: nobody answers"),
        ("[]", "nothing was audited"),
    ],
    ids=["knows-no-hole", "is-no-service", "no-network", "other-answer"],
)
def test_a_service_that_knows_nothing_is_no_clean_answer(
    audit: ModuleType, tmp_path: Path, lock: Path, canary: str, reason: str
) -> None:
    with pytest.raises(audit.AuditError, match="nothing was audited") as caught:
        audit.audit_holes(service(tmp_path, canary, CLEAN), [lock])
    assert reason in str(caught.value)
    assert "OSV_URL=" in str(caught.value)


def test_a_hole_is_told_with_what_fixes_it(audit: ModuleType, tmp_path: Path, lock: Path) -> None:
    found = told({"name": "sound", "version": "1.0", "vulns": [HOLE]})
    with pytest.raises(audit.AuditError, match=r"sound 1\.0: PYSEC-1 \(CVE-2026-1\).* in 9\.9"):
        audit.audit_holes(service(tmp_path, CANARY, found), [lock])


def test_a_package_that_is_passed_over_is_told(
    audit: ModuleType, tmp_path: Path, lock: Path
) -> None:
    passed = told({"name": "sound", "skip_reason": "not found"})
    with pytest.raises(audit.AuditError, match="1 of 1 packages could not be asked for: sound"):
        audit.audit_holes(service(tmp_path, CANARY, passed), [lock])


def test_a_lock_names_what_this_machine_installs(audit: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text(
        "Every.One==1 \\\n    --hash=sha256:0\nold==2 ; python_full_version < '3.2' \\\n"
        "    --hash=sha256:0\nnew==3 ; python_full_version >= '3.2' \\\n    --hash=sha256:0\n"
    )
    assert audit.locked(lock) == {"every-one": "1", "new": "3"}
    lock.write_text("# empty\n")
    with pytest.raises(audit.AuditError, match="names no package"):
        audit.locked(lock)
    assert audit.locked(REPOSITORY / "requirements" / "cpu.lock").keys() >= {"grpcio", "numpy"}


def metadata(**fields: str | list[str]) -> Message:
    message = Message()
    for name, value in fields.items():
        for one in [value] if isinstance(value, str) else value:
            message[name.replace("_", "-")] = one
    return message


@pytest.mark.parametrize(
    ("given", "licence"),
    [
        ({"License_Expression": "MIT OR Apache-2.0"}, "MIT OR Apache-2.0"),
        ({"Classifier": ["License :: OSI Approved :: MIT License"]}, "MIT"),
        ({"Classifier": ["License :: OSI Approved :: BSD License"]}, "BSD-3-Clause"),
        (
            {"Classifier": ["License :: OSI Approved :: BSD License", "License :: GPL"]},
            "",
        ),
        ({"License": "MIT License\n\nCopyright"}, "MIT"),
        ({"License": "Proprietary"}, "Proprietary"),
        ({}, ""),
    ],
)  # fmt: skip
def test_licences_are_read_in_all_ways_to_say_them(
    audit: ModuleType, given: dict[str, Any], licence: str
) -> None:
    assert audit.licence_of(metadata(**given)) == licence


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("AGPL-3.0-or-later", False),
        ("LGPL-2.1-only", False),
        ("Proprietary", False),
        ("", False),
        ("(MIT)", False),
    ],
)
def test_licences_that_oblige_us_are_not_allowed(
    audit: ModuleType, expression: str, allowed: bool
) -> None:
    assert audit.is_allowed(expression) is allowed


def test_a_package_under_another_licence_is_told(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit.audit_licences(["pytest", "numpy"]).startswith("2 packages")
    # A person has read the licences of these.
    assert audit.audit_licences(["setuptools"]).startswith("1 packages")
    gpl = metadata(License_Expression="GPL-3.0-only")
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: gpl)
    with pytest.raises(audit.AuditError, match=r"pytest has licence 'GPL-3\.0-only': read it"):
        audit.audit_licences(["pytest"])


def test_every_package_of_the_locks_is_allowed(audit: ModuleType) -> None:
    packages = audit.locked(REPOSITORY / "requirements" / "light.lock")
    assert audit.audit_licences(packages).startswith(f"{len(packages)} packages")


@pytest.mark.slow
def test_what_is_installed_is_listed_and_compared_with_the_lock(
    audit: ModuleType, tmp_path: Path
) -> None:
    version = importlib.metadata.version("pytest")
    said = audit.write_sbom({"pytest": version}, tmp_path / "dist")
    assert "environment.cdx.json" in said
    written = json.loads((tmp_path / "dist" / "environment.cdx.json").read_text())
    assert written["bomFormat"] == "CycloneDX"
    assert {"name": "pytest", "version": version}.items() <= {
        part["name"]: part for part in written["components"]
    }["pytest"].items()
    with pytest.raises(audit.AuditError, match=rf"pytest 0\.1 is locked, {version} is installed"):
        audit.write_sbom({"pytest": "0.1"}, tmp_path / "dist")


@pytest.mark.slow
def test_one_failure_fails_the_audit_and_the_rest_is_done(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["--pip-audit", "false", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "holes: FAILED: nothing was audited" in said.err
    assert "licences: " in said.out
    assert "list: " in said.out
