"""Positions of a step's prompts: every part of a batch knows where the batch begins."""

from __future__ import annotations

from rolemesh.coordinator.dataflow.calls.role_calls import PromptBatch, PromptCursor


def test_a_whole_batch_travels_without_its_beginning() -> None:
    sent = PromptCursor(40).take(8).to_proto()
    assert (sent.start, sent.count, sent.HasField("batch_start")) == (40, 8, False)


def test_parts_of_parts_and_further_prompts_name_the_beginning_of_the_first_batch() -> None:
    batch = PromptCursor(40).take(8)
    further = batch.more(4)
    parts = [batch.part(2, 6), batch.part(2, 6).part(1, 2), further, further.part(1, 1)]
    assert [(one.to_proto().start, one.to_proto().count) for one in parts] == [
        (42, 6),
        (43, 2),
        (48, 4),
        (49, 1),
    ]
    assert {one.to_proto().batch_start for one in parts} == {40}
    assert further.more(1).start == 52


def test_held_out_parts_stay_held_out() -> None:
    part = PromptBatch(0, 8, is_held_out=True).part(4, 4)
    assert part.is_held_out
    assert part.batch_start == 0
