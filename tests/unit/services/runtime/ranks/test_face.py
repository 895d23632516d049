"""Tests of how the face joins the answers of its ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.ranks.face import Face, join_answers, join_reports
from rolemesh.v1 import (
    experience_pb2,
    reward_pb2,
    trainer_pb2,
    worker_pb2_grpc,
)


def report(**fields: float) -> experience_pb2.CallReport:
    """Phases in whole seconds by name; the rest as it is."""
    made = experience_pb2.CallReport(num_tokens=int(fields.pop("num_tokens", 0)))
    for phase, seconds in fields.items():
        made.phases.add(phase=phase, duration=Duration(seconds=int(seconds)))
    return made


def test_a_report_has_the_slowest_rank_of_each_phase() -> None:
    joined = join_reports([report(fetch=1, compute=5), report(compute=3, fetch=2, queue=1)])
    seconds = {phase.phase: phase.duration.seconds for phase in joined.phases}
    assert seconds == {"fetch": 2, "compute": 5, "queue": 1}


def test_a_report_has_the_tokens_bytes_and_peaks_of_all_ranks_and_metrics_of_the_first() -> None:
    parts = [report(num_tokens=30), report(num_tokens=12)]
    for rank, part in enumerate(parts):
        part.metrics["loss"] = 0.5
        part.fetched_bytes["shm"] = 100
        part.memory.add(phase="compute", rank=rank, peak_bytes=7 + rank)
    parts[1].fetched_bytes["grpc"] = 8
    joined = join_reports(parts)
    assert joined.num_tokens == 42
    assert dict(joined.metrics) == {"loss": 0.5}
    assert dict(joined.fetched_bytes) == {"shm": 200, "grpc": 8}
    assert [(m.rank, m.peak_bytes) for m in joined.memory] == [(0, 7), (1, 8)]


def test_answers_join_reports_and_references_and_leave_the_parts_alone() -> None:
    def part(row: int) -> trainer_pb2.ForwardBackwardResult:
        shard = experience_pb2.Shard(experience_id=f"of {row}", row_start=row, num_rows=1)
        return trainer_pb2.ForwardBackwardResult(
            report=report(num_tokens=5),
            outputs=experience_pb2.ExperienceRef(
                num_rows=2, groups=[experience_pb2.ColumnGroup(shards=[shard])]
            ),
        )

    parts = [part(1), part(0)]
    joined = join_answers(parts)
    shards = joined.outputs.groups[0].shards
    assert [shard.experience_id for shard in shards] == ["of 0", "of 1"]
    assert joined.report.num_tokens == 10
    assert parts == [part(1), part(0)]


def test_everything_else_is_that_of_the_first_rank() -> None:
    answers = [
        trainer_pb2.UpdateResult(policy_version=3, report=report(num_tokens=1)) for _ in range(2)
    ]
    answers[0].expert_loads.add(layer=1, choices=[3, 4])
    joined = join_answers(answers)
    assert joined.policy_version == 3
    # Only the face tells loads of experts, which are those of all ranks.
    assert [list(one.choices) for one in joined.expert_loads] == [[3, 4]]


def test_an_answer_that_only_a_later_rank_has_is_taken() -> None:
    # Only the last stage of a pipeline has scores.
    answers = [reward_pb2.Rewards(), reward_pb2.Rewards(rewards=[1.0, 0.5])]
    assert list(join_answers(answers).rewards) == [1.0, 0.5]


async def test_a_rank_that_has_ended_has_left_and_one_that_refuses_has_not() -> None:
    # It answers, and knows no Drain.
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        face = Face("toy", [channel], lambda _: None)
        assert not await face.leave()
        await server.stop(None)
        assert await face.leave()


async def test_a_rank_whose_server_stops_while_it_is_told_to_end_has_left() -> None:
    """As when an engine tells all processes at once: the rank may be further than the face.

    One of sixty calls that arrive while a server stops ends as here, the others are answered.
    """

    class Ending(worker_pb2_grpc.WorkerServiceServicer):
        async def Drain(self, request: object, context: Any) -> None:
            await context.abort(grpc.StatusCode.CANCELLED)

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Ending(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        assert await Face("toy", [channel], lambda _: None).leave()
    await server.stop(None)


@pytest.mark.parametrize(
    ("of_this_rank", "told"),
    [("tp is 2", "tp is 2"), ("its peer failed", "toy rank 1: tp is 2")],
    ids=["alike", "otherwise"],
)
async def test_what_all_ranks_say_is_said_of_the_service_whichever_is_first(
    of_this_rank: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(face: Face, rank: int, *_: Any) -> None:
        raise face._of_rank(rank, InvalidRequestError("tp is 2"))

    async def work() -> None:
        await asyncio.sleep(0.05)
        raise InvalidRequestError(of_this_rank)

    monkeypatch.setattr(Face, "_ask", ask)
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(InvalidRequestError) as caught:
            await Face("toy", [channel], lambda _: None).everywhere(reward_pb2.Rewards(), work)
    assert caught.value.message == told
