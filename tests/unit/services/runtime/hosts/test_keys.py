"""Keys by which ranks meet: waits, sums that count once, and the bound on bytes."""

from __future__ import annotations

import asyncio
import time

import pytest

from rolemesh.rpc.errors import CapacityError, InvalidRequestError
from rolemesh.services.runtime.hosts.keys import KeyStore


async def test_a_value_is_waited_for_by_all_who_ask() -> None:
    keys = KeyStore()
    waits = [asyncio.create_task(keys.get("a", 5.0)) for _ in range(3)]
    short = asyncio.create_task(keys.get("a", 0.05))
    assert await short is None
    started = time.monotonic()
    keys.set("a", b"1")
    assert await asyncio.gather(*waits) == [b"1"] * 3
    assert time.monotonic() - started < 1.0
    assert await keys.get("a", 0.0) == b"1"
    assert await keys.get("b", 0.0) is None


async def test_a_wait_that_is_given_up_leaves_nothing() -> None:
    keys = KeyStore()
    wait = asyncio.create_task(keys.get("a", 5.0))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert await keys.get("b", 0.01) is None
    assert keys._waiting == {}


def test_an_addition_counts_once() -> None:
    keys = KeyStore()
    assert keys.add("n", 2, "caller", 1) == 2
    assert keys.add("n", 2, "caller", 1) == 2, "the same call, sent again"
    assert keys.add("n", 2, "caller", 2) == 4
    assert keys.add("n", -5, "other", 1) == -1
    assert keys.add("n", 1, "other", 2) == 0


def test_what_is_no_number_is_refused() -> None:
    keys = KeyStore()
    keys.set("text", b"abc")
    with pytest.raises(InvalidRequestError, match="holds no number"):
        keys.add("text", 1, "caller", 1)
    keys.add("n", 1 << 61, "caller", 2)
    with pytest.raises(InvalidRequestError, match="add less"):
        keys.add("n", 1 << 62, "caller", 3)


def test_all_bytes_together_have_a_bound() -> None:
    keys = KeyStore(max_bytes=10)
    keys.set("a", b"12345")
    with pytest.raises(CapacityError, match="6 of 10 bytes"):
        keys.set("b", b"1234")
    keys.set("a", b"123456789")
    keys.set("a", b"")
    keys.set("b", b"12345678")
    assert keys.delete("b")
    assert not keys.delete("b")
    keys.set("c", b"12345678")
