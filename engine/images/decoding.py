"""Decodes images in a confined process: their bytes come from strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from functools import partial
from types import TracebackType
from typing import IO, Self

import numpy as np

from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.images.worker import (
    ASKS_PIXELS,
    ASKS_SIZE,
    GIVES_PIXELS,
    GIVES_SIZE,
    HEADER,
    MAX_REFUSAL_BYTES,
    REFUSES,
    SIZE,
)
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.bounds import LOAD_TIMEOUT_S
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.sandbox.keeping import KeptProcess
from rolemesh.engine.sandbox.view import View

logger = logging.getLogger(__name__)

MAX_PIXELS = 1 << 26
"""Most pixels of an image, unless a reader is told otherwise: 8192 x 8192."""

TIMEOUT_S = 60.0
"""Longest time for one image. One of MAX_PIXELS takes 2 to 6 s on one core."""

_MODULE = "rolemesh.engine.images.worker"
_BASE_BYTES = 512 << 20
_BYTES_PER_PIXEL = 48
"""Memory of the process: Python with Pillow; and of each pixel up to twelve copies of four bytes.
A WebP file with transparent parts takes most, as it is decoded like an animation."""
_SHOWN_DIGITS = 12
_LAST_LINES = 5
_LAST_WORDS_S = 0.5


class _WorkerLostError(Exception):
    """The process gave no answer; the text says why."""


class ImageReader:
    """Reads images by one confined process, which it starts when it is first asked.

    The process can read the files of Python alone, write nothing, and open no connection, where
    the host has means for that (`sandbox.host`); where it has none, the log says so. In either
    case its memory and the time of a call are bounded. One that dies or hangs costs the image that
    it was decoding, and the next call has a new one.

    Any thread may call any method; one image is decoded at a time.

    Example::

        with ImageReader() as reader:
            reader.size(data)  # (640, 480): width, height
            reader.pixels(data).shape  # (480, 640, 3)
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Takes its bounds; starts nothing yet.

        Args:
            sandbox: Confines the process; None: the best that this host has. A service that was
                told to require a complete one has not started where there is none.
            max_pixels: Most pixels of an image; one with more is refused before it is decoded.
            timeout_s: Longest time for one image, in seconds.
        """
        found = find_sandbox("auto") if sandbox is None else sandbox
        # What an owner opens to functions of users is of no use here.
        self._sandbox = dataclasses.replace(found, code_roots=())
        self._max_pixels, self._timeout_s = max_pixels, timeout_s
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._owned: weakref.finalize[..., object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, if there is one; a later call would start another."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None where none lives."""
        worker = self._worker
        return None if worker is None else worker.pid

    def size(self, data: bytes, name: str = "") -> tuple[int, int]:
        """Width and height in pixels, as the image is shown: EXIF may turn it.

        Only the header is read, so that a file that is cut off behind it still has a size.

        Args:
            data: The file's bytes: PNG, JPEG or WebP.
            name: Of the image, for messages; empty: its digest.

        Raises:
            ImageInvalidError: It is of no such format, is animated or too large, or the process
                died of it or took too long.
        """
        answer = self._asked(ASKS_SIZE, data, name)
        width, height = SIZE.unpack(answer)
        return width, height

    def pixels(self, data: bytes, name: str = "") -> np.ndarray:
        """The image as it is shown: turned as EXIF says, transparent parts over white.

        Args:
            data: The file's bytes: PNG, JPEG or WebP.
            name: Of the image, for messages; empty: its digest.

        Returns:
            uint8 [height, width, 3], RGB.

        Raises:
            ImageInvalidError: As of `size`; or the file is cut off or damaged.
        """
        answer = self._asked(ASKS_PIXELS, data, name)
        width, height = SIZE.unpack_from(answer)
        flat = np.frombuffer(answer, dtype=np.uint8, offset=SIZE.size)
        return flat.reshape(height, width, 3)

    def _asked(self, what: bytes, data: bytes, name: str) -> bytearray:
        """The checked answer of the worker, without its header."""
        if not name:
            name = f"the image with the SHA-256 {hashlib.sha256(data).hexdigest()[:_SHOWN_DIGITS]}"
        with self._lock:
            try:
                worker = self._living()
                kind, answer = worker.ask(what, data, self._timeout_s, self._most_bytes())
                if kind != REFUSES:
                    self._check(what, kind, answer)
                    return answer
            except _WorkerLostError as error:
                self._end()
                raise ImageInvalidError(
                    f"{name} was not read, since the process that decodes it {error}: it may be "
                    "made to harm readers; replace it, or write it anew with another program"
                ) from error
        raise ImageInvalidError(f"{name} {bytes(answer).decode(errors='replace')}")

    def _most_bytes(self) -> int:
        return max(SIZE.size + 3 * self._max_pixels, MAX_REFUSAL_BYTES)

    def _check(self, what: bytes, kind: bytes, answer: bytearray) -> None:
        """Raises _WorkerLostError where an answer is not what was asked for.

        A file may have taken the process over, so that its words are worth no more than the file's.
        """
        expected = {ASKS_SIZE: GIVES_SIZE, ASKS_PIXELS: GIVES_PIXELS}[what]
        if kind == expected and len(answer) >= SIZE.size:
            width, height = SIZE.unpack_from(answer)
            length = SIZE.size + (3 * width * height if kind == GIVES_PIXELS else 0)
            if 0 < width * height <= self._max_pixels and len(answer) == length:
                return
        raise _WorkerLostError("gave an answer of no known form")

    def _living(self) -> _Worker:
        """The worker; a new one where none lives."""
        if self._worker is not None and not self._worker.has_ended:
            return self._worker
        self._end()
        worker = _Worker(self._sandbox, self._max_pixels)
        self._worker = worker
        self._owned = weakref.finalize(self, worker.end)
        if self._sandbox.lacks:
            logger.warning("images are decoded in the sandbox %s", self._sandbox)
        return worker

    def _end(self) -> None:
        if self._owned is not None:
            self._owned.detach()
        if self._worker is not None:
            self._worker.end()
        self._worker, self._owned = None, None


class _Worker:
    """One process, from its start to its end. Used by one thread at a time."""

    def __init__(self, sandbox: Sandbox, max_pixels: int) -> None:
        """Starts it; raises _WorkerLostError where it cannot work."""
        try:
            # Named as the code that is run: modules beside it are the reader's own.
            view = sandbox.show(f"{_MODULE}:main", (), network=False)
        except OSError as error:
            raise _WorkerLostError(f"could not be given a folder ({error})") from error
        if view is not None:
            view = dataclasses.replace(view, devices=())
        self._view = view
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            self._kept = KeptProcess(
                lambda: sandbox.start(_MODULE, view, ()), partial(_keep_last, self._said)
            )
        except (OSError, RuntimeError) as error:
            _close(view)
            raise _WorkerLostError(f"could not be started ({error})") from error
        self._process, self._connection = self._kept.process, self._kept.connection
        self.pid = self._process.pid
        order = {
            "memory_bytes": _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels,
            "max_pixels": max_pixels,
            "sandbox": None if view is None else sandbox.order(view),
        }
        try:
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            self._exchanged([frames.encode(order, frames.MAX_CALL_BYTES)], deadline, 0)
        except _WorkerLostError:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself."""
        return self._process.poll() is not None

    def ask(
        self, what: bytes, data: bytes, timeout_s: float, most_bytes: int
    ) -> tuple[bytes, bytearray]:
        """What the process answers of an image, and the bytes; raises _WorkerLostError."""
        head = HEADER.pack(what, len(data))
        return self._exchanged([head, data], time.monotonic() + timeout_s, most_bytes)

    def _exchanged(
        self, parts: list[bytes], deadline: float, most_bytes: int
    ) -> tuple[bytes, bytearray]:
        begun = time.monotonic()
        try:
            for part in parts:
                self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                self._connection.sendall(part)
            kind, length = HEADER.unpack(self._received(HEADER.size, deadline))
            if length > most_bytes:
                raise _WorkerLostError(f"announced {length} bytes, more than {most_bytes}")
            return kind, self._received(length, deadline)
        except TimeoutError:
            raise _WorkerLostError(
                f"gave no answer within {time.monotonic() - begun:.3g} s and was ended"
            ) from None
        except OSError as error:
            raise _WorkerLostError(self._why_ended(error)) from error

    def _received(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        left = memoryview(data)
        while left:
            # A time-out of the socket is one of each part; many small ones must not add up.
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise TimeoutError
            number = self._connection.recv_into(left)
            if not number:
                raise ConnectionError("it closed its connection")
            left = left[number:]
        return data

    def _why_ended(self, error: OSError) -> str:
        self._kept.is_read.wait(_LAST_WORDS_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        code = self._process.returncode
        ended = str(error) if code is None else f"code {code}"
        printed = " ".join(self._said)
        return f"ended ({ended})" + (f", and printed last: {printed}" if printed else "")

    def end(self) -> None:
        """Kills the process, and frees what belongs to it; again does nothing."""
        if self._process.poll() is None:
            # It has not been waited for, so its number cannot belong to another group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._kept.has_ended.set()
        self._connection.close()
        _close(self._view)


def _close(view: View | None) -> None:
    if view is not None:
        view.close()


def _keep_last(said: deque[str], pipe: IO[bytes], _: socket.socket) -> None:
    """Keeps the last lines that a process prints."""
    while part := os.read(pipe.fileno(), 1 << 12):
        lines = part.decode(errors="replace").splitlines()
        said.extend(line[:200] for line in lines)
