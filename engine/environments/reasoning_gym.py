"""Any reasoning-gym task as an environment of one turn; the task itself is not changed."""

from __future__ import annotations

import json
from typing import Any

from rolemesh.engine import reasoning_tasks
from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, Observation


class ReasoningGymEnvironment(Environment):
    """Asks the scorer of the task that made the prompt."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}

    def reset(self, row: Prompt) -> None:
        """Takes the row as its task made it."""
        self._entry = {**json.loads(row.metadata), "answer": row.answer}

    def step(self, completion_text: str) -> Observation:
        """The score, 0 to 1, and the end."""
        return Observation(
            reward=reasoning_tasks.score(completion_text.strip(), self._entry), done=True
        )
