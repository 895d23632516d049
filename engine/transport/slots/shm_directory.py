"""Folder in which shared memory lies, for all who name files there; without torch."""

from __future__ import annotations

from pathlib import Path

SHM_DIRECTORY = Path("/dev/shm")
"""A file system in this host's memory; containers may have one each, or share one."""
