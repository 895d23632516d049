"""Bond of a process to its parent: it ends when the parent is gone."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

import psutil

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""How often the parent is looked for if the kernel cannot report its end."""


def follow_parent(parent_pid: int, grace_s: float, before_exit: Callable[[], None]) -> None:
    """Ends this process when another one is gone: SIGTERM to itself, and after `grace_s` at once.

    A thread waits on the parent's pidfd. PR_SET_PDEATHSIG is not used: it fires when the *thread*
    that started us ends, which in an asyncio parent may be a pool thread. The thread also works
    while the loop is blocked.

    Args:
        parent_pid: Process to follow. It may be gone already, which ends this process, too.
        grace_s: Longest time for the drain.
        before_exit: Called if the drain took too long, to free what must not be left behind.
    """

    def watch() -> None:
        _wait_for_end(parent_pid)
        logger.warning("parent process %d is gone: the service ends", parent_pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        logger.error("the service did not end within %.1f s of its parent: leaving now", grace_s)
        before_exit()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        # This kernel has no pidfd. A child of a dead parent gets another parent, so the pid is
        # compared.
        is_child = os.getppid() == pid
        while os.getppid() == pid if is_child else psutil.pid_exists(pid):
            time.sleep(POLL_INTERVAL_S)
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)
