"""A training loop over fake roles within one process and a clock that jumps.

There are no sockets, and nobody waits: when nothing can go on before a timer, the clock jumps to
it. When nothing can go on at all, that is a deadlock, and an error. So a test can make hundreds of
runs with delays of its choice, each the same whenever it is made again.
"""

from __future__ import annotations

import asyncio
import selectors
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from support.fake_roles import FakeMesh, FakeRole

from rolemesh.coordinator.algorithms.registry import algorithm_of, roles_in
from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.wishes import Wishes
from rolemesh.coordinator.run.results.metrics import MetricsWriter
from rolemesh.coordinator.run.results.samples import SampleTaker
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.steps.training import TrainingLoop
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel

RUN_ID = "in-process"
T = TypeVar("T")


class DeadlockError(Exception):
    """Nothing can happen any more."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> Any:
        # At once: a thread would have a clock of its own.
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        waiting: Any = self
        if not waiting._ready and not self.is_closed():
            if not waiting._scheduled and not waiting._stopping:
                raise DeadlockError("no task can go on, and no timer is set")
            if waiting._scheduled:
                self._now = max(self._now, waiting._scheduled[0]._when)
        cast(Any, super())._run_once()


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a clock of its own, and ends what it leaves behind."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


class _Stream:
    """The answers of a fake within the process, for which a caller waits without a bound."""

    idle_s = None

    def __init__(self, answers: AsyncIterator[Any]) -> None:
        self._answers = answers

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers


class _Channel:
    """A channel to a fake within the process."""

    address = "in process"

    def __init__(self, fake: FakeRole) -> None:
        self._fake = fake

    def unary_unary(self, path: str, **_: Any) -> Any:
        method = path.rpartition("/")[2]
        return lambda request, timeout=None: getattr(self._fake, method)(request, None)

    stream_unary = unary_unary

    def unary_stream(self, path: str, **_: Any) -> Any:
        method = self.unary_unary(path)
        return lambda request, timeout=None: _Stream(method(request))


class _Connection(RoleConnection):
    """A connection without a server."""

    def __init__(self, fake: FakeRole) -> None:
        # The channel is never used, so nothing is connected.
        super().__init__(fake.service, "127.0.0.1:1", ChannelTraffic())
        self.client = ServiceClient(cast(MeshChannel, _Channel(fake)))


class _NoFiles:
    """Takes records and writes none."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, float]] = []
        self.nodes: list[Node] = []

    async def write_step(self, record: Mapping[str, float]) -> None:
        self.records.append(dict(record))

    async def write_before(self, scalars: Mapping[str, float]) -> None:
        """Kept by nobody."""

    def write_loads(self, step: int, nodes: Sequence[Node]) -> None:
        """Kept by nobody."""

    async def tell_loads(self, step: int) -> None:
        """Kept by nobody."""

    async def write_graph(self, step: int, nodes: Sequence[Node]) -> None:
        self.nodes += nodes


class _Events(QuietObserver):
    """Keeps what is worth a line."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, text: str) -> None:
        self.events.append(text)


class InProcessRun:
    """The training loop of a recipe, its fakes, and what it wrote."""

    def __init__(self, recipe: Recipe, directory: Path, **settings: Any) -> None:
        """Prepares a run; its checkpoint and its model go to the directory."""
        self.recipe = recipe
        self.mesh = FakeMesh(**settings)
        for role in roles_in(recipe):
            self.mesh.add(role, len(recipe.services_of(role)))
        self.store = MemoryStateStore()
        self.journal = Journal(self.store, RUN_ID, epoch=1)
        self.services = RunMesh({}, (), self.journal, QuietObserver())
        self.services.connections = {
            service: _Connection(fake) for service, fake in self.mesh.roles.items()
        }
        self.written = _NoFiles()
        events = EventLog(self.store, RUN_ID)
        self.wishes = Wishes(self.store, RUN_ID, events, QuietObserver())
        self.observer = _Events()
        parts = RunParts(
            recipe=recipe,
            run_id=RUN_ID,
            directory=directory,
            store=self.store,
            observer=self.observer,
            events=events,
            wishes=self.wishes,
            writer=cast(MetricsWriter, self.written),
            services=tuple(self.mesh.roles),
            algorithm=algorithm_of(recipe),
            progress=RunProgress(),
            traffic=ChannelTraffic(),
            identity=None,
            watch=WatchSettings(),
            loss_grace_s=0.0,
        )
        samples = SampleTaker(self.store, RUN_ID, None, QuietObserver(), num_rows=0, file=None)
        self.loop = TrainingLoop(parts, self.services, self.journal, samples)

    async def execute(self) -> None:
        """Initialises the roles and trains."""
        await self.store.create_run(
            RunRecord(
                run_id=RUN_ID, name="fake", num_steps=self.recipe.run.steps, directory="",
                created_at=0.0, updated_at=0.0,
            )
        )  # fmt: skip
        await self.store.next_epoch(RUN_ID)
        for connection in self.services.connections.values():
            await connection.learn_capabilities()
        await self.services.initialize(self.recipe)
        await self.loop.run()

    def left_running(self) -> list[str]:
        """Calls and tasks that have not ended, but for the caller's own."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        calls = [call.name for call in self.mesh.calls if call.state == "running"]
        return calls + [task.get_name() for task in tasks]


def made(recipe: Recipe, **fakes: Any) -> InProcessRun:
    """A run that has made its steps, and has left nothing running."""

    async def work() -> InProcessRun:
        with tempfile.TemporaryDirectory() as directory:
            run = InProcessRun(recipe, Path(directory), **fakes)
            await run.execute()
        assert run.left_running() == []
        return run

    return run_jumping(work())
