"""Shows a run: a table that grows on a terminal, plain lines elsewhere, or JSON for programs."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.commands.terminal.pace import Pace, call_left_s, in_words
from rolemesh.coordinator.dataflow.observer import RECOVERING, QuietObserver, RunObserver

logger = logging.getLogger(__name__)

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("cost", "cost/mean", "{:.3f}"),
    ("lambda", "cost/multiplier", "{:.3f}"),
    ("nll", "nll", "{:.3f}"),
    ("accuracy", "preference_accuracy", "{:.3f}"),
    ("chosen", "chosen_reward", "{:.3f}"),
    ("rejected", "rejected_reward", "{:.3f}"),
    ("kl", "kl/mean", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("length", "completion_length/mean", "{:.1f}"),
    ("tok/s", "tokens_per_second", "{:.0f}"),
    ("held out", "held_out/score", "{:.3f}"),
    ("held out", "held_out/loss", "{:.3f}"),
)
"""Heading, name in a step's record, form. A metric that no step reports is not shown."""

SOMETIMES = {"held_out/score": True, "held_out/loss": False}
"""Metrics that only some steps report, by whether these steps have a reward: always shown then, so
that headings stay above values."""

PHASES: tuple[tuple[str, str], ...] = (
    ("generate", "gen"),
    ("weight_sync", "sync"),
    ("values", "val"),
    ("reference", "ref"),
    ("teacher", "teach"),
    ("proximal", "prox"),
    ("reward", "rew"),
    ("cost", "cost"),
    ("actor_select", "select"),
    ("advantages", "adv"),
    ("update_critic", "upd critic"),
    ("update_reward", "upd reward"),
    ("update_actor", "upd actor"),
    ("publish_weights", "publish"),
    ("sleep", "sleep"),
    ("wake", "wake"),
)
"""Phases of a step in the order of their work, with the word that is shown for each. Phases of
several pools may overlap, so their sum may exceed the step."""

_HEADING_EVERY_STEPS = 20
_PLAIN_PROGRESS_EVERY_S = 10.0
"""First pause between two lines of a call that takes long; it doubles."""

_LONGEST_PROGRESS_PAUSE_S = 60.0
_TOLD_AGAIN = 1.25
"""Factor by which an estimate has to change for another line."""
_BAR_WIDTH = 40
_NUMBERS = re.compile(r"\d+")


def step_values(record: Mapping[str, float]) -> list[tuple[str, str]]:
    """Headings and texts that are shown of a step; a missing metric is not shown as 0."""
    has_reward = "reward/mean" in record
    return [
        (heading, form.format(record[name]) if name in record else "-")
        for heading, name, form in COLUMNS
        if name in record or SOMETIMES.get(name) is has_reward
    ]


def phase_values(record: Mapping[str, float]) -> list[tuple[str, float]]:
    """Words and seconds of those phases of a step that the record has."""
    known = [(word, f"time/{name}") for name, word in PHASES]
    listed = [(word, record[key]) for word, key in known if key in record]
    names = {key for _, key in known} | {"time/step"}
    others = [(k.removeprefix("time/"), v) for k, v in record.items() if k.startswith("time/")]
    return listed + [(word, v) for word, v in others if f"time/{word}" not in names]


@dataclass(slots=True)
class _Call:
    """What a role does now."""

    stage: str
    done: int
    total: int
    since: float
    """When the stage began; that of a recovery counts from its start."""
    told_at: float
    pause_s: float = _PLAIN_PROGRESS_EVERY_S
    """Until the next line."""

    def progress(self) -> str:
        """How far it is, and how long it takes still; empty where it is not known."""
        if not self.total:
            return ""
        left = in_words(call_left_s(time.monotonic() - self.since, self.done, self.total))
        return f"{self.done}/{self.total}" + (f", {left}" if left else "")


class PlainConsole:
    """One line a step, for files and pipes, and now and then one of a call that takes long."""

    def __init__(self, stream: IO[str] | None = None, *, num_steps: int | None = None) -> None:
        """Prepares.

        Args:
            stream: Where it prints; standard output if left out.
            num_steps: Of the whole run, for the time that is left; None: not known.
        """
        self._stream = stream or sys.stdout
        self._calls: dict[str, _Call] = {}
        self._pace = Pace(num_steps)
        self._told_s = 0.0
        """Estimate of the first step that was told last."""

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """A line when a role starts, and later ones of whatever takes long."""
        now = time.monotonic()
        if not stage:
            self._calls.pop(role, None)
            return
        call = self._calls.get(role)
        if call is None:
            call = self._calls[role] = _Call(stage, done, total, now, now)
            if stage.startswith(("start", "initialize")):
                self.on_event(f"{role}: {stage}")
            return
        call.done, call.total = done, total
        if call.stage != stage:
            call.stage, call.since = stage, now
        if now - call.told_at >= call.pause_s:
            call.told_at = now
            call.pause_s = min(2 * call.pause_s, _LONGEST_PROGRESS_PAUSE_S)
            self.on_event(" ".join(filter(None, (f"{role}: {stage}", call.progress()))))

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """A line of the first estimate, and of one that corrects it."""
        if not self._pace.expects(step, seconds, gone_s):
            return
        if self._told_s / _TOLD_AGAIN < seconds < self._told_s * _TOLD_AGAIN:
            return
        self._told_s = seconds
        told = f"step {step} takes about {seconds:.0f} s, by its calls so far"
        left = in_words(self._pace.left_s)
        self.on_event(told + (f" | {left}" if left else ""))

    def on_step(self, record: Mapping[str, float]) -> None:
        """One line."""
        self._pace.made(int(record["step"]), record.get("time/step"))
        values = " ".join(f"{name} {text}" for name, text in step_values(record) if text != "-")
        phases = " ".join(f"{word} {seconds:.1f}" for word, seconds in phase_values(record))
        seconds = f" | {record['time/step']:.1f} s: {phases}" if "time/step" in record else ""
        told = f"step {record['step']:.0f} {values}{seconds}"
        left = in_words(self._pace.left_s)
        self.on_event(told + (f" | {left}" if left else ""))

    def on_event(self, text: str) -> None:
        """One line."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class JsonConsole(QuietObserver):
    """One JSON object a line on standard output and nothing else."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes an object: its type, the time, and its values."""
        line = {"type": kind, "time": time.time(), **values}
        print(json.dumps(line), file=self._stream, flush=True)

    def on_step(self, record: Mapping[str, float]) -> None:
        """The record under `metrics`."""
        self.write("step", {"step": int(record["step"]), "metrics": dict(record)})

    def on_event(self, text: str) -> None:
        """The text."""
        self.write("event", {"text": text})

    def close(self) -> None:
        """Nothing is held."""


class LiveConsole:
    """Rows that stay, and below them what each role does now. Owner: the coordinator's loop."""

    def __init__(self, console: Console, *, num_steps: int | None = None) -> None:
        """Begins to draw.

        Args:
            console: Where.
            num_steps: Of the whole run, for the time that is left; None: not known.
        """
        self._console = console
        self._roles: dict[str, _Call] = {}
        self._pace = Pace(num_steps)
        self._num_rows = 0
        self._live = Live(
            get_renderable=self._activity, console=console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def _activity(self) -> Group:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for role, call in self._roles.items():
            table.add_row(
                Text(role, style="bold"),
                # A stage may hold words of a foreign server, which are no markup.
                Text(call.stage),
                call.progress(),
                Text(f"{now - call.since:.0f} s", style="dim"),
            )
        return Group(table, *self._run_bar())

    def _run_bar(self) -> Iterator[Table]:
        """How far the run is, once that is known and it has steps left."""
        pace, left_s = self._pace, self._pace.left_s
        if left_s is None or pace.num_steps is None:
            return
        bar = Table.grid(padding=(0, 2))
        drawn = ProgressBar(total=pace.num_steps, completed=pace.step, width=_BAR_WIDTH)
        bar.add_row(drawn, f"step {pace.step} of {pace.num_steps}, {in_words(left_s)}")
        yield bar

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """Changes the role's line; an empty stage removes it."""
        if not stage:
            self._roles.pop(role, None)
            return
        shown = self._roles.get(role)
        if role == RECOVERING and shown is None:
            # Starts and moves of the attempt that failed have no end.
            self._roles.clear()
        now = time.monotonic()
        is_same = shown is not None and (role == RECOVERING or shown.stage == stage)
        since = shown.since if shown is not None and is_same else now
        self._roles[role] = _Call(stage, done, total, since, now)

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """What the bar shows until the step is made."""
        self._pace.expects(step, seconds, gone_s)

    def on_step(self, record: Mapping[str, float]) -> None:
        """A row, with headings from time to time."""
        self._pace.made(int(record["step"]), record.get("time/step"))
        values = step_values(record)
        if self._num_rows % _HEADING_EVERY_STEPS == 0:
            heading = "".join(f"{name:>9}" for name, _ in values)
            self._console.print(Text(f"step{heading}   where the time went", style="bold"))
        self._num_rows += 1
        row = Text(f"{record['step']:4.0f}" + "".join(f"{text:>9}" for _, text in values))
        if "time/step" in record:
            row.append(f"   {record['time/step']:.1f} s: ", style="bold")
        row.append("  ".join(f"{word} {spent:.1f}" for word, spent in phase_values(record)), "dim")
        self._console.print(row)

    def on_event(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text, style="cyan"))

    def close(self) -> None:
        """Removes the lines that change."""
        self._live.stop()


class SturdyConsole(Console):
    """A console that raises BrokenPipeError where rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def say(console: Console, *lines: str) -> None:
    """Prints lines as they are: not broken, and without markup or colours of their own."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def log_to(path: Path) -> None:
    """Has what the coordinator logs go to a file."""
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s coordinator %(name)s: %(message)s",
        force=True,
    )


class LoggingObserver:
    """Passes everything on, and writes a line of it into the coordinator's log.

    The output may be gone, e.g. with a closed terminal or an ended `| tee`. Lines then go to the
    log only, since a run must not end because its output has no reader.
    """

    def __init__(self, shown: RunObserver) -> None:
        self._shown = shown
        self._is_seen = True
        self._stages: dict[str, str] = {}

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """Logs a change of stage, but not of a number in its words."""
        words = _NUMBERS.sub("", stage)
        if self._stages.get(role) != words:
            self._stages[role] = words
            if stage:
                logger.info("%s: %s", role, stage)
        self.show(lambda: self._shown.on_phase(role, stage, done, total))

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """Passes it on; the next one corrects it, so the log has none."""
        self.show(lambda: self._shown.on_estimate(step, seconds, gone_s))

    def on_step(self, record: Mapping[str, float]) -> None:
        """Logs the whole record."""
        logger.info("step %d: %s", int(record["step"]), json.dumps(dict(record)))
        self.show(lambda: self._shown.on_step(record))

    def on_event(self, text: str) -> None:
        """Logs the text."""
        logger.info("%s", text)
        self.show(lambda: self._shown.on_event(text))

    def show(self, show: Callable[[], None]) -> None:
        """Calls `show` as long as the output works."""
        if not self._is_seen:
            return
        try:
            show()
        except OSError as error:
            self._is_seen = False
            logger.warning("the console is gone (%s): from here on, this log alone tells", error)
