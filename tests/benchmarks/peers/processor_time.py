"""Processor time of a process and all that it has started, read from the kernel's tables."""

from __future__ import annotations

import os
from pathlib import Path


def tree_seconds(root: int) -> float:
    """Core seconds of a process and of its children that live, with those of their ended ones."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The command before the last bracket may have spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(folder.name)
        parents[number] = int(fields[1])
        ticks[number] = sum(map(int, fields[11:15]))
    found = {root}
    grows = True
    while grows:
        more = {number for number, parent in parents.items() if parent in found} - found
        found |= more
        grows = bool(more)
    return sum(ticks.get(number, 0) for number in found) / os.sysconf("SC_CLK_TCK")
