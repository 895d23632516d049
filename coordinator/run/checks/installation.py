"""Checks that the packages of a role are installed, without importing them."""

from __future__ import annotations

import importlib.util

INSTALL = (
    "install rolemesh[gpu], or rolemesh[cpu] with --extra-index-url "
    "https://download.pytorch.org/whl/cpu (`make setup` in a checkout)"
)
"""Remedy when a package is missing. PyPI does not have the CPU build of torch."""


def check_roles_run() -> None:
    """Raises ValueError when no role can be started: this environment has only the coordinator."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"services need torch, which is not installed here: {INSTALL}")
