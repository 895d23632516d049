"""Experience in blocks: who may work on what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError
from rolemesh.coordinator.dataflow.futures import (
    CallFuture,
    ExperienceFuture,
    Node,
    NodeKind,
    NodeState,
    Outcome,
)
from rolemesh.coordinator.dataflow.graph import OnBlock, StepGraph
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.recipe.roles.placement import PoolSpec
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import experience_pb2

ROLES = ("actor", "critic", "reference", "reward")
BLOCK_ROWS = 2


async def settle() -> None:
    """Turns the loop often enough for everything that can start to start; waits for no clock."""
    for _ in range(50):
        await asyncio.sleep(0)


def reference(column: str, rows: list[str]) -> experience_pb2.ExperienceRef:
    """An experience whose shards are named after its rows."""
    shards = [
        experience_pb2.Shard(experience_id=row, row_start=start, num_rows=1)
        for start, row in enumerate(rows)
    ]
    group = experience_pb2.ColumnGroup(
        columns=[experience_pb2.ColumnSchema(name=column)], shards=shards
    )
    return experience_pb2.ExperienceRef(run_id="run", num_rows=len(rows), groups=[group])


def rows_of(experience: experience_pb2.ExperienceRef, column: str) -> list[str]:
    """Names of rows, in the order that their places give."""
    (group,) = (g for g in experience.groups if g.columns[0].name == column)
    shards = sorted(group.shards, key=lambda shard: shard.row_start)
    assert [shard.row_start for shard in shards] == list(range(experience.num_rows))
    return [shard.experience_id for shard in shards]


class Stream:
    """A generation of blocks that the test lets out one by one, and roles that follow it."""

    def __init__(self, num_blocks: int, *, is_split: bool = True, step: int = 1) -> None:
        specs = {role: PoolSpec(roles=(role,)) for role in ROLES}
        self.pools = Pools(specs if is_split else {"all": PoolSpec(roles=ROLES)})
        self.dataflow = StepGraph(step, self.pools)
        self.num_blocks = num_blocks
        self.events: list[str] = []
        self.on_block: OnBlock | None = None
        self.ends = asyncio.Event()
        self.failure: Exception | None = None
        self.seen: dict[str, list[str]] = {}

    def generate(self, after: tuple[CallFuture, ...] = ()) -> ExperienceFuture:
        async def work(node: Node, on_block: OnBlock) -> Outcome:
            self.events.append("generate")
            self.on_block = on_block
            await self.ends.wait()
            if self.failure is not None:
                raise self.failure
            self.events.append("generated")
            return Outcome(experience_pb2.CallReport(), reference("tokens", self.rows))

        part = self.dataflow.sample(
            kind=NodeKind.SAMPLE, service="actor", method="generate", sequence=0, work=work,
            num_blocks=self.num_blocks, produces=["tokens"], after=after,
        )  # fmt: skip
        return ExperienceFuture(self.dataflow, (part,))

    @property
    def rows(self) -> list[str]:
        return [f"{block}.{row}" for block in range(self.num_blocks) for row in range(BLOCK_ROWS)]

    async def let_out(self, *blocks: int) -> None:
        for block in blocks:
            assert self.on_block is not None
            rows = [f"{block}.{row}" for row in range(BLOCK_ROWS)]
            self.on_block(block, reference("tokens", rows))
            await settle()

    async def end(self) -> None:
        self.ends.set()
        await settle()

    def judge(self, role: str, reads: ExperienceFuture, block: int | None = None) -> CallFuture:
        async def work(node: Node, given: experience_pb2.ExperienceRef | None) -> Outcome:
            assert given is not None
            rows = rows_of(given, "tokens")
            self.seen[f"{role}[{block}]"] = rows
            self.events.append(f"{role}[{block}]")
            return Outcome(experience_pb2.CallReport(), reference(role, rows))

        return self.dataflow.call(
            kind=NodeKind.INFER, service=role, method="judge", sequence=block or 0, work=work,
            reads=reads, produces=[role], block=block,
        )  # fmt: skip

    def judge_blocks(self, role: str, reads: ExperienceFuture) -> ExperienceFuture:
        parts = [self.judge(role, reads, block) for block in range(reads.num_blocks)]
        whole = CallFuture(
            nodes=tuple(node for part in parts for node in part.nodes),
            outcomes=tuple(outcome for part in parts for outcome in part.outcomes),
            columns=frozenset([role]),
        )
        return ExperienceFuture(self.dataflow, (whole,))


async def test_a_block_is_judged_while_the_others_still_decode() -> None:
    stream = Stream(3)
    rollouts = stream.generate()
    rollouts |= stream.judge_blocks("reward", rollouts)
    await settle()
    await stream.let_out(1, 0)
    assert stream.events == ["generate", "reward[1]", "reward[0]"]
    await stream.let_out(2)
    await stream.end()
    await stream.dataflow.finish()
    assert stream.events[3:] == ["reward[2]", "generated"]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
async def test_rows_are_put_together_in_their_order_whatever_block_is_first(
    order: tuple[int, ...],
) -> None:
    stream = Stream(3)
    rollouts = stream.generate()
    rollouts |= stream.judge_blocks("reward", rollouts)
    stream.judge("critic", rollouts.whole())
    await settle()
    await stream.let_out(*order)
    await stream.end()
    await stream.dataflow.finish()
    assert stream.seen["critic[None]"] == stream.rows
    assert stream.seen["reward[1]"] == ["1.0", "1.1"]
    joined = await rollouts.result()
    assert rows_of(joined, "tokens") == rows_of(joined, "reward") == stream.rows


async def test_in_one_pool_blocks_wait_until_the_generation_has_ended() -> None:
    stream = Stream(2, is_split=False)
    rollouts = stream.generate()
    for role in ("critic", "reward"):
        rollouts |= stream.judge_blocks(role, rollouts)
    await settle()
    await stream.let_out(1, 0)
    assert stream.events == ["generate"]
    await stream.end()
    await stream.dataflow.finish()
    # In call order, whichever block came first.
    assert stream.events[1:] == [
        "generated", "critic[0]", "critic[1]", "reward[0]", "reward[1]",
    ]  # fmt: skip


async def test_a_block_that_never_comes_is_a_group_that_is_not_whole() -> None:
    stream = Stream(3)
    rollouts = stream.generate()
    rollouts |= stream.judge_blocks("reward", rollouts)
    await settle()
    await stream.let_out(0, 2)
    await stream.end()
    with pytest.raises(RunError) as failed:
        await stream.dataflow.finish()
    assert str(failed.value) == (
        "step 1: actor.generate ended, but block 1 of 3 (1 such blocks) never came: a group of it "
        "is not whole; see the log of the actor"
    )
    states = [node.state for node in stream.dataflow.nodes]
    assert states == [NodeState.FAILED, NodeState.DONE, NodeState.CANCELLED, NodeState.DONE]


@pytest.mark.parametrize("index", [-1, 2])
async def test_a_block_with_a_number_that_was_not_asked_for_is_refused(index: int) -> None:
    stream = Stream(2)
    stream.generate()
    await settle()
    assert stream.on_block is not None
    with pytest.raises(RunError, match=rf"actor\.generate sent block {index} of 2"):
        stream.on_block(index, reference("tokens", ["x"]))
    stream.dataflow.abort(RunError("enough"))
    with pytest.raises(RunError, match="enough"):
        await stream.dataflow.finish()


async def test_a_block_that_is_sent_twice_counts_once() -> None:
    stream = Stream(2)
    rollouts = stream.generate()
    stream.judge_blocks("reward", rollouts)
    await settle()
    await stream.let_out(0, 0, 1, 0)
    await stream.end()
    await stream.dataflow.finish()
    assert sorted(stream.events) == ["generate", "generated", "reward[0]", "reward[1]"]


async def test_a_generation_that_fails_halfway_cancels_what_waits_for_blocks() -> None:
    stream = Stream(2)
    rollouts = stream.generate()
    rollouts |= stream.judge_blocks("reward", rollouts)
    stream.judge("critic", rollouts.whole())
    await settle()
    await stream.let_out(1)
    stream.failure = PreconditionError(
        "out of memory", reason="OUT_OF_MEMORY", metadata={"role": "actor", "rank": "2"}
    )
    await stream.end()
    with pytest.raises(NodeFailedError, match=r"failed on actor rank 2 \[OUT_OF_MEMORY\]"):
        await stream.dataflow.finish()
    states = [node.state for node in stream.dataflow.nodes]
    assert states == [
        NodeState.FAILED, NodeState.CANCELLED, NodeState.DONE, NodeState.CANCELLED,
    ]  # fmt: skip


async def test_an_answer_of_another_length_names_the_role_that_gave_it() -> None:
    stream = Stream(1)
    rollouts = stream.generate()

    async def short(node: Node, given: experience_pb2.ExperienceRef | None) -> Outcome:
        return Outcome(experience_pb2.CallReport(), reference("rewards", ["0.0"]))

    part = stream.dataflow.call(
        kind=NodeKind.INFER, service="reward", method="judge", sequence=0, work=short,
        reads=rollouts, produces=["rewards"],
    )  # fmt: skip
    stream.judge("critic", rollouts | ExperienceFuture(stream.dataflow, (part,)))
    await settle()
    await stream.let_out(0)
    await stream.end()
    with pytest.raises(RunError) as failed:
        await stream.dataflow.finish()
    assert str(failed.value) == (
        "step 1: reward.judge was given 2 rows and answered with 1: the reward must answer with "
        "one value for each row"
    )


async def test_what_waits_for_another_step_learns_why_that_one_failed() -> None:
    first, second = Stream(1, step=2), Stream(1)
    second.dataflow = StepGraph(1, first.pools)
    waited = first.generate()
    second.generate(after=waited.parts)
    first.failure = PreconditionError("lost", reason="LOST", metadata={"role": "actor"})
    await settle()
    await first.end()
    for stream in (first, second):
        with pytest.raises(NodeFailedError, match=r"step 2: actor\.generate failed .*lost"):
            await stream.dataflow.finish()


async def test_what_waits_for_a_step_that_is_given_up_fails_and_does_not_vanish() -> None:
    first, second = Stream(1, step=2), Stream(1)
    second.dataflow = StepGraph(1, first.pools)
    waited = first.generate()
    follower = second.generate(after=waited.parts)
    second.judge("reward", follower, 0)
    await settle()
    first.dataflow.abort(RunError("step 2 is not made any more"))
    with pytest.raises(RunError, match="step 2 is not made any more"):
        await second.dataflow.finish()
    assert [node.state for node in second.dataflow.nodes] == [
        NodeState.FAILED, NodeState.CANCELLED,
    ]  # fmt: skip
    with pytest.raises(RunError):
        await first.dataflow.finish()


async def test_nodes_of_another_graph_are_no_inputs() -> None:
    # An evaluation after step 1 has nodes of its own, of the same step, that begin at 0 again.
    training, evaluation = Stream(1), Stream(1)
    evaluation.dataflow = StepGraph(1, training.pools)
    before = training.generate()
    training.judge("reward", before)
    after = training.dataflow.call(
        kind=NodeKind.UPDATE, service="critic", method="publish", sequence=0, work=answer_nothing
    )
    taken = evaluation.generate(after=(*before.parts, after))
    assert [node.inputs for node in taken.nodes] == [()]
    for stream in (training, evaluation):
        await settle()
        await stream.let_out(0)
        await stream.end()
        await stream.dataflow.finish()


async def answer_nothing(_: Node, __: experience_pb2.ExperienceRef | None) -> Outcome:
    return Outcome(experience_pb2.CallReport())


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_cycle_cannot_be_made(data: st.DataObject) -> None:
    """A call takes futures, and a future exists once its node does: inputs have smaller ids."""

    async def work() -> None:
        specs = {role: PoolSpec(roles=(role,)) for role in ROLES}
        dataflow = StepGraph(1, Pools(specs))
        made: list[CallFuture] = []
        for number in range(data.draw(st.integers(1, 8))):
            chosen = data.draw(st.lists(st.sampled_from(made), unique=True)) if made else []
            read, after = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
            made.append(
                dataflow.call(
                    kind=NodeKind.INFER,
                    service=data.draw(st.sampled_from(ROLES)),
                    method=f"call-{number}",
                    sequence=0,
                    work=answering(f"column-{number}"),
                    reads=ExperienceFuture(dataflow, tuple(read)) if read else None,
                    produces=[f"column-{number}"],
                    after=after,
                )
            )
        for node in dataflow.nodes:
            assert all(known < node.node_id for known in node.inputs)
        await dataflow.finish()
        for node in dataflow.nodes:
            assert node.state is NodeState.DONE
            assert all(
                (dataflow.nodes[known].ended_at or 0.0) <= (node.started_at or 0.0)
                for known in node.inputs
            )

    asyncio.run(work())


def answering(
    column: str,
) -> Callable[[Node, experience_pb2.ExperienceRef | None], Awaitable[Outcome]]:
    async def work(_: Node, __: experience_pb2.ExperienceRef | None) -> Outcome:
        return Outcome(experience_pb2.CallReport(), reference(column, ["a", "b"]))

    return work


async def test_a_call_that_waits_for_a_cancelled_call_of_another_step_is_told_why() -> None:
    first, second = Stream(1, step=2), Stream(1)
    second.dataflow = StepGraph(1, first.pools)
    waited = first.judge("critic", first.generate(), 0)
    second.generate(after=(waited,))
    await settle()
    first.dataflow.abort(RunError("enough"))
    for stream in (second, first):
        with pytest.raises(RunError, match="enough"):
            await stream.dataflow.finish()
