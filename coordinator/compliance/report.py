"""Findings for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.compliance.check import Check, Finding
from rolemesh.coordinator.compliance.contract import Level, Outcome

_COLOURS = {Outcome.HOLDS: "green", Outcome.BROKEN: "red"}


def print_findings(console: Console, findings: Sequence[Finding], address: str, role: str) -> None:
    """Prints a table with a row for each check that ran, then details of the broken ones."""
    table = Table(title=f"{role} at {address}", title_justify="left", box=box.SIMPLE)
    for heading in ("check", "level", "outcome", "s"):
        table.add_column(heading, justify="right" if heading == "s" else "left", no_wrap=True)
    unsaid: dict[str, list[str]] = {}
    for finding in findings:
        if finding.outcome in (Outcome.SKIPPED, Outcome.NOT_RUN):
            why = f"{finding.outcome.value}, {finding.came}"
            unsaid.setdefault(why, []).append(finding.check.check_id)
            continue
        table.add_row(
            finding.check.check_id,
            finding.check.level.value,
            Text(finding.outcome.value, _COLOURS[finding.outcome]),
            f"{finding.seconds:.2f}",
        )
    console.print(table)
    for why, names in unsaid.items():
        console.print(Text(f"{why}: {', '.join(names)}\n"), soft_wrap=True)
    for finding in findings:
        if finding.outcome is not Outcome.BROKEN:
            continue
        colour = "red" if finding.check.level is Level.MUST else "yellow"
        console.print(Text(f"{finding.check.check_id} ({finding.check.level.value})", colour))
        for heading, text in (
            ("contract", finding.check.contract),
            ("sent", finding.sent),
            ("came", finding.came),
            ("remedy", finding.remedy),
        ):
            console.print(Text(f"  {heading:<9}{text}"), soft_wrap=True)
        console.print()
    console.print(Text(summarise(findings)), soft_wrap=True)


def summarise(findings: Sequence[Finding]) -> str:
    """One line with the number of checks by level and outcome."""
    counts = Counter((finding.check.level, finding.outcome) for finding in findings)
    parts = []
    for level in Level:
        of_level = [
            f"{counts[level, outcome]} {outcome.value}"
            for outcome in Outcome
            if counts[level, outcome]
        ]
        parts.append(f"{level.value}: {', '.join(of_level) or 'none'}")
    verdict = "not all MUST hold" if any(one.is_failure for one in findings) else "all MUST hold"
    return f"{'; '.join(parts)} - {verdict}"


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Prints all checks."""
    table = Table(box=box.SIMPLE)
    for heading in ("check", "level", "contract"):
        table.add_column(heading, no_wrap=heading != "contract")
    for one in checks:
        table.add_row(one.check_id, one.level.value, Text(one.contract))
    console.print(table)
