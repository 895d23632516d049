"""Interface of an environment: text in, text and reward out. It sees neither tokens nor models."""

from __future__ import annotations

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.loop import finished
from rolemesh.engine.granted.user_code import raised_at

TurnEnd = Literal["end_token", "stop_text", "length"]
"""Why a turn of the policy ended: it drew an end token, it completed one of the environment's stop
texts, or it was cut, by `max_turn_tokens` or by the budget of the whole completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Answer of an environment to a turn."""

    text: str = ""
    """Text that follows the turn unchanged, before the next turn; dropped when the episode ends.
    Markers of the chat template in it take effect, so it may open its own turn. Do not put in text
    of strangers without checking it."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Chat turns of others in place of text, e.g. ({"role": "tool", "content": "84"},): role,
    content, and other keys that the model's chat template reads. The template puts them behind the
    turn, closes the turn first unless the policy did so itself, and opens the next one."""
    reward: float = 0.0
    """Finite reward of this turn; a trajectory gets the sum."""
    done: bool = False
    """Whether the episode ends here."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"text of the observation is a {type(self.text).__name__}: give a str")
        if self.messages:
            _check_messages(self.messages)
            if self.text:
                raise ValueError(
                    "the observation has text and messages: give one of them, since text follows "
                    "the policy's turn and messages are turns of others"
                )
        if not math.isfinite(self.reward):
            raise ValueError(
                f"reward of the observation is {self.reward}: every reward must be finite"
            )


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages of the observation is a {type(messages).__name__}: give a list of "
            '{"role": ..., "content": ...}'
        )
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(
                f"a message of the observation is {message!r:.200}: give "
                '{"role": ..., "content": ...} with texts'
            )
        if message["role"] == "assistant":
            raise ValueError(
                "a message of the observation has the role 'assistant': only the policy speaks "
                "as the assistant, give another role"
            )
        # Ranks that sample a row together tell it to each other.
        json.dumps(dict(message))


class EnvironmentFailedError(RuntimeError):
    """An environment raised, or gave no observation; the text names the prompt and the turn."""


def raised(error: BaseException) -> str:
    """What an environment, a user's code, raised, and where."""
    what = str(error) if isinstance(error, EnvironmentFailedError) else repr(error)
    return f"{what}{raised_at(error)}"


class Environment(ABC):
    """Talks to a policy, turn by turn. Each trajectory has its own instance.

    reset is called once, before the first turn. step is called after each turn, also after one that
    was cut by length; a step with a second parameter named `end` is told why the turn ended (a
    TurnEnd). Both should depend only on their arguments: a resumed run samples its step
    again, and gets the same trajectories only if the answers are the same. Their errors end the
    generation, since a failed judgement is not a reward of 0.

    Calls run beside the sampler, so a slow one delays its own trajectory only. Calls of one
    instance never overlap, though each may come from another thread. Calls of different instances
    overlap in one process: what they share, such as attributes of the class, globals of a module
    or a client, must bear that.

    reset and step may be declared `async def`. All coroutines of a process run on one event loop,
    so what reset opens on it serves step. They must await what takes time: one that blocks the
    loop holds up all others.

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
    """Texts that end a turn, e.g. ("</calc>",): the turn is cut after the token that completes the
    first of them. They must be known before reset. Special tokens of the model cannot be used,
    since the text does not have them."""

    @abstractmethod
    def reset(self, row: Prompt) -> str | Awaitable[str | None] | None:
        """Begins with a prompt of the data, `row`: its answer and its other columns.

        A returned text is put before the first turn, masked.
        """

    @abstractmethod
    def step(self, completion_text: str) -> Observation | Awaitable[Observation]:
        """Takes the text of the policy's turn, without special tokens.

        Declare it as `def step(self, completion_text, end)` to be told why the turn ended, too: a
        TurnEnd. The parameter is found by its name `end`.
        """


def opening_of(environment: Environment, row: Prompt) -> str | None:
    """What reset says, a coroutine too, which runs on the loop of this process.

    Raises:
        TypeError: It is no text.
    """
    return _opening(finished(environment.reset(row)))


async def opening_on_loop(environment: Environment, row: Prompt) -> str | None:
    """The same for a reset that is declared `async def`, on the loop itself."""
    said: Any = environment.reset(row)
    return _opening(await said)


def observation_of(environment: Environment, completion_text: str, end: TurnEnd) -> Observation:
    """What step says, a coroutine too, which runs on the loop of this process.

    A step that has an `end` is told why the turn ended.

    Raises:
        TypeError: It gave something else.
    """
    return _observation(finished(_stepped(environment, completion_text, end)))


async def observation_on_loop(
    environment: Environment, completion_text: str, end: TurnEnd
) -> Observation:
    """The same for a step that is declared `async def`, on the loop itself."""
    return _observation(await _stepped(environment, completion_text, end))


def _opening(said: Any) -> str | None:
    if said is not None and not isinstance(said, str):
        raise TypeError(f"reset gave a {type(said).__name__}: return text, or None")
    return said


def _stepped(environment: Environment, completion_text: str, end: TurnEnd) -> Any:
    step: Callable[..., Any] = environment.step
    takes_end = "end" in inspect.signature(step).parameters
    return step(completion_text, end=end) if takes_end else step(completion_text)


def _observation(said: Any) -> Observation:
    if not isinstance(said, Observation):
        raise TypeError(f"step gave a {type(said).__name__}: return an Observation")
    return said
