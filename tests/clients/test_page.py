"""Tests of the page on clients: its programs run as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.client_programs import PAGE, PROGRAMS, program_of_page, python_of, run
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients

REQUIREMENTS = Path(__file__).with_name("requirements")


@pytest.mark.parametrize(
    ("client", "heading", "num_calls", "forced"),
    [("openai", "openai", 2, ()), ("mcp", "Servers of tools: mcp", 1, (0,))],
    ids=["openai", "mcp"],
)
def test_a_program_of_the_page_runs(
    policy: ServedPolicy, client: str, heading: str, num_calls: int, forced: tuple[int, ...]
) -> None:
    session = policy.open(seed=5)
    said = run(client, "python", "-c", program_of_page(heading), session=session, folder=PROGRAMS)
    assert said.strip()
    kept = policy.kept(session)
    assert len(kept["calls"]) == num_calls
    assert len(kept["branches"]) == 1
    policy.check_exact(kept, forced=forced)


@pytest.mark.parametrize(
    ("file", "package", "version"),
    [
        ("openai", "openai", "3.51.0"),
        ("verifiers", "verifiers", "0.4.0"),
        ("openenv", "openenv", "0.10.0"),
        ("mcp", "mcp", "2.3.0"),
        ("nemo_gym", "nemo-gym", "0.4.0"),
        ("evaluation", "lm_eval", "0.4.13"),
        ("evaluation", "inspect_ai", "0.3.285"),
    ],
)
def test_versions_of_the_page_are_those_that_are_tested(
    file: str, package: str, version: str
) -> None:
    assert f"{package}=={version}" in (REQUIREMENTS / f"{file}.txt").read_text().splitlines()
    assert f"| {version} |" in PAGE or version in PAGE
    python_of(file)
