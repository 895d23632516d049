"""The interface of an environment: text in, text and reward out. It knows no token and no model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.engine.data.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment says to a turn."""

    text: str = ""
    """Follows the turn as it is, before the next one; dropped when the episode ends. Markers of the
    chat template count as such, so that it may open a turn of its own. Put no text of strangers in
    that you have not looked through."""
    reward: float = 0.0
    """For this turn; a trajectory has the sum. Finite."""
    done: bool = False
    """Whether the episode ends here."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"text of the observation is a {type(self.text).__name__}: give a str")
        if not math.isfinite(self.reward):
            raise ValueError(
                f"reward of the observation is {self.reward}: every reward must be finite"
            )


class EnvironmentFailedError(RuntimeError):
    """An environment raised, or gave what is no observation; names the prompt and the turn."""


class Environment(ABC):
    """What a policy talks to, turn by turn. One instance a trajectory.

    reset is called once, before the first turn, then step after each turn, also after one that was
    cut by length. Both should depend on what they are given alone: a run that is resumed samples
    its step anew, and gets the same trajectories only if it is told the same. They run on the
    compute thread while decoding waits, so they should be quick. What they raise ends the
    generation: a judgement that failed is no reward of 0.

    Example: guess a number, with hints::

        class Guess(Environment):
            stop = ("!",)

            def reset(self, row):
                self._number = int(row.answer)

            def step(self, completion_text):
                guess = int(completion_text.strip(" !") or 0)
                if guess == self._number:
                    return Observation(reward=1.0, done=True)
                return Observation(text=" more:" if guess < self._number else " less:")

        # prompt "Guess:", answer "7"
        # policy " 3!" -> " more:"   policy " 9!" -> " less:"   policy " 7!" -> reward 1, done
        # completion " 3! more: 9! less: 7!", with " more:" and " less:" masked
    """

    stop: Sequence[str] = ()
    """Texts that end a turn, e.g. ("</calc>",): it is cut behind the token that completes the first
    one. Known before reset. Not the model's special tokens, which are not in the text."""

    @abstractmethod
    def reset(self, row: Prompt) -> str | None:
        """Begins with a prompt. Text that is returned stands before the first turn, masked."""

    @abstractmethod
    def step(self, completion_text: str) -> Observation:
        """Takes what the policy said in its turn, without special tokens."""
