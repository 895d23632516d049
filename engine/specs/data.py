"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rolemesh.engine.specs.base import Spec


class ReasoningGymSpec(Spec):
    """Prompts from a reasoning-gym task, made on the spot and verifiable."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Registered name of the task, e.g. "chain_sum"."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's config class."""
    train_size: int = Field(default=4096, ge=0)
    """Training prompts."""
    held_out_size: int = Field(default=128, ge=0)
    """Held-out prompts, never equal to a training prompt."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task's generator."""
    question_template: str = "{question}"
    """Text of the user turn; `{question}` is replaced, and so are keys of the row's metadata."""
    system_prompt: str | None = None
    """Text of the system turn; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, filled like question_template."""


class JsonlSpec(Spec):
    """Prompts from JSON lines with the keys prompt (text or messages) and, optionally, answer."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """File with the training prompts."""
    held_out_path: Path | None = None
    """File with the held-out prompts."""
    system_prompt: str | None = None
    """Text of the system turn for plain-text prompts; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, e.g. "<think>"."""


DataSpec = Annotated[ReasoningGymSpec | JsonlSpec, Field(discriminator="type")]
