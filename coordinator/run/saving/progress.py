"""Progress of a run: all that another attempt, or another process, needs to go on.

The journal says the same: each step commits what it adds, so that a coordinator that reads the
entries again gets an equal object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION, LOG_OPERATION
from rolemesh.coordinator.recipe.sections.tuning import key_of
from rolemesh.coordinator.run.results.evaluation import Evaluation
from rolemesh.coordinator.run.saving.turns import Turn
from rolemesh.coordinator.state.store import REWIND_OPERATION, JournalEntry

RECORD_OPERATION = "step.record"
"""Journal entry with the whole record of a step that was committed before."""

EVALUATION_OPERATION = "run.evaluate"
"""Journal entry with an evaluation: before the first step, or after the newest one."""

ROLL_BACK_OPERATION = "run.roll_back"
"""Journal entry of a run that goes back to a step, to draw those after it anew."""

TURN_OPERATION = "run.turn"
"""Journal entry of a run that tunes itself: its settings after a step."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was made and is not to count: it will be committed with the weights before."""

    step: int
    next_prompt: int
    """Position in the data that the step after it begins with."""
    record: Mapping[str, float]


@dataclass(kw_only=True)
class RunProgress:
    """What a run has reached.

    Invariant: `next_prompts` and `actor_versions` have one value for each step from 0 to `step`,
    `records` one for each step from 1 on; the newest step's may still be `unrecorded`. Of a run
    whose steps a client makes, only `step` and `records` count, and steps may be left out.

    Owner: the coordinator's loop.

    Example: after two steps of 8 prompts, two optimizer steps each, `step` is 2, `next_prompts`
    [0, 8, 16] and `actor_versions` [0, 2, 4].
    """

    step: int = 0
    """Steps committed."""
    next_prompts: list[int] = field(default_factory=lambda: [0])
    """Position in the data that the step after each step begins with."""
    actor_versions: list[int] = field(default_factory=lambda: [0])
    """Version of the policy after each step."""
    records: list[Mapping[str, float]] = field(default_factory=list)
    """Records of the steps, oldest first."""
    unrecorded: dict[str, float] | None = None
    """Record of the newest step, without its evaluation, while it is not among `records`."""
    before: Evaluation | None = None
    """Evaluation before the first step."""
    after: Evaluation | None = None
    """The newest evaluation after a step."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by phase, of this process."""
    epoch: int = 0
    """Newest epoch that is known to have spoken for the run; 0: none."""
    has_begun: bool = False
    """Whether the state before the first step is one that the run can go back to."""
    roll_backs: list[int] = field(default_factory=list)
    """Steps to which the run went back to draw those after them anew, in order."""
    skipped: SkippedStep | None = None
    """The next step, if it is not to be made again. Another process makes it again, and finds the
    same."""
    turns: list[Turn] = field(default_factory=list)
    """Settings that the run has tried and kept, oldest first; none where it does not tune."""
    failed_settings: set[str] = field(default_factory=set)
    """Those that are not tried again, also where the run went back behind them."""

    @property
    def next_prompt(self) -> int:
        """Position in the data that the next step begins with."""
        return self.next_prompts[self.step]

    def commit(
        self, step: int, next_prompt: int, actor_version: int, record: Mapping[str, float]
    ) -> None:
        """Takes a step that was made; what an ended lineage made of it and of later ones goes."""
        self.rewind(step - 1)
        self.step = step
        self.next_prompts.append(next_prompt)
        self.actor_versions.append(actor_version)
        self.unrecorded = dict(record)

    def lineage_of(self, step: int) -> int:
        """How often the run had gone back when it came to a step; 0 where it did so later on.

        A step that is made again after a crash has the lineage that it had before, so that the
        same is drawn.

        Example: with roll_backs [4, 9], steps 1 to 4 have 0, steps 5 to 9 have 1, later ones 2.
        """
        before = (number for number, to in enumerate(self.roll_backs, start=1) if to < step)
        return max(before, default=0)

    def roll_back(self, step: int) -> None:
        """Goes back to a step, or stays; what follows is drawn anew."""
        self.rewind(step)
        self.roll_backs.append(step)

    def take_skipped(self, step: int) -> SkippedStep | None:
        """The step, where it is not to be made again."""
        skipped, self.skipped = self.skipped, None
        return skipped if skipped is not None and skipped.step == step else None

    def take_turn(self, turn: Turn) -> None:
        """Takes settings that hold from the next step on."""
        self.turns.append(turn)
        if turn.verdict is not None and turn.verdict.has_failed:
            self.failed_settings.add(key_of(turn.verdict.settings))

    def recorded(self, record: Mapping[str, float]) -> None:
        """Takes the whole record of the newest step."""
        self.records.append(dict(record))
        self.unrecorded = None

    def logged(self, record: Mapping[str, float]) -> bool:
        """Takes the record of a step that a client made; returns whether the step is a new one."""
        step = int(record["step"])
        if step <= self.step:
            return False
        self.step = step
        self.records.append(dict(record))
        return True

    def evaluated(self, found: Evaluation) -> None:
        """Takes an evaluation."""
        if found.step == 0:
            self.before = found
        else:
            self.after = found

    def rewind(self, step: int) -> None:
        """Goes back to an earlier step, or stays.

        Raises:
            ValueError: The run has not come so far.
        """
        if not 0 <= step <= self.step:
            raise ValueError(f"step is {step}: the run has made {self.step} steps")
        if step == self.step:
            return
        self.step = step
        del self.next_prompts[step + 1 :]
        del self.actor_versions[step + 1 :]
        self.records = [record for record in self.records if record["step"] <= step]
        self.unrecorded = None
        # A step that is made again is made as it was.
        self.turns = [turn for turn in self.turns if turn.step <= step]
        if self.after is not None and self.after.step > step:
            self.after = None

    def to_dict(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step keeps of it, as JSON values: all but records and seconds.

        Args:
            step: At most the newest.
        """
        return {
            "step": step,
            "next_prompt": self.next_prompts[step],
            "next_prompts": self.next_prompts[: step + 1],
            "actor_versions": self.actor_versions[: step + 1],
            "roll_backs": list(self.roll_backs),
            "before": None if self.before is None else self.before.to_dict(),
            "turns": [turn.to_dict() for turn in self.turns if turn.step <= step],
        }

    @classmethod
    def of_marker(
        cls, marker: Mapping[str, Any], records: Iterable[Mapping[str, float]]
    ) -> RunProgress:
        """Reads what `to_dict` wrote.

        Args:
            marker: Of the checkpoint; also says the epoch that saved it.
            records: Records of the run's steps, in any order; those of later steps are left out.

        Raises:
            KeyError, TypeError, ValueError: It is not what `to_dict` wrote.
        """
        step = int(marker["step"])
        by_step = {int(record["step"]): record for record in records}
        progress = cls(
            step=step,
            next_prompts=[int(position) for position in marker["next_prompts"]],
            actor_versions=[int(version) for version in marker["actor_versions"]],
            records=[by_step[made] for made in range(1, step + 1) if made in by_step],
            epoch=int(marker["epoch"]),
            has_begun=True,
            # A run of an earlier version never went back.
            roll_backs=[int(to) for to in marker.get("roll_backs", ())],
        )
        if not len(progress.next_prompts) == len(progress.actor_versions) == step + 1:
            raise ValueError(f"step is {step}, but the lists beside it have other lengths")
        if marker["before"] is not None:
            progress.before = Evaluation.of_dict(marker["before"])
        for turn in marker.get("turns", ()):
            progress.take_turn(Turn.from_dict(turn))
        return progress

    @classmethod
    def of_journal(cls, entries: Iterable[JournalEntry]) -> RunProgress | None:
        """Reads the entries of a run, oldest first; None where it has not begun."""
        progress: RunProgress | None = None
        for entry in entries:
            result = entry.result
            if entry.operation == COMMIT_OPERATION and entry.step == 0:
                # Also of an attempt that began anew.
                progress = progress or cls(has_begun=True)
                progress.rewind(0)
                progress.actor_versions = [int(result["actor_version"])]
            elif entry.operation == LOG_OPERATION:
                progress = progress or cls()
                progress.logged(result["record"])
            elif progress is None:
                continue
            elif entry.operation == COMMIT_OPERATION:
                progress.commit(
                    entry.step,
                    int(result["next_prompt"]),
                    int(result["actor_version"]),
                    result["record"],
                )
            elif entry.operation == RECORD_OPERATION:
                progress.recorded(result["record"])
            elif entry.operation == EVALUATION_OPERATION:
                progress.evaluated(Evaluation.of_dict(result))
            elif entry.operation == REWIND_OPERATION:
                progress.rewind(entry.step)
            elif entry.operation == ROLL_BACK_OPERATION:
                progress.roll_back(entry.step)
            elif entry.operation == TURN_OPERATION:
                progress.take_turn(Turn.from_dict(result))
            progress.epoch = max(progress.epoch, entry.epoch)
        return progress
