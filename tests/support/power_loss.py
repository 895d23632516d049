"""A model of a disk that loses power: what was forced to it stays, of the rest any part may.

POSIX promises the bytes of a file after its fsync, and the names in a folder after the fsync of the
folder. Everything else may be there, be lost or be torn, each by itself.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Image = dict[str, bytes | None]
"""A tree after the loss: content by relative path; None for a folder."""

_WATCHED = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod")
_NUM_DRAWS = 4


@dataclass
class Disk:
    """Watches a folder, and says what could be left of it.

    Example::

        disk = Disk(folder, check)
        with disk.watched():
            save()  # check(image) for each image that could be left, at every change
    """

    root: Path
    """Is there when power is lost, with what is in it at the beginning."""
    check: Callable[[Image], None]
    num_images: int = 0
    """Different ones that were checked."""
    _durable: dict[int, bytes | dict[str, int]] = field(default_factory=dict)
    """By inode: a file's bytes, a folder's names."""
    _held: dict[int, int] = field(default_factory=dict)
    """Descriptors by inode, so that no number is given to a second file."""
    _seen: set[int] = field(default_factory=set)
    _is_checking: bool = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks before and after every call that changes or forces something."""
        for inode, content in self._live().items():
            self._durable[inode] = content
        originals = {name: getattr(os, name) for name in _WATCHED}

        def watch(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if self._is_checking:
                    return originals[name](*args, **options)
                self.look()
                result = originals[name](*args, **options)
                if name == "fsync":
                    self._force(os.fstat(args[0]).st_ino)
                self.look()
                return result

            return call

        for name in _WATCHED:
            setattr(os, name, watch(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
            for descriptor in self._held.values():
                os.close(descriptor)

    def promised(self) -> None:
        """Told that the check expects more from here on."""
        self._seen.clear()
        self.look()

    def look(self) -> None:
        """Checks what could be left if power were lost now."""
        if self._is_checking:
            # What the check writes is no part of it.
            return
        self._is_checking = True
        for image in self._images(self._live()):
            known = hash(tuple(sorted(image.items(), key=lambda item: item[0])))
            if known not in self._seen:
                self._seen.add(known)
                self.num_images += 1
                self.check(image)
        self._is_checking = False

    def _live(self) -> dict[int, bytes | dict[str, int]]:
        found: dict[int, bytes | dict[str, int]] = {}

        def scan(path: str) -> int:
            descriptor = os.open(path, os.O_RDONLY)
            about = os.fstat(descriptor)
            inode = about.st_ino
            if inode in self._held:
                os.close(descriptor)
            else:
                self._held[inode] = descriptor
            if stat.S_ISDIR(about.st_mode):
                found[inode] = {name: scan(os.path.join(path, name)) for name in os.listdir(path)}
            else:
                found[inode] = os.pread(self._held[inode], about.st_size, 0)
            return inode

        scan(str(self.root))
        return found

    def _force(self, inode: int) -> None:
        live = self._live()
        if inode in live:
            self._durable[inode] = live[inode]

    def _images(self, live: dict[int, bytes | dict[str, int]]) -> Iterator[Image]:
        root = os.stat(self.root).st_ino

        def image(names: Callable[[], bool], content: Callable[[], float]) -> Image:
            """What is left.

            Args:
                names: For each folder, whether its new names are lost.
                content: Which part of a file's unforced bytes stays: 0, 0.5 or 1; -1: zeros.
            """
            tree: Image = {}

            def put(inode: int, path: str) -> None:
                old, new = self._durable.get(inode), live.get(inode)
                known = new if new is not None else old
                if isinstance(known, dict):
                    if path:
                        tree[path] = None
                    kept = known if not names() else (old or {})
                    assert isinstance(kept, dict)
                    for name, inner in kept.items():
                        put(inner, f"{path}/{name}" if path else name)
                    return
                written = b"" if known is None else known
                forced = old if isinstance(old, bytes) else b""
                part = content()
                if forced == written or part == 0:
                    tree[path] = forced
                elif part < 0:
                    tree[path] = bytes(len(written))
                else:
                    tree[path] = written[: int(len(written) * part)]

            put(root, "")
            return tree

        for is_lost in (True, False):
            for part in (0.0, 0.5, 1.0, -1.0):
                yield image(lambda: is_lost, lambda: part)  # noqa: B023 - called at once
        draw = random.Random(self.num_images)
        for _ in range(_NUM_DRAWS):
            yield image(lambda: draw.random() < 0.5, lambda: draw.choice((0.0, 0.5, 1.0, -1.0)))


def write_image(image: Image, folder: Path) -> None:
    """Makes the tree in an empty folder."""
    for name, content in sorted(image.items()):
        path = folder / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
