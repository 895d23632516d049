"""A call of a service without the service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rolemesh.rpc.errors import UnavailableError


class FakeCall:
    """Computes at once."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.is_wanted = True

    async def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        self.stages.append(stage)
        if not self.is_wanted:
            raise UnavailableError("the service drains", reason="SERVICE_DRAINING")

    def phase(self, name: str) -> Any:
        return contextlib.nullcontext()
