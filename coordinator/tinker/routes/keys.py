"""Whose a request is, by its API key."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path

LOCAL_OWNER = "local"
"""Whose all requests are where no keys are given: whoever reaches the port."""


class ForbiddenKeyError(PermissionError):
    """The key is nobody's."""


class Keys:
    """Owners by their keys. Keys are compared by hashes, in a time that tells nothing of them."""

    def __init__(self, owners: Mapping[str, str] | None = None) -> None:
        """Takes owners by key; None: there are no keys, and one owner."""
        self._owners = (
            None if owners is None else {_hash(key): owner for key, owner in owners.items()}
        )

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The keys of a file, a JSON object {"tml-...": "owner"}.

        Raises:
            ValueError: It is none, or a key that clients refuse.
        """
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        is_mapping = isinstance(found, dict) and found
        if not is_mapping or not all(isinstance(one, str) and one for one in found.values()):
            raise ValueError(f'{path}: give a JSON object of owners by key, {{"tml-...": "ann"}}')
        wrong = [key for key in found if not key.startswith("tml-") or len(key) < 20]
        if wrong:
            raise ValueError(
                f"{path}: a key begins with {wrong[0][:6]!r}: clients take keys that begin with "
                "'tml-'; give them 16 further characters at least"
            )
        return cls(found)

    def owner(self, key: str) -> str:
        """Whose the key is; raises ForbiddenKeyError."""
        if self._owners is None:
            return LOCAL_OWNER
        asked, found = _hash(key), None
        for known, owner in self._owners.items():
            if hmac.compare_digest(asked, known):
                found = owner
        if found is None:
            raise ForbiddenKeyError("this API key is nobody's here: give TINKER_API_KEY another")
        return found


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
