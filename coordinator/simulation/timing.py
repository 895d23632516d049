"""What simulated services do: how long calls take and rows are, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.coordinator.mapping.job.work import Lengths
from rolemesh.coordinator.simulation.faults import Faults

RowEnds = Callable[[Sequence[float]], Sequence[float]]
"""Gets the tokens of completions that one service samples together, in the order of rows; gives
the seconds after which each of them is finished."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of calls, by role.

    Example: with `calls={("critic", "update"): (3.0,)}` and `tokens=1000`, a critic's update over
    500 tokens takes 1.5 s.
    """

    calls: Mapping[tuple[str, str], Sequence[float]]
    """By role and method, e.g. ("critic", "update"): of its first, second, ... call in a step, over
    all rows; the last one stands for further ones. Of a generation, what comes before it."""
    tokens: float | None = None
    """Of prompts and completions of all rows of a step: a call over fewer takes less. None: a call
    takes the same whatever it works on."""
    decoding: Mapping[str, RowEnds] = field(default_factory=dict)
    """By role that samples."""
    state_s: Mapping[str, float] = field(default_factory=dict)
    """By role: moving all that a rank holds between calls to host memory, or back. That is a cut,
    a sleep, a wake; a checkpoint, too, since nothing is known of disks."""

    def seconds(self, role: str, method: str, sequence: int, tokens: float) -> float:
        """Seconds of a call that reads so many tokens, and samples none.

        Raises:
            ValueError: Nothing is known of such a call.
        """
        known = self.calls.get((role, method))
        if not known:
            raise ValueError(
                f"{role}.{method}: the plan has no such call, so that nothing is known of its "
                "seconds"
            )
        whole = known[min(sequence, len(known) - 1)]
        if self.tokens is None or not tokens:
            return whole
        return whole * (tokens / self.tokens)


class RowLengths:
    """Tokens of completions, drawn once for each prompt and sample: a step made again has the same.

    Example: `RowLengths(Lengths.fixed(100), 0).of(7, 2)` is [100.0, 100.0].
    """

    def __init__(self, completions: Lengths, seed: int) -> None:
        """Takes the distribution, and what is drawn from it."""
        self._quantiles, self._seed = completions.quantiles, seed

    def of(self, prompt: int, samples: int) -> list[float]:
        """Tokens of the completions of the prompt at a position of the data."""
        quantiles = self._quantiles
        if len(quantiles) == 1:
            return [quantiles[0]] * samples
        generator = random.Random(f"{self._seed}/lengths/{prompt}")
        return [quantiles[int(generator.random() * len(quantiles))] for _ in range(samples)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is simulated of a run, beside its recipe."""

    timing: Timing
    lengths: RowLengths
    prompt_tokens: float
    start_s: float
    """Seconds from the start of a process until it answers with its models loaded."""
    faults: Faults = field(default_factory=Faults)
    watch_s: float = 1.0
    """Pause between two looks at a service, as `rolemesh train` has it."""
