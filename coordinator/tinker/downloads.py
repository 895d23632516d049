"""Files of saved adapters by addresses that hold for a while, for programs without a key."""

from __future__ import annotations

import secrets
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rolemesh.coordinator.tinker.sessions import UnknownError

VALID_S = 3600.0
"""How long an address holds."""

ARCHIVE = "weights.tar"
"""Name of the archive with all files."""

MOST_LINKS = 10_000
"""Addresses that hold at once; the oldest end first."""

_IN_MEMORY = 2**20


@dataclass(frozen=True, slots=True)
class _Link:
    files: Mapping[str, Path]
    expires_at: float
    """Unix seconds."""


class Downloads:
    """Addresses of files. Each is a number that nobody guesses. Owner: the server's loop."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def offer(self, folder: Path) -> tuple[str, list[str], float]:
        """Makes the files of a folder available.

        Args:
            folder: Of an adapter.

        Returns:
            The token of their addresses, the files' names relative to the folder, and the Unix
            seconds when it ends.
        """
        now = time.time()
        held = {token: link for token, link in self._links.items() if link.expires_at > now}
        self._links = dict(list(held.items())[-MOST_LINKS + 1 :])
        token = secrets.token_urlsafe(24)
        files = {
            str(one.relative_to(folder)): one for one in sorted(folder.rglob("*")) if one.is_file()
        }
        self._links[token] = _Link(files, now + VALID_S)
        return token, list(files), now + VALID_S

    def file(self, token: str, name: str) -> Path:
        """A file by its token and name; raises UnknownError."""
        try:
            return self._link(token).files[name]
        except KeyError:
            raise UnknownError(f"{name}: there is no such file") from None

    def archive(self, token: str) -> IO[bytes]:
        """All files of a token as one uncompressed tar, to be read from its begin.

        Raises:
            UnknownError: There is no such token, or it has ended.
        """
        files = self._link(token).files
        # Its caller closes it.
        made = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        with tarfile.open(fileobj=made, mode="w") as tar:
            for name, path in files.items():
                tar.add(path, arcname=name, filter=_without_owner)
        made.seek(0)
        return made

    def _link(self, token: str) -> _Link:
        link = self._links.get(token)
        if link is None or link.expires_at <= time.time():
            raise UnknownError("this address has ended: ask for another one")
        return link


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
