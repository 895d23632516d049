from __future__ import annotations

import pytest

from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION, Journal
from rolemesh.coordinator.state.errors import StaleEpochError
from rolemesh.coordinator.state.memory import MemoryStateStore


async def make_journal(store: MemoryStateStore) -> Journal:
    return Journal(store, "run", await store.next_epoch("run"))


async def test_keys_number_operations_of_one_name_within_a_step() -> None:
    journal = await make_journal(MemoryStateStore())
    keys = [
        journal.next_key(step, operation)
        for step, operation in [(1, "a"), (1, "a"), (1, "b"), (2, "a")]
    ]
    assert [(key.step, key.operation, key.sequence) for key in keys] == [
        (1, "a", 0),
        (1, "a", 1),
        (1, "b", 0),
        (2, "a", 0),
    ]
    assert {(key.run_id, key.fencing_epoch) for key in keys} == {("run", 1)}


async def test_a_key_says_how_often_the_run_had_gone_back_when_it_came_to_the_step() -> None:
    store = MemoryStateStore()
    journal = Journal(store, "run", await store.next_epoch("run"), lambda step: step // 3)
    assert [journal.next_key(step, "actor.generate").lineage for step in (2, 3, 6)] == [0, 1, 2]
    assert (await make_journal(store)).next_key(9, "actor.generate").lineage == 0


async def test_operations_notes_and_commits_stand_in_the_order_in_which_they_came() -> None:
    store = MemoryStateStore()
    journal = await make_journal(store)
    await journal.acknowledge(journal.next_key(1, "actor.update"), {"policy_version": 1})
    await journal.commit(1, {})
    await journal.note(1, "step.record", {"record": {"loss": 0.5}})
    await journal.note(1, "step.record", {"record": {"loss": 0.5}})
    await journal.acknowledge(journal.next_key(2, "actor.update"), {"policy_version": 2})
    assert [(entry.step, entry.operation) for entry in await store.read_journal("run")] == [
        (1, "actor.update"),
        (1, COMMIT_OPERATION),
        (1, "step.record"),
        (2, "actor.update"),
    ]


async def test_stale_epoch_is_refused() -> None:
    store = MemoryStateStore()
    old = await make_journal(store)
    new = await make_journal(store)
    await new.commit(1, {})
    with pytest.raises(StaleEpochError):
        await old.commit(1, {})
