"""What doctor finds of cuts in shared memory: each run's, and whether a live one holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rolemesh.coordinator.commands.findings.findings import Finding, ok, warn
from rolemesh.coordinator.run.checks.footprint import gib
from rolemesh.coordinator.run.folders.kept_cuts import ago, kept_cuts
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY


def check_cuts(memory: Path = SHM_DIRECTORY) -> Iterator[Finding]:
    """The cuts that lie on this host, by run."""
    for one in kept_cuts(memory=memory):
        run_id = one.slots.run_id or "(unknown)"
        text = (
            f"{gib(one.slots.num_bytes)} in {memory} are of the run {run_id} "
            f"({', '.join(one.slots.roles)}), written {ago(one.slots.age_s)} ago: {one.state}"
        )
        if one.is_live:
            yield ok("cuts", text)
        else:
            named = f" {run_id}" if one.why_kept else ""
            yield warn("cuts", text, f"`rolemesh cuts --prune{named}` removes them")
