"""Checks that the packages of a role are installed, without importing them."""

from __future__ import annotations

import importlib.util

INSTALL = (
    "install rolemesh[gpu], or rolemesh[cpu] with --extra-index-url "
    "https://download.pytorch.org/whl/cpu (`make setup` in a checkout)"
)
"""What to do where it is not. PyPI has no torch of the build for a CPU."""


def check_roles_run() -> None:
    """Raises ValueError where no role can be started: this environment only coordinates."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"services need torch, which is not installed here: {INSTALL}")
