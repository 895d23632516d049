"""Operations of a model in the order of their numbers."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.models.turns import Turns


class Made:
    """What was made, in order; each operation lasts a few turns of the loop."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.running = 0

    async def operation(self, number: int) -> int:
        self.running += 1
        assert self.running == 1, "two at once"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.order.append(number)
        self.running -= 1
        return number * 10


def begin(turns: Turns, made: Made, number: int) -> asyncio.Task[int]:
    return asyncio.create_task(turns.take(number, lambda: made.operation(number)))


async def settled() -> None:
    """Lets all that can go on do so."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 2, 3, 4])), ids=str)
async def test_they_are_made_in_order_whatever_order_they_come_in(arrival: tuple[int, ...]) -> None:
    turns, made = Turns(), Made()
    tasks = []
    for number in arrival:
        tasks.append(begin(turns, made, number))
        await asyncio.sleep(0)
    assert await asyncio.gather(*tasks) == [number * 10 for number in arrival]
    assert made.order == [1, 2, 3, 4]


async def test_a_later_one_waits_for_one_that_has_not_come() -> None:
    turns, made = Turns(), Made()
    later = begin(turns, made, 2)
    await settled()
    assert made.order == []
    await begin(turns, made, 1)
    await later
    assert made.order == [1, 2]


async def test_one_that_fails_lets_the_next_one_through() -> None:
    turns, made = Turns(), Made()

    async def failing() -> None:
        raise ValueError("it cannot be")

    later = begin(turns, made, 2)
    with pytest.raises(ValueError, match="it cannot be"):
        await turns.take(1, failing)
    assert await later == 20


async def test_numbers_of_refused_operations_are_passed_over() -> None:
    turns, made = Turns(), Made()
    waiting = begin(turns, made, 4)
    await settled()
    # Known before its turn, and in no order.
    await turns.refused(3)
    await settled()
    assert made.order == []
    await begin(turns, made, 1)
    await turns.refused(2)
    await waiting
    await turns.refused(5)
    await begin(turns, made, 6)
    assert made.order == [1, 4, 6]


async def test_an_operation_keeps_its_turn_where_another_of_its_number_is_refused() -> None:
    turns, made = Turns(), Made()
    second, third = begin(turns, made, 2), begin(turns, made, 3)
    await settled()
    await turns.refused(2)
    await begin(turns, made, 1)
    await turns.refused(1)
    await asyncio.gather(second, third)
    assert made.order == [1, 2, 3]


async def test_one_without_a_number_waits_for_none() -> None:
    turns, made = Turns(), Made()
    later = begin(turns, made, 2)
    await begin(turns, made, 0)
    assert made.order == [0]
    await begin(turns, made, 1)
    await later


async def test_a_number_that_was_made_is_let_through_and_moves_nothing() -> None:
    turns, made = Turns(), Made()
    for number in (1, 2, 1, 3):
        await begin(turns, made, number)
    assert made.order == [1, 2, 1, 3]


async def test_they_may_begin_at_a_later_number() -> None:
    turns, made = Turns(), Made()
    turns.begin_at(11)
    waiting = begin(turns, made, 12)
    await settled()
    assert made.order == []
    await begin(turns, made, 11)
    await waiting
    turns.begin_at(3)
    await begin(turns, made, 13)
    assert made.order == [11, 12, 13]


async def test_none_is_the_first_while_others_are_there() -> None:
    turns, made = Turns(), Made()
    first, third = begin(turns, made, 1), begin(turns, made, 3)
    await asyncio.sleep(0)
    turns.begin_at(4)
    fourth = begin(turns, made, 4)
    await settled()
    assert made.order == [1]
    await begin(turns, made, 2)
    await asyncio.gather(first, third, fourth)
    assert made.order == [1, 2, 3, 4]


async def test_one_whose_forerunner_never_comes_says_so_and_holds_no_other_up() -> None:
    turns, made = Turns(gap_s=0.05), Made()
    with pytest.raises(WireError, match="seq_id: 2: call 1 of this model did not come"):
        await begin(turns, made, 2)
    later = begin(turns, made, 3)
    await begin(turns, made, 1)
    await later
    assert made.order == [1, 3]


async def test_one_that_takes_long_is_waited_for_as_long_as_it_takes() -> None:
    turns, made, is_over = Turns(gap_s=0.02), Made(), asyncio.Event()

    async def long() -> None:
        await is_over.wait()
        made.order.append(1)

    # The second comes before the first does.
    later = begin(turns, made, 2)
    await settled()
    first = asyncio.create_task(turns.take(1, long))
    await asyncio.sleep(0.2)
    assert not later.done()
    is_over.set()
    await asyncio.gather(first, later)
    assert made.order == [1, 2]
