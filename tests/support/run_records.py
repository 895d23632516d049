"""Records of a run and entries of its journal, for tests of stores."""

from __future__ import annotations

from rolemesh.coordinator.state.store import JournalEntry, RunRecord


def record(run_id: str, created_at: float = 1.0) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        name="quick",
        num_steps=3,
        directory="/tmp/run",
        created_at=created_at,
        updated_at=created_at,
    )


def entry(epoch: int, step: int, operation: str = "actor.update") -> JournalEntry:
    return JournalEntry(
        epoch=epoch, step=step, operation=operation, sequence=0, result={"policy_version": step}
    )
