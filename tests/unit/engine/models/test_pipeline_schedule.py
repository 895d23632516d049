"""Tests of the order of a pipeline's stages: what runs when, what is held, and no deadlock."""

from __future__ import annotations

import itertools

import pytest

from rolemesh.engine.parallel.pipeline import (
    Action,
    Compute,
    Exchange,
    forward_only,
    one_forward_one_backward,
)

SIZES = [(p, m) for p in range(1, 9) for m in (0, 1, 2, 3, 5, 8, 13)]


def _written(actions: list[Action]) -> str:
    """Computations alone: "F0 F1 B0 ..."."""
    return " ".join(
        f"{action.direction[0].upper()}{action.micro_batch}"
        for action in actions
        if isinstance(action, Compute)
    )


def test_four_stages_follow_the_1f1b_figure() -> None:
    # Figure 4, upper half, of arXiv 2104.04473, with 8 micro-batches; stage 0 is device 1.
    written = [_written(one_forward_one_backward(stage, 4, 8)) for stage in range(4)]
    assert written == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_one_stage_is_the_plain_loop_and_sends_nothing() -> None:
    actions = one_forward_one_backward(0, 1, 3)
    assert _written(actions) == "F0 B0 F1 B1 F2 B2"
    assert all(isinstance(action, Compute) for action in actions)
    assert _written(forward_only(0, 1, 2)) == "F0 F1"


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_a_stage_holds_at_most_as_many_forwards_as_stages_from_it_on(
    num_stages: int, num_micro_batches: int
) -> None:
    for stage in range(num_stages):
        held = most = 0
        for action in one_forward_one_backward(stage, num_stages, num_micro_batches):
            if isinstance(action, Compute):
                held += 1 if action.direction == "forward" else -1
                most = max(most, held)
        assert held == 0
        assert most == min(num_stages - stage, num_micro_batches)


@pytest.mark.parametrize("schedule", [one_forward_one_backward, forward_only])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_exchanges_that_block_until_both_ends_are_there_never_deadlock(
    schedule: object, num_stages: int, num_micro_batches: int
) -> None:
    assert callable(schedule)
    waiting: list[list[Action]] = [
        list(schedule(stage, num_stages, num_micro_batches)) for stage in range(num_stages)
    ]
    held: list[set[tuple[str, int]]] = [set() for _ in range(num_stages)]
    at = [0] * num_stages
    is_moving = True
    while is_moving:
        is_moving = False
        for stage in range(num_stages):
            while at[stage] < len(waiting[stage]) and isinstance(
                action := waiting[stage][at[stage]], Compute
            ):
                _compute(action, stage, num_stages, held[stage])
                at[stage] += 1
                is_moving = True
        for stage, other in itertools.pairwise(range(num_stages)):
            if at[stage] == len(waiting[stage]) or at[other] == len(waiting[other]):
                continue
            left, right = waiting[stage][at[stage]], waiting[other][at[other]]
            if not (isinstance(left, Exchange) and isinstance(right, Exchange)):
                continue
            if left.neighbour != other or right.neighbour != stage:
                continue
            # Both ends agree on what goes each way.
            assert (left.send, left.receive) == (right.receive, right.send)
            if left.send is not None:
                assert ("output", left.send) in held[stage]
                held[other].add(("input", left.send))
            if right.send is not None:
                assert ("input gradient", right.send) in held[other]
                held[stage].add(("output gradient", right.send))
            at[stage] += 1
            at[other] += 1
            is_moving = True
    assert at == [len(actions) for actions in waiting]
    for stage in range(num_stages):
        computed = [action for action in waiting[stage] if isinstance(action, Compute)]
        directions = 2 if schedule is one_forward_one_backward else 1
        assert len(computed) == len(set(computed)) == directions * num_micro_batches


def _compute(action: Compute, stage: int, num_stages: int, held: set[tuple[str, int]]) -> None:
    """What a computation needs must be there, and what it makes is there after it."""
    number = action.micro_batch
    if action.direction == "forward":
        assert stage == 0 or ("input", number) in held
        held.add(("output", number))
    else:
        assert ("output", number) in held
        assert stage == num_stages - 1 or ("output gradient", number) in held
        held.add(("input gradient", number))
