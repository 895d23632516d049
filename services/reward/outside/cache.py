"""Cache of rewards and their parts, with the bytes that were sent for a row as the key."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping


class RewardCache:
    """The rewards of the last used rows, at most `capacity` of them. Owner: one loop.

    Example: with `capacity=1`, put(b"a", 1.0, {}) and put(b"b", 2.0, {}) leave get(b"a") missing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rewards: OrderedDict[bytes, tuple[float | None, Mapping[str, float]]] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether it remembers anything."""
        return self._capacity > 0

    @staticmethod
    def key(sent: bytes) -> bytes:
        """Key of a row: 32 bytes, computed from all that is sent of it."""
        return hashlib.sha256(sent).digest()

    def has(self, key: bytes) -> bool:
        """Whether it knows the reward."""
        return key in self._rewards

    def get(self, key: bytes) -> tuple[float | None, Mapping[str, float]]:
        """Returns the reward, None for "does not apply", and its parts.

        Raises:
            KeyError: It is not known.
        """
        self._rewards.move_to_end(key)
        return self._rewards[key]

    def put(self, key: bytes, reward: float | None, parts: Mapping[str, float]) -> None:
        """Keeps a reward. If the cache is full, the least recently used one is dropped."""
        self._rewards[key] = reward, parts
        self._rewards.move_to_end(key)
        while len(self._rewards) > self._capacity:
            self._rewards.popitem(last=False)
