"""Agents that own their loop, over a real sampler: rows, seeds, bounds, failures, the sandbox.

One engine serves the whole file: loading vLLM takes many seconds.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.agent_worlds import SAMPLING, World
from support.agents import agent_server, played
from support.mesh_runs import tiny_model
from transformers import AutoModelForCausalLM

from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.granted.user_code import load_named
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.specs import (
    HttpAgentSpec,
    ProgramAgentSpec,
    PythonAgentSpec,
)

LOGPROB = 5e-4
"""What is promised of sampler and trainer in float32; seen here: 1e-6."""

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("agents")
    tiny_model(folder / "model")
    world = World(folder)
    yield world
    world.close()


def metrics_of(world: World) -> dict[str, float]:
    """What the last generation says of itself."""
    return {name.removeprefix("agents/"): value for name, value in world.metrics.items()}


def told_of(rows: Sequence[Episode]) -> list[dict[str, Any]]:
    """What people are told of a session, by row."""
    return [json.loads(one.session) for one in rows]


def program(world: World, *words: str, **more: Any) -> ProgramAgentSpec:
    command = ("python", str(world.agents), *(words or ("play",)))
    return ProgramAgentSpec(command=command, **more)


def function(world: World, name: str = "run", **more: Any) -> PythonAgentSpec:
    return PythonAgentSpec(run=f"{world.agents}:{name}", **more)


def as_rows(trajectories: Sequence[Sequence[Episode]]) -> list[tuple[Any, ...]]:
    """What is the same whenever an agent is played again: all but the last bits of log-probs."""
    return [
        (one.row, tuple(one.prompt_tokens or ()), tuple(one.completion_tokens), one.reward)
        for rows in trajectories
        for one in rows
    ]


def test_rows_are_what_was_sampled_by_agents_of_each_kind(world: World) -> None:
    run = load_named(f"{world.agents}:run", "run")
    with agent_server(lambda told: {**played(run, told), "log": "by a server"}) as url:
        by_server = world.play(HttpAgentSpec(url=url))
    by_function = world.play(function(world))
    by_program = world.play(program(world))
    outside = world.play(function(world), Sandbox(kind="none"))
    assert as_rows(by_server) == as_rows(by_function) == as_rows(by_program) == as_rows(outside)

    model = AutoModelForCausalLM.from_pretrained(world.folder / "model", dtype=torch.float32)
    prompts = [prompt for prompt in world.prompts() for _ in range(2)]
    for prompt, (row,) in zip(prompts, by_program, strict=True):
        assert list(row.prompt_tokens or ()) == list(prompt.tokens)
        assert row.num_turns == 2
        assert set(row.policy_versions) == {7}
        # What the user says between is not trained, and what was sampled is, in two turns.
        changes = sum(a != b for a, b in zip(row.loss_mask, row.loss_mask[1:], strict=False))
        assert (row.loss_mask[0], row.loss_mask[-1], changes) == (True, True, 2)
        tokens = torch.tensor([[*prompt.tokens, *row.completion_tokens]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt.tokens) - 1 : -1] / SAMPLING.temperature
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(row.completion_tokens)[:, None])
        sampled = torch.tensor(row.loss_mask)
        torch.testing.assert_close(
            torch.tensor(row.logprobs)[sampled], wanted[:, 0][sampled], atol=LOGPROB, rtol=0
        )
        assert not torch.tensor(row.logprobs)[~sampled].any()
    # What each wrote is told beside its row, though functions share a process.
    for prompt, *players in zip(prompts, by_server, by_function, by_program, strict=True):
        (server,), (call,), (child,) = map(told_of, players)
        assert server["log"] == "by a server"
        assert call["log"] == f"counts to {prompt.answer}\n"
        written, reward = child["log"].splitlines()
        assert (written, set(json.loads(reward))) == (f"counts to {prompt.answer}", {"reward"})
        assert [one["use"] for one in child["calls"]] == ["trained", "trained"]
    assert world.notes == []
    # The agent asks for a low temperature and one seed: the run's own count.
    drawn = [tuple(row.completion_tokens) for (row,) in by_program]
    assert len(set(drawn)) == len(drawn)


def test_a_session_that_went_two_ways_is_two_rows_and_shares_its_first_turn(world: World) -> None:
    trajectories = world.play(function(world, "forks"))
    assert [len(rows) for rows in trajectories] == [2, 2, 2, 2]
    assert metrics_of(world) == {"rows": 8, "calls/mean": 4, "again": 0, "left_out": 0}
    for left, right in trajectories:
        assert left.prompt_tokens == right.prompt_tokens
        first = left.loss_mask.index(False)
        assert left.completion_tokens[:first] == right.completion_tokens[:first]
        # The first turn is trained once, each second one too, and the judge never.
        assert left.loss_mask[:first] == [True] * first
        assert right.loss_mask[:first] == [False] * first
        assert (left.loss_mask[-1], right.loss_mask[-1]) == (True, True)
        assert (left.reward, right.reward) == (1.5, 1.0)
        way, other = told_of((left, right))
        assert [(one["number"], one["use"]) for one in way["calls"]] == [
            (0, "trained"),
            (1, "trained"),
        ]
        assert [(one["number"], one["use"]) for one in other["calls"]] == [
            (0, "shared"),
            (2, "trained"),
        ]
        assert other["calls"][0]["num_sampled_tokens"] == first
        assert [(one["number"], one["use"]) for one in way["left_out"]] == [(3, "untrained")]


@pytest.mark.parametrize(
    ("words", "more", "what"),
    [
        (("exit",), {}, r"ended with exit code 3.*what went wrong"),
        (("loud",), {"max_output_bytes": 5000}, "printed more than 5000 bytes"),
        (("hang",), {"timeout_s": 3.0}, "took more than 3 s"),
        (("word",), {}, "printed '{no json' last, which is no JSON"),
        (("play",), {"max_turns": 1}, "ended with exit code 1"),
        (("play",), {"max_tokens": 6}, "ended with exit code 1"),
        (("play",), {"memory_mib": 64}, "ended with"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
@slow
def test_a_program_that_fails_says_why(
    world: World, words: tuple[str, ...], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(EnvironmentFailedError, match=rf"(?s)program agent failed.*{what}"):
        world.play(program(world, *words, **more))


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("silent", {}, "has made no call"),
        ("unrewarded", {}, "has given no reward"),
        ("wrong", {}, "answered with 'rewards', which nothing reads"),
        ("falls", {}, "out of order"),
    ],
)
@slow
def test_a_function_that_fails_says_why(
    world: World, name: str, more: dict[str, Any], what: str
) -> None:
    with pytest.raises(EnvironmentFailedError, match=rf"(?s)python_agent agent failed.*{what}"):
        world.play(function(world, name, **more))


@slow
def test_an_agent_may_leave_the_reward_to_the_reward_role(world: World) -> None:
    trajectories = world.play(function(world, "unrewarded", gives_reward=False))
    assert [len(rows) for rows in trajectories] == [1, 1, 1, 1]


@slow
def test_rows_and_groups_are_left_out_as_declared(world: World) -> None:
    with pytest.raises(EnvironmentFailedError, match="out of order"):
        world.play(function(world, "falls"))
    kept = world.play(function(world, "falls", on_failure="drop_row"))
    assert metrics_of(world) == {"rows": 2, "calls/mean": 2, "again": 0, "left_out": 2}
    # What failed has no row: notes have why, and the end of its log.
    assert (
        sorted(note.partition(",")[0] for note in world.notes)
        == ["the python_agent agent failed for prompt 1"] * 2
    )
    assert all("out of order" in note for note in world.notes)
    assert all(note.endswith("Its log ends: looks for the tool") for note in world.notes)
    # Prompt 1 fails, both samples of it.
    assert [rows[0].row for rows in kept] == [0, 1]
    assert as_rows(kept) == as_rows(world.play(function(world, "run")))[:2]
    tries: list[int] = []
    run = load_named(f"{world.agents}:run", "run")

    def once(told: dict[str, Any]) -> Any:
        tries.append(told["task"]["prompt_id"])
        if tries.count(1) == 1 and tries[-1] == 1:
            return 503
        return played(run, told)

    with agent_server(once) as url:
        kept = world.play(HttpAgentSpec(url=url, on_failure="drop_group", at_once=1))
        assert [rows[0].row for rows in kept] == [0, 1]
    with pytest.raises(EnvironmentFailedError, match=r"all 4 trajectories are left out.*no call"):
        world.play(function(world, "silent", on_failure="drop_row"))


@slow
def test_a_trajectory_that_begins_again_is_what_it_would_have_been(world: World) -> None:
    whole = world.play(function(world))
    failed: set[int] = set()
    run = load_named(f"{world.agents}:run", "run")

    def falls_once(told: dict[str, Any]) -> Any:
        said = played(run, told)
        number = told["task"]["prompt_id"]
        if number in failed:
            return said
        failed.add(number)
        return 500

    with agent_server(falls_once) as url:
        again = world.play(HttpAgentSpec(url=url, on_failure="retry"))
    assert failed == {0, 1}
    assert metrics_of(world) == {"rows": 4, "calls/mean": 2, "again": 2, "left_out": 0}
    attempts = [one["attempts"] for rows in again for one in told_of(rows)]
    assert sorted(attempts) == [1, 1, 2, 2]
    logs = [one["log"] for rows in again for one in told_of(rows)]
    # The answer of the attempt that failed, and behind it what the last one wrote.
    failed = [log for log in logs if log]
    assert len(failed) == len(world.notes) == 2
    assert all("attempt 1 failed" in log and "on purpose" in log for log in failed)
    assert all(log.rstrip().endswith("[attempt 2]") for log in failed)
    # Nothing of the attempts that failed is among the rows.
    assert as_rows(again) == as_rows(whole)
    with (
        agent_server(lambda told: 500) as url,
        pytest.raises(
            EnvironmentFailedError, match=r"failed for prompt 0, row 0 3 times: .*status 500"
        ),
    ):
        world.play(HttpAgentSpec(url=url, on_failure="retry", at_once=1))


@slow
def test_a_program_reaches_the_endpoint_and_nothing_else(world: World) -> None:
    sandbox = find_sandbox("auto")
    if not sandbox.is_there or sandbox.abi < 4:
        pytest.skip(f"the sandbox here, {sandbox}, opens no single ports")
    secret = world.folder.parent / "secret.txt"
    secret.write_text("a key")
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ("elsewhere", str(other.getsockname()[1]), str(secret))
        trajectories = world.play(program(world, *words))
    assert len(trajectories) == 4


@slow
def test_agents_that_nobody_waits_for_are_ended(world: World) -> None:
    began = threading.Event()

    def alive(done: int) -> None:
        # As a run that gives the generation up.
        if began.wait(20.0):
            raise KeyboardInterrupt("given up")

    def hang(told: dict[str, Any]) -> Any:
        began.set()
        threading.Event().wait(2.0)
        return {"reward": 0.0}

    with agent_server(hang) as url, pytest.raises(KeyboardInterrupt):
        world.play(HttpAgentSpec(url=url), alive=alive)
    before = json.dumps(as_rows(world.play(function(world))))
    assert json.dumps(as_rows(world.play(function(world)))) == before
