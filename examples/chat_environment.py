"""A guessing game over chat turns: the policy guesses, and the hints are messages of a user.

In a recipe, with prompts like "Guess my number from 0 to 9." and the number as the answer::

    actor:
      environment:
        type: python
        environment: examples/chat_environment.py:Guess
        max_turns: 6
        max_turn_tokens: 24
    reward:
      source: {type: environment, full_score: 1.0}
"""

import re

from rolemesh.engine.environments.base import Environment, Observation


class Guess(Environment):
    """Each hint costs a little; a turn that was cut is answered, and costs as much."""

    def __init__(self, hint_cost=0.1):
        self._hint_cost = hint_cost

    def reset(self, row):
        """Takes the number."""
        self._number = int(row.answer)

    def step(self, completion_text, end):
        """Judges the last number of a turn."""
        numbers = re.findall(r"\d+", completion_text)
        if end == "length":
            hint = "You were cut off: answer with one number."
        elif not numbers:
            hint = "That is no number."
        elif numbers[-1] == str(self._number):
            return Observation(reward=1.0, done=True)
        else:
            hint = "More." if int(numbers[-1][:9]) < self._number else "Less."
        return Observation(messages=[{"role": "user", "content": hint}], reward=-self._hint_cost)
