"""Turns of clients at the service, by tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rolemesh.coordinator.tinker.models.fair_turns import Client, FairTurns

ANN, BOB, EVE = Client("ann", "a"), Client("bob", "b"), Client("eve", "e")


async def order(
    calls: Sequence[tuple[Client, int]], *, at_once: int = 1, busy_tokens: int = 0
) -> list[int]:
    """Places of the calls in the order in which they are let through, all of which wait first."""
    turns, made = FairTurns(at_once), list[int]()
    is_open = asyncio.Event()

    async def call(number: int, client: Client, tokens: int) -> None:
        async with turns.turn(client, tokens):
            if number >= 0:
                made.append(number)
            await is_open.wait()

    # A first one of nobody else holds the service until all have come.
    holding = [
        asyncio.create_task(call(-1 - one, Client(f"first-{one}"), busy_tokens))
        for one in range(at_once)
    ]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(call(at, *one)) for at, one in enumerate(calls)]
    await asyncio.sleep(0)
    is_open.set()
    await asyncio.gather(*holding, *waiting)
    return made


async def test_a_small_call_does_not_wait_for_all_of_a_large_client() -> None:
    calls = [(ANN, 1000)] * 5 + [(BOB, 50)]
    # Ann's first was there before; then Bob, who has used nothing.
    assert await order(calls) == [0, 5, 1, 2, 3, 4]


async def test_each_owner_gets_the_same_tokens() -> None:
    calls = [(ANN, 300)] * 4 + [(BOB, 100)] * 12
    made = await order(calls)
    # At each moment the shares differ by one call at most of each.
    tokens = {ANN: 0, BOB: 0}
    for at in made[:-4]:
        client, size = calls[at]
        tokens[client] += size
        if min(tokens.values()) < 1200:
            assert abs(tokens[ANN] - tokens[BOB]) <= 300 + 100
    assert [at for at in made if at < 4] == [0, 1, 2, 3]


async def test_sessions_of_one_owner_share_what_is_his() -> None:
    sessions = [Client("ann", name) for name in "abc"]
    calls = [(one, 100) for one in sessions for _ in range(6)] + [(BOB, 100)] * 6
    made = [calls[at][0] for at in await order(calls)]
    # Bob has every second one, though Ann has three times as many sessions.
    assert made[:12] == [sessions[0], BOB, sessions[1], BOB, sessions[2], BOB] * 2


async def test_who_did_not_ask_saves_nothing_up() -> None:
    turns = FairTurns(1)
    for _ in range(50):
        async with turns.turn(ANN, 100):
            pass
    made = list[Client]()

    async def call(client: Client) -> None:
        async with turns.turn(client, 100):
            made.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*(call(one) for one in [ANN, ANN, ANN, BOB, BOB, BOB]))
    # They alternate from now on: Bob has no fifty calls that he could make first.
    assert set(made[:2]) == set(made[2:4]) == {ANN, BOB}


async def test_a_call_that_is_given_up_leaves_its_turn_to_the_next() -> None:
    turns, made = FairTurns(1), list[Client]()
    is_open = asyncio.Event()

    async def call(client: Client) -> None:
        async with turns.turn(client, 10):
            made.append(client)
            await is_open.wait()

    tasks = [asyncio.create_task(call(one)) for one in (ANN, BOB, EVE)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    is_open.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert made == [ANN, EVE]
    # Also one that has just been let through.
    last = asyncio.create_task(call(BOB))
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    await call(EVE)


@pytest.mark.parametrize("at_once", [1, 2])
async def test_no_more_are_let_through_than_were_said(at_once: int) -> None:
    turns, running, most = FairTurns(at_once), 0, 0

    async def call(number: int) -> None:
        nonlocal running, most
        async with turns.turn(Client(f"owner-{number % 3}"), 5 + number):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*map(call, range(20)))
    assert most == at_once
