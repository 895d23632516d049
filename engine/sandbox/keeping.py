"""Processes that a thread of their own keeps: it starts them, reads what they print, and stays.

The kernel ends a confined process with the thread that started it (PR_SET_PDEATHSIG), and who wants
one may be of any thread. So a thread lives as long as the process does.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, TypeAlias

Start: TypeAlias = Callable[[], tuple[subprocess.Popen[bytes], socket.socket]]
"""Starts a process, and gives our end of its connection."""

Read: TypeAlias = Callable[[IO[bytes], socket.socket], None]
"""Reads what a process prints, to its end or until that is too much; gets its connection too."""


class KeptProcess:
    """A process with the thread that keeps it. The thread holds nothing of who wanted the process.

    Who ends the process sets `has_ended`, and so lets the thread go.
    """

    def __init__(self, start: Start, read: Read) -> None:
        """Starts it.

        Args:
            start: Is called on the new thread.
            read: The same, once the process runs.

        Raises:
            OSError: The system has no process for it.
            RuntimeError: The system has no thread for it.
        """
        started: Future[tuple[subprocess.Popen[bytes], socket.socket]] = Future()
        self.is_read = threading.Event()
        """Whether all that the process printed has been read, or was too much."""
        self.has_ended = threading.Event()
        threading.Thread(
            target=_keep, args=(start, read, started, self.is_read, self.has_ended), daemon=True
        ).start()
        self.process, self.connection = started.result()


def _keep(
    start: Start,
    read: Read,
    started: Future[tuple[subprocess.Popen[bytes], socket.socket]],
    is_read: threading.Event,
    has_ended: threading.Event,
) -> None:
    try:
        process, connection = start()
    except BaseException as error:
        # Told to the thread that waits for the process.
        started.set_exception(error)
        return
    started.set_result((process, connection))
    assert process.stdout is not None
    with process.stdout as pipe:
        read(pipe, connection)
    is_read.set()
    has_ended.wait()
