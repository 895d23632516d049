"""The ledger: once an identity, bounded, epochs only upwards."""

from __future__ import annotations

import asyncio

import pytest

from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.runtime.server.operations import Identity, Operation, OperationLedger
from rolemesh.v1 import operation_pb2, worker_pb2


def key(step: int = 0, epoch: int = 1, run_id: str = "run") -> operation_pb2.OperationKey:
    return operation_pb2.OperationKey(
        run_id=run_id, fencing_epoch=epoch, step=step, operation="actor.update"
    )


def request(step: int = 0) -> worker_pb2.SleepRequest:
    return worker_pb2.SleepRequest(key=key(step))


async def answer(operation: Operation) -> worker_pb2.SleepResponse:
    await asyncio.sleep(0)
    return worker_pb2.SleepResponse(freed_bytes=operation.identity[2])


async def do(ledger: OperationLedger, step: int) -> tuple[Identity, Operation]:
    identity = ledger.check_epoch(key(step))
    operation = ledger.start(identity, "M", request(step), answer)
    assert operation.task is not None
    await operation.task
    return identity, operation


async def test_the_answers_of_the_newest_operations_are_kept() -> None:
    ledger = OperationLedger(capacity=3)
    done = [await do(ledger, step) for step in range(5)]
    kept = [ledger.find(identity, "M", request(step)) for step, (identity, _) in enumerate(done)]
    assert [operation is not None for operation in kept] == [False, False, True, True, True]


async def test_an_operation_in_progress_is_never_forgotten() -> None:
    ledger = OperationLedger(capacity=1)
    gate = asyncio.Event()

    async def wait(operation: Operation) -> worker_pb2.SleepResponse:
        await gate.wait()
        return worker_pb2.SleepResponse()

    identity = ledger.check_epoch(key(0))
    running = ledger.start(identity, "M", request(0), wait)
    await do(ledger, 1)
    await do(ledger, 2)
    assert ledger.find(identity, "M", request(0)) is running
    assert ledger.running() == [running]
    gate.set()
    assert running.task is not None
    await running.task
    assert ledger.running() == []


async def test_a_reused_key_is_refused() -> None:
    ledger = OperationLedger()
    identity, _ = await do(ledger, 1)
    with pytest.raises(InvalidRequestError):
        ledger.find(identity, "Other", request(1))
    with pytest.raises(InvalidRequestError):
        ledger.find(identity, "M", request(2))


def test_epochs_only_rise_and_each_run_has_its_own() -> None:
    ledger = OperationLedger()
    ledger.heed("run", 3)
    ledger.check_epoch(key(epoch=3))
    ledger.heed("run", 2)
    ledger.check_epoch(key(epoch=1, run_id="other"))
    with pytest.raises(PreconditionError) as caught:
        ledger.check_epoch(key(epoch=2))
    assert caught.value.reason == "STALE_EPOCH"


async def test_each_listener_hears_all_events_in_order_whenever_it_comes() -> None:
    ledger = OperationLedger()
    gate, heard_first = asyncio.Event(), asyncio.Event()

    async def work(operation: Operation) -> worker_pb2.SleepResponse:
        operation.add_event(request(1))
        await heard_first.wait()
        operation.add_event(request(2))
        await gate.wait()
        # The last one together with the end.
        operation.add_event(request(3))
        return worker_pb2.SleepResponse()

    operation = ledger.start(ledger.check_epoch(key()), "M", request(), work)

    async def listen() -> list[int]:
        steps = []
        async for event in operation.told(60.0):
            assert isinstance(event, worker_pb2.SleepRequest)
            steps.append(event.key.step)
            heard_first.set()
            if steps == [1, 2]:
                gate.set()
        return steps

    async with asyncio.TaskGroup() as group:
        early = [group.create_task(listen()) for _ in range(3)]
    assert [task.result() for task in early] == [[1, 2, 3]] * 3
    assert await listen() == [1, 2, 3]


async def test_silence_asks_for_a_sign_of_life() -> None:
    ledger = OperationLedger()
    gate = asyncio.Event()

    async def work(operation: Operation) -> worker_pb2.SleepResponse:
        await gate.wait()
        return worker_pb2.SleepResponse()

    operation = ledger.start(ledger.check_epoch(key()), "M", request(), work)
    told = operation.told(0.001)
    assert [await anext(told), await anext(told)] == [None, None]
    gate.set()
    assert [event async for event in told if event is not None] == []


async def test_what_was_told_before_a_failure_is_heard() -> None:
    ledger = OperationLedger()

    async def work(operation: Operation) -> worker_pb2.SleepResponse:
        operation.add_event(request(1))
        raise ValueError("no more")

    operation = ledger.start(ledger.check_epoch(key()), "M", request(), work)
    operation.num_listeners += 1
    assert [event async for event in operation.told(60.0)] == [request(1)]
    assert operation.task is not None
    assert isinstance(operation.task.exception(), ValueError)
