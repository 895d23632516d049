"""Sections of data that were read before: their rows and all that a start must know of them.

A file in the user's cache folder holds the rows as they were read, and behind them arrays of facts.
Its name is a hash of all that they depend on: the bytes of the data, the section of the recipe, the
tokenizer with its template, and the code that reads them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]

_FORMAT = b"rolemesh rows 1\n"
"""Stands at the end of a whole file; another number is another arrangement."""
_SIZE_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_PIECE = 1 << 20
_UNUSED_DAYS = 30
_LONGEST_WAIT_S = 600.0
_LOOK_EVERY_S = 0.1
_PACKAGES = ("rolemesh", "transformers", "tokenizers", "jinja2", "pyarrow", "reasoning-gym")
"""What rows depend on, as far as it is installed."""
_IMAGE_CODE = ("processing.py", "references.py", "turns.py")
_CODE = [
    *sorted(Path(__file__).parents[1].rglob("*.py")),
    *(Path(__file__).parents[2] / "images" / name for name in _IMAGE_CODE),
]
"""What makes rows: in a checkout its version says little."""


def cache_folder() -> Path | None:
    """Where such files lie; None if this user has no folder to cache in."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "rolemesh" / "rows"


def key_of(section: Mapping[str, Any], tokenizer: Any, files: Iterable[Path]) -> str | None:
    """The name under which the rows of a section are kept.

    Args:
        section: All else that they depend on, as JSON.
        tokenizer: The tokenizer.
        files: The files that they are read from.

    Returns:
        None if the tokenizer cannot be compared, since it is not one of the tokenizers library.

    Raises:
        OSError: A file cannot be read.
    """
    of_tokenizer = hash_of_tokenizer(tokenizer)
    if of_tokenizer is None:
        return None
    parts = {
        "section": section,
        "versions": {name: _version(name) for name in _PACKAGES},
        "code": [_hash_of(file) for file in _CODE],
        "tokenizer": of_tokenizer,
        "files": [[str(file), _hash_of(file)] for file in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_of_tokenizer(tokenizer: Any) -> str | None:
    """Of all that decides what it makes of turns; None if it is not of the tokenizers library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # In front stand truncation and padding, which each call of the tokenizer sets anew.
    _, _, content = backend.to_str().partition('"added_tokens"')
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = [content, tokenizer.chat_template, special]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def found(
    folder: Path, key: str
) -> tuple[BinaryIO, dict[str, Any], dict[str, NDArray[Any]]] | None:
    """What `keep` kept under a key: the file, which is open, the details and the arrays.

    Returns:
        None if there is nothing, or it is damaged, which is logged.
    """
    path = _path(folder, key)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): the data is read anew", path, error.strerror)
        return None
    damage = _damage(file, key)
    if damage:
        file.close()
        logger.warning("%s is not used (%s): the data is read anew", path, damage)
        return None
    with contextlib.suppress(OSError):
        # The age that _remove_old sees is that of the last use. Another process may remove it.
        os.utime(path)
    return file, *_read(file)


@contextlib.contextmanager
def alone(folder: Path, key: str, progress: Callable[[], None] | None) -> Iterator[None]:
    """Waits until no other process reads the same data, so that the second finds what it kept.

    The ranks of a service start together. One that is stopped for minutes is not waited for.

    Args:
        folder: Where rows are kept.
        key: Of the data.
        progress: Called from time to time.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = folder / f"{key}.lock"
    with lock.open("ab") as file:
        until = time.monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    logger.warning("%s is held for %d s: not waited for", lock, _LONGEST_WAIT_S)
                    break
                if progress is not None:
                    progress()
                time.sleep(_LOOK_EVERY_S)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def draft(folder: Path) -> BinaryIO:
    """A new empty file for rows, open to read and write; `keep` gives it its name.

    Raises:
        OSError: There is no room, or no right, to make one.
    """
    number, name = tempfile.mkstemp(prefix="draft-", dir=folder)
    os.close(number)
    return open(name, "r+b")


def keep(
    folder: Path, key: str, file: BinaryIO, details: Mapping[str, Any], arrays: Arrays
) -> None:
    """Makes a draft that holds rows what `found` finds from now on.

    Raises:
        OSError: It cannot be written.
    """
    # The rows stand in front of everything, so that each lies where the store put it.
    table = []
    for name, values in arrays.items():
        file.write(values.tobytes())
        table.append([name, values.dtype.str, len(values)])
    facts = json.dumps({"key": key, "details": details, "arrays": table}).encode()
    file.write(facts + len(facts).to_bytes(_SIZE_BYTES, "little") + _FORMAT)
    file.flush()
    file.write(_digest(file, os.fstat(file.fileno()).st_size))
    file.flush()
    os.replace(file.name, _path(folder, key))
    _remove_old(folder)


def _damage(file: BinaryIO, key: str) -> str:
    """Why a file is not what this user's processes kept under a key; empty if it is."""
    status = os.fstat(file.fileno())
    if status.st_uid != os.geteuid():
        return "it is another user's"
    digest_at = status.st_size - _DIGEST_BYTES
    format_at = digest_at - len(_FORMAT)
    if format_at < 0 or os.pread(file.fileno(), len(_FORMAT), format_at) != _FORMAT:
        return "it is cut off, or of another kind"
    if os.pread(file.fileno(), _DIGEST_BYTES, digest_at) != _digest(file, digest_at):
        return "its bytes have changed"
    facts, _ = _facts(file)
    return "" if facts["key"] == key else "it is of other data"


def _facts(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """What a whole file says of itself, and where that begins."""
    number = file.fileno()
    size_at = os.fstat(number).st_size - _DIGEST_BYTES - len(_FORMAT) - _SIZE_BYTES
    facts_at = size_at - int.from_bytes(os.pread(number, _SIZE_BYTES, size_at), "little")
    return json.loads(os.pread(number, size_at - facts_at, facts_at)), facts_at


def _read(file: BinaryIO) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Details and arrays of a whole file."""
    facts, facts_at = _facts(file)
    arrays = {}
    at = facts_at - sum(count * numpy.dtype(kind).itemsize for _, kind, count in facts["arrays"])
    for name, kind, count in facts["arrays"]:
        size = count * numpy.dtype(kind).itemsize
        arrays[name] = numpy.frombuffer(os.pread(file.fileno(), size, at), dtype=kind)
        at += size
    return facts["details"], arrays


def _digest(file: BinaryIO, size: int) -> bytes:
    """Hash of the first bytes of a file."""
    digest = hashlib.sha256()
    for at in range(0, size, _PIECE):
        digest.update(os.pread(file.fileno(), min(_PIECE, size - at), at))
    return digest.digest()


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.rows"


def _remove_old(folder: Path) -> None:
    """Removes what no start has used for long, and drafts of processes that were killed."""
    now = time.time()
    for pattern, days in (("*.rows", _UNUSED_DAYS), ("draft-*", 1), ("*.lock", 1)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                # Another process may remove it too.
                if now - path.stat().st_mtime > days * 86400:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
