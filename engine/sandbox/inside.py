"""The first steps of a worker process, before it loads code of a user."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.landlock import confine, confine_connections
from rolemesh.engine.sandbox.view import View

_PR_SET_PDEATHSIG = 1


def begin(arguments: Sequence[str]) -> tuple[socket.socket, Mapping[str, Any] | None]:
    """Binds this process to its service, and takes its limits and its sandbox.

    Args:
        arguments: Descriptor of the inherited socket, and process id of the parent.

    Returns:
        The connection, and the first message; None where the other end has closed.

    Raises:
        OSError: The kernel refused a limit or the sandbox.
    """
    descriptor, parent_pid = int(arguments[0]), int(arguments[1])
    _end_with_parent(parent_pid)
    connection = socket.socket(fileno=descriptor)
    # Processes that the user's code starts must not hold the connection open.
    connection.set_inheritable(False)
    order = frames.read(connection, frames.MAX_CALL_BYTES)
    if order is not None:
        # A crash must not write memory to disk.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if order["memory_bytes"] is not None:
            set_limit(resource.RLIMIT_AS, order["memory_bytes"])
        sandbox = order["sandbox"]
        if sandbox is not None and sandbox["kind"] != "none":
            view = View.read(sandbox["view"])
            if sandbox["kind"] == "landlock":
                confine(view, sandbox["abi"])
            elif view.ports and not view.network:
                confine_connections(view)
    return connection, order


def _end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    The thread lives as long as its workers. The kernel also ends code that never releases the
    interpreter, which no thread in here could do.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {os.strerror(number)}")
    # The parent may have ended before the request to the kernel.
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent {parent_pid} is gone")


def set_limit(kind: int, value: int) -> None:
    """Sets a limit of this process, or keeps that of the service if it is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def is_of_system(error: BaseException | None) -> bool:
    """Whether the system refused something, which a sandbox may be the reason for."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False
