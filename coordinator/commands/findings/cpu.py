"""The CPU of this host: its instructions for products of matrices, and what it multiplies fast.

Read from the kernel and from the user's variables, as `engine/hardware/devices.py` learns it from
torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.commands.findings.findings import Finding, ok, warn
from rolemesh.engine.specs.by_device import (
    BFLOAT16_INSTRUCTIONS,
    Device,
    cpu_of,
    held_to_older,
)

_WORDS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512_BF16",
    "amx_bf16": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
"""Instructions that decide how fast matrices are multiplied, as Linux calls them, and people."""

_NAME = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^(?:flags|Features)\s*:\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """A CPU, as far as it is known."""

    name: str
    cores: int
    """That this process may use."""
    instructions: frozenset[str]
    """Of those above; none: nothing says."""
    held: str
    """Setting of the user that keeps products of bfloat16 from use; empty: none."""
    device: Device
    """What settings depend on."""

    def __str__(self) -> str:
        """E.g. "AMD EPYC, 2 cores, multiplies float32 (no bfloat16 instructions)"."""
        return ", ".join(filter(None, (self.name, self._cores, self.multiplies)))

    @property
    def _cores(self) -> str:
        return f"{self.cores} core{'' if self.cores == 1 else 's'}"

    @property
    def words(self) -> str:
        """Its name, cores and instructions for people."""
        known = [word for name, word in _WORDS.items() if name in self.instructions]
        return ", ".join((self.name, self._cores, *known))

    @property
    def multiplies(self) -> str:
        """What it multiplies fast, and why; empty where nothing says."""
        if not self.instructions:
            return ""
        its = [_WORDS[name] for name in BFLOAT16_INSTRUCTIONS if name in self.instructions]
        if self.device.multiplies_bfloat16:
            return f"multiplies bfloat16 ({' and '.join(its)})"
        if its:
            return f"multiplies float32 ({self.held} keeps its bfloat16 instructions from use)"
        return "multiplies float32 (no bfloat16 instructions)"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_here(
    cpu_info: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] | None = None
) -> Cpu:
    """The CPU of this host.

    Args:
        cpu_info: Where the kernel describes it.
        environment: With the user's variables; None: of this process.
    """
    environment = os.environ if environment is None else environment
    text = cpu_info.read_text() if cpu_info.is_file() else ""
    name, flags = _NAME.search(text), _FLAGS.search(text)
    instructions = frozenset(flags[1].split() if flags else ()).intersection(_WORDS)
    return Cpu(
        name=name[1].strip() if name else platform.machine() or "unknown",
        cores=usable_cores(),
        instructions=instructions,
        held=held_to_older(environment),
        device=cpu_of(instructions, environment),
    )


def check_cpu(cpu: Cpu) -> Finding:
    """The kind of CPU, and whether a setting keeps it from what it could do."""
    if not cpu.instructions:
        return ok("cpu", f"{cpu.words}; its instructions are not known")
    text = f"{cpu.words}: {cpu.multiplies}"
    if cpu.held and not cpu.instructions.isdisjoint(BFLOAT16_INSTRUCTIONS):
        return warn(
            "cpu", text, f"unset {cpu.held.partition('=')[0]}, unless that is what you want"
        )
    return ok("cpu", text)
