"""A server of agents that plays rollouts of verifiers: a taskset's prompts, harness and rewards.

    pip install "verifiers==0.4.0" uv
    python examples/agents/verifiers_agent_server.py rows my-taskset 2048 > rows.jsonl
    python examples/agents/verifiers_agent_server.py 8500 my-taskset

Each POST is one rollout; its answer is the trace's reward, with a log of its metrics. A rollout
that has failed, has run out of time or has no reward is answered with status 500, which the run
takes for a failure. A row's column `idx` says which example of the taskset it is. A row without one
is an example itself: its messages, its answer and its other columns are the fields of the taskset's
data.

The harness is "null", verifiers' loop of chat and tools, or what a third word names; it is a
process for each turn, on this machine, and needs uv on PATH. A recipe asks for some of them at a
time:

    data: {type: jsonl, path: rows.jsonl, held_out_size: 32}
    environment: {type: http, url: "http://127.0.0.1:8500/play", max_turns: 8, at_once: 8}
"""

import asyncio
import itertools
import json
import os
import sys
import uuid
from typing import Any

import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

HEARD_S = 0.5
"""How often it looks whether the run still waits."""

MOST = 150
"""Characters of an error that are told."""


class RolloutFailedError(RuntimeError):
    """A rollout came to nothing; the text says why."""


class Rollouts:
    """Plays rollouts of one environment."""

    def __init__(self, taskset: str, harness: str = "null") -> None:
        """Loads the environment; its examples are read as they are asked for."""
        agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        self._config = vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent})
        self._taskset = vf.load_environment(self._config).taskset
        self._unread = iter(self._taskset)
        self._examples: list[vf.Task] = []

    def example(self, idx: Any) -> vf.Task:
        """The example at a place of the taskset."""
        if not isinstance(idx, int) or idx < 0:
            raise RolloutFailedError(f"idx is {idx!r}: give the number of an example, from 0")
        self._examples += itertools.islice(self._unread, max(0, idx + 1 - len(self._examples)))
        if idx >= len(self._examples):
            raise RolloutFailedError(
                f"idx is {idx}, and the taskset has {len(self._examples)} examples"
            )
        return self._examples[idx]

    def task(self, row: dict[str, Any]) -> vf.Task:
        """What a row of the run asks for."""
        if "idx" in row["metadata"]:
            return self.example(row["metadata"]["idx"])
        kind = type(self._taskset).task_type()
        prompt = row["messages"] or row["text"]
        fields = {**row["metadata"], "prompt": prompt, "answer": row["answer"]}
        return kind(kind.data_type().model_validate(fields), self._taskset.config.task)

    async def answer(self, told: dict[str, Any]) -> dict[str, Any]:
        """Plays one rollout against the session that the run has opened for it."""
        task = self.task(told["task"])
        # A client reads its key from the environment of this process. Programs of a harness inherit
        # no variable that is called so.
        variable = f"SESSION_{uuid.uuid4().hex}_API_KEY"
        client = vf.EvalClientConfig(base_url=told["base_url"], api_key_var=variable)
        # What serves a rollout keeps a client for each base URL until it ends. Each session has its
        # own URL, so each rollout is served by itself; else a long run would fill the memory.
        env = vf.load_environment(self._config)
        os.environ[variable] = told["api_key"]
        try:
            async with env.serving():
                context = vf.ModelContext(model=told["model"], client=client)
                return answer_of(await env.run_episode(task, context))
        finally:
            del os.environ[variable]


def answer_of(episode: vf.Episode) -> dict[str, Any]:
    """The reward of an episode of one agent, and for people what it is made of.

    verifiers sums the rewards that it has, so one that was not computed would count as 0.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        # The run keeps 300 bytes of an answer, and of a harness's traceback the end says why.
        said = [f"{error.type}: {error.message.strip()[-MOST:]}" for error in errors]
        raise RolloutFailedError("; ".join(said) or "verifiers calls it not ok, and says no more")
    if len(episode.traces) != 1:
        raise RolloutFailedError(f"{len(episode.traces)} agents have played: one can be trained")
    (trace,) = episode.traces
    if trace.is_timeout:
        raise RolloutFailedError(f"it ran out of time ({trace.stop_condition})")
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise RolloutFailedError(f"no reward was computed {missing}: give the task a @vf.reward")
    rewards = {name: reward.model_dump() for name, reward in trace.rewards.items()}
    log = json.dumps({"rewards": rewards, "metrics": trace.metrics, "stop": trace.stop_condition})
    return {"reward": float(trace.reward), "log": log}


async def play(request: Request) -> JSONResponse:
    """One rollout; it ends with its processes where nobody waits for it any more."""
    rollout = asyncio.create_task(request.app.state.rollouts.answer(await request.json()))
    while not (await asyncio.wait([rollout], timeout=HEARD_S))[0]:
        if await request.is_disconnected():
            rollout.cancel()
            await asyncio.wait([rollout])
    try:
        return JSONResponse(rollout.result())
    except (Exception, asyncio.CancelledError) as error:  # an environment raises what it likes
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)


def print_rows(taskset: str, most: int) -> None:
    """Rows for the run's data: which example of the taskset, and what it asks, to be read."""
    rollouts = Rollouts(taskset)
    for idx in range(most):
        try:
            asked = rollouts.example(idx).data.prompt_text
        except RolloutFailedError:
            break
        print(json.dumps({"prompt": asked or f"Example {idx}", "answer": "", "idx": idx}))


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        print_rows(sys.argv[2], int(sys.argv[3]))
    else:
        app = Starlette(routes=[Route("/play", play, methods=["POST"])])
        app.state.rollouts = Rollouts(*sys.argv[2:])
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
