"""Keys and values in memory, by which the ranks of a service on several hosts meet."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from rolemesh.rpc.errors import CapacityError, InvalidRequestError

MAX_BYTES = 256 << 20
"""Bytes of all keys and values. A mesh of 64 ranks takes about 3 MiB, and each Initialize makes a
new one."""

MAX_CALLERS = 4096
"""Callers whose last addition is remembered; a repeat comes within seconds."""

_MAX_NUMBER = 1 << 62


class KeyStore:
    """Values by key. Owner: the loop.

    Example: `await keys.get("a", 1.0)` waits a second for `keys.set("a", b"1")`.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._added: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def set(self, key: str, value: bytes) -> None:
        """Sets a value.

        Raises:
            CapacityError: The store is full.
        """
        old = self._values.get(key)
        grows = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + grows > self._max_bytes:
            raise CapacityError(
                f"key {key[:80]!r} has no room: the store of the service's ranks holds "
                f"{self._num_bytes} of {self._max_bytes} bytes; start the service again"
            )
        self._num_bytes += grows
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def get(self, key: str, wait_s: float) -> bytes | None:
        """The value of a key; None if it is not there within `wait_s` seconds."""
        if key not in self._values and wait_s > 0:
            waiting = asyncio.get_running_loop().create_future()
            together = self._waiting.setdefault(key, set())
            together.add(waiting)
            try:
                await asyncio.wait((waiting,), timeout=wait_s)
            finally:
                together.discard(waiting)
                if not together and self._waiting.get(key) is together:
                    del self._waiting[key]
        return self._values.get(key)

    def add(self, key: str, amount: int, caller: str, sequence: int) -> int:
        """Adds to the number of a key; a repeat of a caller's last addition adds nothing.

        Raises:
            InvalidRequestError: The value is no number, or becomes too large.
            CapacityError: The store is full.
        """
        known = self._added.get(caller)
        if known is not None and known[0] == sequence:
            return known[1]
        text = self._values.get(key, b"0")
        if not text.removeprefix(b"-").isdigit() or len(text) > 20:
            raise InvalidRequestError(
                f"key {key[:80]!r} holds no number: add to another one", reason="VALUE_INVALID"
            )
        number = int(text) + amount
        if abs(number) > _MAX_NUMBER:
            raise InvalidRequestError(
                f"amount is {amount}, which makes {number} of key {key[:80]!r}: add less",
                reason="VALUE_INVALID",
            )
        self.set(key, str(number).encode())
        self._added[caller] = (sequence, number)
        self._added.move_to_end(caller)
        if len(self._added) > MAX_CALLERS:
            self._added.popitem(last=False)
        return number

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._num_bytes -= len(key) + len(value)
        return True
