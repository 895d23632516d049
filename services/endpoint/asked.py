"""What the front knows of the request that it answers right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rolemesh.engine.images.prompt_images import PromptImage
from rolemesh.engine.sessions.session import SessionCall
from rolemesh.engine.sessions.store import OpenSession


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request on its way through vLLM's front."""

    opened: OpenSession | None = None
    """Of which session it is a call; None: of none, and nothing is kept."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The request's JSON object, as it came."""
    is_trained: bool = True
    """Whether its caller wants its tokens to be trained on."""
    images: Sequence[PromptImage] = ()
    """Of its prompt, in the order of their places."""
    calls: dict[int, SessionCall] = field(default_factory=dict)
    """What was kept of it, by the index of the completion."""


ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)
"""Of the running task; None outside of requests."""
