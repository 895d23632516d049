"""Real processes as ranks: they meet over loopback, run functions of tests and hand back values.

Usage, with processes of its own::

    def gather(at: RankContext, scale: float) -> list[float]:
        with at.connect(HybridLayout(TrainLayout(tp=2))) as mesh:
            parts = [torch.zeros(1) for _ in mesh.tp.ranks]
            dist.all_gather(parts, torch.tensor([scale * at.rank]), group=mesh.tp.process_group)
            return [float(part) for part in parts]

    assert run_ranks(gather, 2, 10.0) == [[0.0, 10.0], [0.0, 10.0]]

Usage, with processes that outlive the test, by the session's fixture (see tests/conftest.py)::

    def test_gather(rank_pool: RankPool) -> None:
        assert rank_pool.run(gather, 2, 10.0) == [[0.0, 10.0], [0.0, 10.0]]

The function stands at the top level of any importable module or test file; it travels by name. It
gets the rank's RankContext and then the arguments, which are pickled, as is what it returns
(tensors by value, without what they share with others). Module state, torch's seed and
its default dtype stay as a function leaves them: seed in the function. Torch's world is closed
after it. Whoever wants a rank's failure rather than an exception takes `RankPool.outcomes`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any

import torch.distributed as dist
from support import warm_processes
from support.rank_child import RankOutcome, by_value, located

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
"""For a process to import torch, while other tests load the machine."""
STORE_TIMEOUT_S = 60.0
GRACE_S = 5.0
"""What the other ranks are given to end by themselves when one has failed."""
OF_ANOTHER_RANK = "caused by a remote worker"
"""In what gloo says when another rank closed a connection, e.g. since it unwinds from its error."""
CHILD_ENVIRONMENT = {
    # More threads than cores make gloo's ranks wait for each other's spinning.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time: names it and holds its traceback."""

    def __init__(self, rank: int, text: str, others: str = "") -> None:
        super().__init__(f"rank {rank}: {text}{others}")
        self.rank = rank


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's function knows about its surroundings."""

    rank: int
    """0 <= rank < world_size."""
    world_size: int
    """Ranks that run the function."""
    port: int
    """Of the TCPStore on HOST, which the test's process serves."""
    prefix: str
    """Of the keys in the store; new with each call."""

    def store(self, name: str = "store") -> dist.Store:
        """Where the ranks of this call meet, empty at first; a store for each name."""
        return dist.PrefixStore(f"{self.prefix}/{name}", _client(self.port))

    def tell(self, blob: bytes, name: str = "offers") -> list[bytes]:
        """Gives a blob to all ranks and takes theirs, in the order of ranks; all ranks call it."""
        store = self.store(name)
        store.set(str(self.rank), blob)
        return [bytes(store.get(str(rank))) for rank in range(self.world_size)]

    @contextlib.contextmanager
    def connect(
        self,
        layout: HybridLayout,
        *,
        name: str = "mesh",
        backend: str = "gloo",
        timeout_s: float = 60.0,
    ) -> Iterator[RankMesh]:
        """This rank's mesh, closed at the end.

        Args:
            layout: of all ranks.
            name: of the store; give another one to each further mesh of the same call.
            backend: of torch.distributed.
            timeout_s: of each collective operation.
        """
        mesh = RankMesh.connect(
            layout, rank=self.rank, store=self.store(name), backend=backend, timeout_s=timeout_s
        )
        try:
            yield mesh
        finally:
            mesh.close()


@dataclass(slots=True)
class _Child:
    process: warm_processes.Fork
    pipe: connection.Connection


class RankPool:
    """Up to `max_ranks` processes that run functions one after another. For one thread.

    Processes start when they are first needed. After a failure those that still work are killed,
    by their handles, and replaced by the next call.
    """

    def __init__(self, max_ranks: int) -> None:
        self.max_ranks = max_ranks
        self._children: list[_Child] = []
        self._store: dist.TCPStore | None = None
        self._num_calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """Runs `function(context, *args)` on ranks 0..world_size-1 at once.

        Args:
            function: at the top level of its module.
            world_size: number of ranks, at most max_ranks.
            *args: the same for all ranks.
            timeout_s: for the function, start of processes not included.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankFailedError: a rank raised, died or is late; of several the one that was first,
                those last that only lost their connection to another one.
        """
        outcomes, order = self._call(function, world_size, args, timeout_s, wait_for_all=False)
        failures = {
            rank: failure for rank in order if (failure := outcomes[rank].failure) is not None
        }
        if failures:
            first, *others = sorted(failures, key=lambda rank: OF_ANOTHER_RANK in failures[rank])
            told = "".join(f"\nrank {rank} as well: {failures[rank]}" for rank in others)
            raise RankFailedError(first, failures[first], told)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
    ) -> list[RankOutcome]:
        """As `run`, but waits for every rank and returns failures instead of raising them."""
        outcomes, _ = self._call(function, world_size, args, timeout_s, wait_for_all=True)
        return outcomes

    def close(self) -> None:
        """Ends all processes."""
        for child in self._children:
            child.pipe.close()  # A waiting child reads the end of the pipe and returns.
        self._kill(range(len(self._children)), after_s=GRACE_S)
        self._children.clear()
        self._store = None

    def _call(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        timeout_s: float,
        *,
        wait_for_all: bool,
    ) -> tuple[list[RankOutcome], list[int]]:
        """Outcomes by rank, and the ranks in the order in which they ended."""
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size is {world_size}: give 1 to {self.max_ranks}")
        where = located(function)
        self._start(world_size)
        assert self._store is not None  # _start makes it
        self._num_calls += 1
        prefix = f"call{self._num_calls}"
        contexts = [
            RankContext(rank, world_size, self._store.port, prefix) for rank in range(world_size)
        ]
        # All are pickled before the first is sent: what cannot be pickled reaches no rank.
        messages = [by_value((context, args)) for context in contexts]
        try:
            for child, message in zip(self._children, messages, strict=False):
                child.pipe.send(where)
                child.pipe.send_bytes(message)
            return self._await(world_size, timeout_s, wait_for_all=wait_for_all)
        except BaseException:
            # A test's own time limit, or the keyboard: late answers must not meet the next call.
            self._kill(range(world_size))
            raise

    def _await(
        self, world_size: int, timeout_s: float, *, wait_for_all: bool
    ) -> tuple[list[RankOutcome], list[int]]:
        outcomes: dict[int, RankOutcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < world_size:
            waiting = {
                self._children[rank].pipe: rank
                for rank in range(world_size)
                if rank not in outcomes
            }
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting[pipe]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].failure is not None and not wait_for_all:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        late = [rank for rank in range(world_size) if rank not in outcomes]
        for rank in late:
            outcomes[rank] = RankOutcome(
                failure=f"did not end within {timeout_s} s, or {GRACE_S} s after another's failure"
            )
        order = list(outcomes)
        self._kill(late)
        return [outcomes[rank] for rank in range(world_size)], order

    def _receive(self, rank: int) -> RankOutcome:
        try:
            outcome = self._children[rank].pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._children[rank].process
            return RankOutcome(failure=f"died with exit code {process.wait(GRACE_S)}")
        assert isinstance(outcome, RankOutcome)
        return outcome

    def _start(self, world_size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank, child in enumerate(self._children):
            if child.process.wait(0.0) is not None:
                child.pipe.close()
                self._children[rank] = self._spawn()
        while len(self._children) < world_size:
            self._children.append(self._spawn())
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, child in enumerate(self._children):
            child.pipe.send(None)
            if not child.pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise RankFailedError(rank, f"its process did not start in {START_TIMEOUT_S} s")
            try:
                child.pipe.recv()
            except EOFError:
                code = child.process.wait(GRACE_S)
                text = f"its process ended at start with exit code {code}"
                self.close()
                raise RankFailedError(rank, text) from None

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            variables = {**os.environ, **CHILD_ENVIRONMENT, **path}
            words = ["-m", "support.rank_child"]
            process = warm_processes.Fork("RANKS", words, theirs.fileno(), variables)
        return _Child(process, connection.Connection(ours.detach()))

    def _kill(self, ranks: range | list[int], after_s: float = 0.0) -> None:
        deadline = time.monotonic() + after_s
        for rank in ranks:
            self._children[rank].process.wait(max(0.0, deadline - time.monotonic()))
        for rank in ranks:
            self._children[rank].process.kill()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """`RankPool.run` on processes that end with it."""
    with RankPool(world_size) as pool:
        return pool.run(function, world_size, *args, timeout_s=timeout_s)


_clients: dict[int, dist.TCPStore] = {}


def _client(port: int) -> dist.TCPStore:
    if port not in _clients:
        timeout = datetime.timedelta(seconds=STORE_TIMEOUT_S)
        _clients[port] = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    return _clients[port]
