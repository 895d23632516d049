"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path


def write_atomically(path: Path, text: str, *, is_private: bool = False) -> None:
    """Writes a text file under a temporary name, syncs it to disk, and renames it.

    Args:
        path: The file.
        text: Content of the file.
        is_private: Whether only its owner may read it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    mode = 0o600 if is_private else 0o666
    if is_private:
        # What another user has laid there keeps its owner and mode, or leads elsewhere.
        draft.unlink(missing_ok=True)
    flags = os.O_EXCL | os.O_NOFOLLOW if is_private else os.O_TRUNC
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | flags, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def read_secret(path: Path, field: str) -> str:
    """Reads a file that holds a secret alone, in one line.

    Args:
        path: The file.
        field: What names it, for messages.

    Raises:
        ValueError: The file cannot be read, or holds no line of visible ASCII.
    """
    source = f"{field} {path}"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error has no part of the file but its place.
        raise ValueError(
            f"{source} cannot be read ({error}): give a file that holds the secret alone"
        ) from None
    return checked_secret(text, source)


def checked_secret(text: str, source: str) -> str:
    """The text, if it is visible ASCII without spaces; ValueError, without it, otherwise."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(
            f"{source} holds no secret: give visible ASCII characters without spaces, e.g. what "
            "`openssl rand -hex 32` prints"
        )
    return text


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, all durable; one that is there stays as it is."""
    folder = folder.absolute()
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
