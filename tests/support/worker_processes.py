"""Processes that run the code of users, and that this process has started."""

from __future__ import annotations

import psutil
from support.commands import command_of

REWARD_FUNCTIONS = "rolemesh.services.reward.outside.functions.worker"


def worker_processes(module: str = REWARD_FUNCTIONS) -> list[psutil.Process]:
    """Those of a module that live. Other tests of the session keep other processes."""
    return [child for child in psutil.Process().children() if module in command_of(child)]
