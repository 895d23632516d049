"""The pipeline over real connections: fake stages, traced."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.rank_processes import RankContext, RankPool

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.agreement import gather_facts, prepare_together
from rolemesh.engine.parallel.buckets import buckets, sum_over, unpack
from rolemesh.engine.parallel.pipeline import Pipeline

WIDTH = 3
SIZES = [10, 9, 3, 1, 8, 4]
"""Every micro-batch has its own."""


@dataclass
class Trace:
    """What a stage saw."""

    forwards: list[tuple[int, tuple[int, ...], float]]
    """Number, shape and sum of the hidden states that came in."""
    done: list[int]
    most_held: int
    gradient: float


def run_stages(at: RankContext, trains: bool) -> Trace:
    """Each stage multiplies by a weight of its own; the loss is the sum of what comes out."""
    with at.connect(HybridLayout(TrainLayout(pp=at.world_size))) as mesh:
        pipeline = Pipeline(mesh, width=WIDTH, device=torch.device("cpu"))
        weight = torch.full((), float(mesh.pp.index + 2), requires_grad=True)
        trace = Trace([], [], 0, 0.0)

        def forward(number: int, hidden_1SD: torch.Tensor | None) -> torch.Tensor | None:
            if hidden_1SD is None:
                hidden_1SD = torch.full((1, SIZES[number], WIDTH), float(number + 1))
            seen = hidden_1SD.detach()
            trace.forwards.append((number, tuple(seen.shape), float(seen.sum())))
            trace.most_held = max(trace.most_held, len(trace.forwards) - len(trace.done))
            output = hidden_1SD * weight
            if not pipeline.is_last:
                return output
            return output.sum() if trains else None

        (pipeline.train if trains else pipeline.score)(SIZES, forward, trace.done.append)
        trace.gradient = float(weight.grad) if weight.grad is not None else 0.0
        return trace


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_hidden_states_and_gradients_reach_the_right_micro_batch(
    rank_pool: RankPool, num_stages: int
) -> None:
    traces = rank_pool.run(run_stages, num_stages, True)
    product = 1.0
    sums = [(number + 1.0) * num_tokens * WIDTH for number, num_tokens in enumerate(SIZES)]
    all_weights = float(torch.arange(2, num_stages + 2).prod())
    for stage, trace in enumerate(traces):
        assert trace.forwards == [
            (number, (1, SIZES[number], WIDTH), sums[number] * product)
            for number in range(len(SIZES))
        ]
        assert trace.done == list(range(len(SIZES)))
        assert trace.most_held == min(num_stages - stage, len(SIZES))
        product *= stage + 2
        # d loss / d weight = product of all others x sum of inputs; whole numbers, so exact.
        assert trace.gradient == all_weights / (stage + 2) * sum(sums)


def test_scoring_goes_forward_only(rank_pool: RankPool) -> None:
    traces = rank_pool.run(run_stages, 3, False)
    for trace in traces:
        assert [number for number, _, _ in trace.forwards] == list(range(len(SIZES)))
        assert trace.most_held == 1
        assert trace.gradient == 0.0


# --- sums and facts -----------------------------------------------------------------------


def sum_tensors(at: RankContext) -> list[torch.Tensor]:
    """Sums tensors of several shapes, one of them not contiguous and one empty."""
    with at.connect(HybridLayout(TrainLayout(dp=at.world_size))) as mesh:
        tensors = [
            torch.full((3, 2), at.rank + 1.0),
            torch.full((2, 4), at.rank + 1.0).t(),
            torch.empty(0, 5),
            torch.arange(7.0) * at.rank,
        ]
        sum_over(tensors, mesh.dp)
        return [tensor.clone() for tensor in tensors]


def test_sums_over_replicas_are_written_in_place(rank_pool: RankPool) -> None:
    for tensors in rank_pool.run(sum_tensors, 3):
        assert torch.equal(tensors[0], torch.full((3, 2), 6.0))
        assert torch.equal(tensors[1], torch.full((4, 2), 6.0))
        assert torch.equal(tensors[3], torch.arange(7.0) * 3)


def test_buckets_keep_the_order_and_the_bound() -> None:
    tensors = [torch.arange(float(size)) for size in (3, 1, 4, 20, 5, 0, 2)]
    found = list(buckets(tensors, max_bytes=32))
    assert [[len(tensor) for tensor in bucket] for bucket in found] == [[3, 1, 4], [20], [5, 0, 2]]
    flat = torch.cat(found[0]) + 1
    unpack(flat, found[0])
    assert torch.equal(tensors[2], torch.arange(4.0) + 1)


def tell(at: RankContext) -> list[object]:
    """Facts of any length, and numbers that are none."""
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        facts = {"name": "x" * (5**at.rank), "number": 0.1 + at.rank, "not": float("nan")}
        found = gather_facts(facts, mesh.tp, torch.device("cpu"))

        def prepare() -> tuple[str, int]:
            if at.rank == 1:
                raise KeyError("gone")
            return "ready", at.rank

        try:
            prepare_together(prepare, mesh.tp, torch.device("cpu"))
        except (KeyError, ValueError) as error:
            return [found, type(error).__name__, str(error)]
        return [found]


def test_facts_arrive_bit_by_bit_and_a_failure_is_everyones(rank_pool: RankPool) -> None:
    told = rank_pool.run(tell, 3)
    for rank, (found, kind, text) in enumerate(told):
        assert [len(facts["name"]) for facts in found] == [1, 5, 25]
        assert [facts["number"] for facts in found] == [0.1, 1.1, 2.1]
        assert all(facts["not"] != facts["not"] for facts in found)
        assert kind == ("KeyError" if rank == 1 else "ValueError")
        assert "gone" in text
