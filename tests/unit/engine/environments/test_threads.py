"""Threads that run calls of environments."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from rolemesh.engine.environments.threads import Threads, num_threads

WAIT_S = 10.0


@pytest.mark.parametrize(
    ("memory_mib", "expected"), [(None, 64), (4096, 64), (512, 16), (64, 2), (16, 1)]
)
def test_stacks_take_a_quarter_of_the_address_space_at_most(
    memory_mib: int | None, expected: int
) -> None:
    assert num_threads(memory_mib) == expected


def test_jobs_run_at_once_up_to_the_size_and_further_ones_wait() -> None:
    threads, go = Threads(3), threading.Event()
    began = [threading.Event() for _ in range(4)]
    for one in began:
        threads.run(lambda one=one: (one.set(), go.wait(WAIT_S)))  # type: ignore[misc]
    assert all(one.wait(WAIT_S) for one in began[:3])
    assert not began[3].wait(0.1)
    go.set()
    assert began[3].wait(WAIT_S)


def test_a_job_that_has_ended_is_not_kept() -> None:
    class Job:
        def __init__(self) -> None:
            self.done = threading.Event()

        def __call__(self) -> None:
            self.done.set()

    threads, job = Threads(1), Job()
    gone, ended = weakref.ref(job), job.done
    threads.run(job)
    assert ended.wait(WAIT_S)
    del job
    until = time.monotonic() + WAIT_S
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


def test_where_no_further_thread_starts_those_that_run_take_all_jobs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads(8)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    go, ended = threading.Event(), [threading.Event() for _ in range(3)]
    for one in ended:
        threads.run(lambda one=one: (go.wait(WAIT_S), one.set()))  # type: ignore[misc]
    go.set()
    assert all(one.wait(WAIT_S) for one in ended)
    assert "1 threads run calls, and no more" in caplog.text
