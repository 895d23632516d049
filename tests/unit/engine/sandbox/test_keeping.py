"""Processes that a thread of their own keeps."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import IO

import pytest

from rolemesh.engine.sandbox.keeping import KeptProcess

CHILD = """
import ctypes, os, socket, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
line = socket.socket(fileno=int(sys.argv[1]))
os.close(1)
while line.recv(1):
    line.send(b"y")
"""
"""Prints nothing more, and answers until its connection is closed or its parent thread ends."""


def start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def read(pipe: IO[bytes], connection: socket.socket) -> None:
    while pipe.read(64):
        pass


def test_a_process_that_has_closed_its_output_is_kept() -> None:
    """Its thread would else end with what it prints, and the kernel the process with the thread."""
    kept = KeptProcess(start, read)
    try:
        assert kept.is_read.wait(60)
        # A thread that ends takes a moment to: it is looked for, and must still be there.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = kept.process.wait(0.5)
            raise AssertionError(f"the process ended with {code}")
        kept.connection.send(b"x")
        assert kept.connection.recv(1) == b"y"
    finally:
        kept.connection.close()
        kept.process.wait(60)
        kept.has_ended.set()


def test_a_process_that_cannot_be_started_is_the_owners_error() -> None:
    before = threading.active_count()

    def refuse() -> tuple[subprocess.Popen[bytes], socket.socket]:
        raise OSError("no process")

    with pytest.raises(OSError, match="no process"):
        KeptProcess(refuse, read)
    assert threading.active_count() <= before + 1
