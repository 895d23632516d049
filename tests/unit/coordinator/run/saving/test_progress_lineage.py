"""Lineages of a run that goes back: what its journal and its checkpoints say of them."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION
from rolemesh.coordinator.run.saving.progress import ROLL_BACK_OPERATION, RunProgress, SkippedStep
from rolemesh.coordinator.state.store import JournalEntry


def entry(operation: str, step: int, **result: Any) -> JournalEntry:
    return JournalEntry(epoch=1, step=step, operation=operation, sequence=0, result=result)


def made(*steps: int) -> list[JournalEntry]:
    return [
        entry(COMMIT_OPERATION, step, next_prompt=3 * step, actor_version=2 * step, record={})
        for step in steps
    ]


def test_a_step_has_the_lineage_under_which_it_was_last_begun() -> None:
    progress = RunProgress(roll_backs=[4, 9, 6])
    assert [progress.lineage_of(step) for step in (1, 4, 5, 6, 7, 9, 10)] == [0, 0, 1, 1, 3, 3, 3]
    assert RunProgress().lineage_of(7) == 0


def test_the_journal_says_what_was_taken_back() -> None:
    entries = [
        *made(0, 1, 2, 3), entry(ROLL_BACK_OPERATION, 1, rule="kl"),
        entry("run.rewind", 1), *made(2),
    ]  # fmt: skip
    progress = RunProgress.of_journal(entries)
    assert progress is not None
    assert (progress.step, progress.roll_backs) == (2, [1])
    assert progress.next_prompts == [0, 3, 6]


def test_a_checkpoint_says_so_too_and_one_of_an_earlier_version_does_not() -> None:
    progress = RunProgress(roll_backs=[0])
    marker = {**progress.to_dict(progress.step), "epoch": 1}
    assert RunProgress.of_marker(marker, []).roll_backs == [0]
    del marker["roll_backs"]
    assert RunProgress.of_marker(marker, []).roll_backs == []


def test_a_skipped_step_is_taken_once_and_only_where_the_run_is_there() -> None:
    skipped = SkippedStep(3, 9, {"step": 3.0})
    progress = RunProgress(skipped=skipped)
    assert progress.take_skipped(3) is skipped
    assert progress.take_skipped(3) is None
    # The run had to go back further: the step is made again.
    progress.skipped = skipped
    assert progress.take_skipped(2) is None
    assert progress.take_skipped(3) is None
