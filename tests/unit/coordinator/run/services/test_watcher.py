"""What the looks at a service add up to. Services are scripts of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support.fake_roles import until

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.run.services.watcher import Watcher, WatchSettings
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import ServiceLease
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import CallCancelledError, DeadlineError, UnavailableError
from rolemesh.v1 import operation_pb2, worker_pb2

BUSY, READY = worker_pb2.WORKER_STATE_BUSY, worker_pb2.WORKER_STATE_READY
QUICK = WatchSettings(interval_s=0.001, stall_s=0.05)


def status(done: int = 0, *, state: Any = READY, **fields: Any) -> worker_pb2.GetStatusResponse:
    progress = operation_pb2.Progress(stage="backward", done=done, total=8)
    values = {"run_id": "run", "operation": "actor.update" if state == BUSY else "", **fields}
    return worker_pb2.GetStatusResponse(state=state, progress=progress, **values)


class Script:
    """Stands for a service's client: gives its answers in turn, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_looks = 0

    def within(self, _: float) -> Script:
        return self

    async def get_status(self, run_id: str) -> worker_pb2.GetStatusResponse:
        assert run_id == "run"
        self.num_looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, worker_pb2.GetStatusResponse)
        return answer


class Watched:
    """One service under watch."""

    def __init__(
        self, *answers: Any, settings: WatchSettings = QUICK, store: MemoryStateStore | None = None
    ) -> None:
        self.script = Script(*answers)
        self.connection = connection = RoleConnection("actor", "127.0.0.1:1", ChannelTraffic())
        connection.client = self.script  # type: ignore[assignment]
        self.losses: list[tuple[str, str]] = []
        self.store = store or MemoryStateStore()
        self.watcher = Watcher(
            [connection],
            self.store,
            "run",
            settings,
            on_lost=lambda *loss: self.losses.append(loss),
            on_devices=self._on_devices,
            beat=self._beat,
        )

    def _on_devices(self, service: str, devices: Sequence[worker_pb2.DeviceUse]) -> None:
        pass

    async def _beat(self) -> None:
        pass

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self.watcher.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def looked(self, times: int) -> None:
        seen = self.script.num_looks
        await until(lambda: self.script.num_looks >= seen + times)

    async def loss(self) -> str:
        await until(lambda: bool(self.losses))
        ((service, text),) = self.losses
        assert service == "actor"
        assert text.startswith("actor rank 0 (127.0.0.1:1) ")
        return text.removeprefix("actor rank 0 (127.0.0.1:1) ")


async def test_a_service_without_the_run_is_lost_once_it_had_it() -> None:
    async with Watched(status(run_id="")) as watched:
        await watched.looked(5)
        assert watched.losses == []
        watched.watcher.ready.add("actor")
        assert (await watched.loss()).startswith("has lost the run: it answers, but holds no run.")


async def test_a_service_that_another_run_took_is_lost() -> None:
    async with Watched(status(), status(run_id="other")) as watched:
        watched.watcher.ready.add("actor")
        assert "holds run 'other'" in await watched.loss()


async def test_an_answer_to_a_question_from_before_the_run_was_there_is_no_loss() -> None:
    watched = Watched(status(run_id=""), status())
    ask, begun = watched.script.get_status, asyncio.Event()

    async def slow(run_id: str) -> worker_pb2.GetStatusResponse:
        answer = await ask(run_id)
        begun.set()
        await asyncio.sleep(0.02)
        return answer

    watched.script.get_status = slow  # type: ignore[method-assign]
    async with watched:
        await begun.wait()
        watched.watcher.ready.add("actor")
        await watched.looked(2)
        assert watched.losses == []


async def test_what_a_replaced_process_says_late_is_no_loss_of_the_new_one() -> None:
    watched = Watched(UnavailableError("refused"))
    old, asked, replaced = watched.script, asyncio.Event(), asyncio.Event()
    refuse = old.get_status

    async def late(run_id: str) -> worker_pb2.GetStatusResponse:
        if old.num_looks == 1:
            # It is replaced within one turn of the watch, which never sees it absent.
            asked.set()
            await replaced.wait()
        return await refuse(run_id)

    old.get_status = late  # type: ignore[method-assign]
    async with watched:
        await asked.wait()
        new = RoleConnection("actor", "127.0.0.1:1", ChannelTraffic())
        # One refusal is no loss: those of the old process do not count.
        watched.script = Script(UnavailableError("not yet"), status())
        new.client = watched.script  # type: ignore[assignment]
        watched.connection.lost()
        watched.connection.replace(new)
        replaced.set()
        await until(lambda: watched.script.num_looks > 3 or bool(watched.losses))
        assert watched.losses == []


async def test_a_server_that_cancels_what_it_is_asked_is_about_to_end() -> None:
    stops = CallCancelledError("CANCELLED")
    # One alone is no loss.
    async with Watched(stops, status()) as watched:
        await watched.looked(5)
        assert watched.losses == []
    async with Watched(stops) as watched:
        assert (await watched.loss()).startswith("is gone: ")


async def test_a_busy_service_without_progress_is_lost() -> None:
    async with Watched(status(3, state=BUSY)) as watched:
        assert "has made no progress in actor.update, backward for" in await watched.loss()


async def test_progress_another_operation_and_idling_are_no_stall() -> None:
    for answers in (
        [status(number, state=BUSY) for number in range(1000)],
        [status(state=BUSY, operation=f"critic.update {number}") for number in range(1000)],
        [status(3, state=(BUSY, READY)[number % 2]) for number in range(1000)],
        [status(3, run_id="earlier", state=BUSY)],
    ):
        async with Watched(*answers) as watched:
            await asyncio.sleep(4 * QUICK.stall_s)
            assert watched.losses == []


async def test_a_stall_may_be_switched_off() -> None:
    settings = WatchSettings(interval_s=0.001, stall_s=0)
    async with Watched(status(3, state=BUSY), settings=settings) as watched:
        await watched.looked(50)
        assert watched.losses == []


async def test_refusals_in_a_row_are_a_loss_and_silence_is_one_after_a_long_time() -> None:
    gone, silent = UnavailableError("refused"), DeadlineError("too late")
    async with Watched(gone, status(), gone, silent, gone, status(), gone, gone) as watched:
        assert await watched.loss() == "is gone: refused"
        assert watched.script.num_looks == 8
    async with Watched(silent) as watched:
        await watched.looked(20)
        assert watched.losses == []
    settings = WatchSettings(interval_s=0.001, silence_until_lost_s=0.05)
    async with Watched(silent, settings=settings) as watched:
        assert "has not answered for" in await watched.loss()


async def test_a_store_that_is_away_does_not_keep_the_watch_from_looking() -> None:
    class Away(MemoryStateStore):
        is_asked = False

        async def register_service(self, lease: ServiceLease, ttl_s: float) -> ServiceLease:
            self.is_asked = True
            await asyncio.Event().wait()
            raise AssertionError

    store = Away()
    settings = WatchSettings(interval_s=0.001, silence_until_lost_s=0.05)
    async with Watched(status(), settings=settings, store=store) as watched:
        await until(lambda: store.is_asked)
        # The store is away for longer than a service may be silent.
        await asyncio.sleep(2 * settings.silence_until_lost_s)
        await watched.looked(5)
        assert watched.losses == []


async def test_leases_are_renewed_while_the_service_answers() -> None:
    async with Watched(status(3, state=BUSY, operation="actor.update")) as watched:
        await until(lambda: bool(watched.store._services))
        (lease,) = await watched.store.list_services()
    assert (lease.name, lease.run_id, lease.status) == (
        "actor",
        "run",
        "busy: actor.update, backward 3 of 8",
    )
