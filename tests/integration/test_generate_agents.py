"""Generate of agents: their rows' sessions and what failed leave the service for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.scripted_sampler import SamplerRole
from support.service_calls import initialize, last, pulled
from support.services import operation_key, serving

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.sessions.rows import told_rows
from rolemesh.engine.sessions.session import Session
from rolemesh.engine.specs.columns import ROLLOUT_COLUMNS
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.notes import MAX_CHARACTERS, MAX_NOTES
from rolemesh.rpc.samples.rows import fetch_samples
from rolemesh.v1 import coordinator_pb2, rollout_pb2, rollout_pb2_grpc


class ForkingAgents:
    """Each trajectory has two branches; the last one is left out."""

    gives_reward = False

    def __init__(self) -> None:
        self.metrics = {"agents/left_out": 1.0}
        self.notes = [f"note {number}: {'x' * MAX_CHARACTERS}" for number in range(MAX_NOTES + 1)]

    def run(
        self,
        backend: Any,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        sampling: Any,
        alive: Callable[[int], None],
    ) -> Iterator[Sequence[Episode]]:
        for request in requests[:-1]:
            session = Session(str(request.row))
            for added in ([], [3], [4]):
                prompt = [1, 2, *([9] if added else []), *added]
                session.add(prompt, [9], [-0.5], [(0, 3)], finish_reason="stop")
            branches = session.branches()
            told = told_rows(session, branches, attempts=1, log=f"log of {request.row}")
            yield [
                Episode(
                    row=request.row,
                    prompt_tokens=branch.prompt_tokens,
                    completion_tokens=branch.completion_tokens,
                    loss_mask=branch.loss_mask,
                    logprobs=branch.logprobs,
                    policy_versions=branch.policy_versions,
                    session=text,
                )
                for branch, text in zip(branches, told, strict=True)
            ]


async def test_sessions_are_fetched_whole_and_failures_are_notes() -> None:
    role = SamplerRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        agents = role.source.agents = ForkingAgents()
        request = rollout_pb2.GenerateRequest(
            key=operation_key("generate"),
            prompts=rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, start=0, count=4),
            sampling=rollout_pb2.Sampling(
                samples_per_prompt=2, temperature=1, top_p=1, top_k=-1, max_new_tokens=8
            ),
        )
        result = await last(rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request))
        batch = await pulled(server.runtime, result.experience)
        samples = await fetch_samples(lambda _: channel, result.experience, 5)
    # Seven trajectories of two rows; their columns are those of any sampling, and one more.
    assert batch.num_rows == 14
    assert set(batch.columns) == {*ROLLOUT_COLUMNS, "session"}
    assert [one.row for one in samples] == [0, 1, 6, 7]
    first, second = samples[:2]
    assert (first.session.prompt_id, first.session.sample_index) == (
        second.session.prompt_id,
        second.session.sample_index,
    )
    assert [one.session.log for one in samples] == ["log of 0", "", "log of 3", ""]
    shared, own = second.session.calls
    assert (shared.use, own.use) == (
        coordinator_pb2.CALL_USE_SHARED,
        coordinator_pb2.CALL_USE_TRAINED,
    )
    notes = list(result.report.notes)
    assert notes == [note[:MAX_CHARACTERS] for note in agents.notes[:MAX_NOTES]]
