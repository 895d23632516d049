"""Has an agent play rows of a task, each in a session of the endpoint that serves the policy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.evaluation.asking import (
    Completion,
    EndpointGoneError,
    UnansweredError,
    message_of,
    seed_of,
)
from rolemesh.engine.evaluation.tasks import EvaluatedRow
from rolemesh.engine.granted.outgoing_http import outgoing_client
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.agents import make_agent
from rolemesh.engine.sessions.logs import AgentLog
from rolemesh.engine.sessions.results import AgentFailedError, AgentResult, AgentWork
from rolemesh.engine.specs import AgentSpec
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec
from rolemesh.engine.specs.urls import masked_url

SETTLE_TRIES = 20
SETTLE_S = 0.25
"""A call of an agent that has ended may end a moment later; so often it is looked again."""

LAST_CHARACTERS = 400
"""Of an agent's log stand in why a row has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of one trajectory."""

    completion: Completion
    """The text of its last branch, and the tokens that were sampled in all calls."""
    score: float
    """Mean over its branches of their rewards, as a run counts a trajectory."""


class Player:
    """Plays trajectories with one agent. Owner: one loop.

    Calls are drawn as the drawing says, whatever the agent asks for, with seeds that derive from
    the row's: an agent that depends on nothing else gets the same tokens again.
    """

    def __init__(
        self,
        spec: AgentSpec,
        asked: AskedSpec,
        drawing: DrawingSpec,
        *,
        model: str,
        key: str | None,
        sandbox: Sandbox,
        tokenizer: ChatTokenizer | None,
    ) -> None:
        """Loads the agent.

        Args:
            spec: Which agent, and its bounds.
            asked: The endpoint, one of rolemesh: it has sessions.
            drawing: How tokens are drawn; max_tokens bounds one call.
            model: What the endpoint calls the policy.
            key: Of the endpoint.
            sandbox: Where a user's code runs.
            tokenizer: Makes texts of tokens; None: texts are left empty.

        Raises:
            UserCodeError: The agent's code cannot be loaded.
        """
        self._spec = spec
        self._drawing = drawing
        self._model = model
        self._tokenizer = tokenizer
        self._root = asked.url.rstrip("/").removesuffix("/v1")
        at_once = min(asked.concurrency, spec.at_once)
        self._turns = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="agent")
        limits = httpx.Limits(max_connections=at_once + 2)
        self._client = outgoing_client(
            asked.url, key, limits, timeout=httpx.Timeout(asked.timeout_s, connect=10.0)
        )
        self._agent = make_agent(spec, sandbox, asked.url)

    async def play(self, task: str, row: EvaluatedRow, sample: int, *, prompt: str) -> Played:
        """One trajectory of a row.

        Args:
            task: Name of its task.
            row: What the agent is told.
            sample: Number of the trajectory among those of the row.
            prompt: The row as text.

        Raises:
            UnansweredError: It came to nothing, or has no reward; says why.
            EndpointGoneError: The endpoint has no sessions, or does not answer.
            ImageInvalidError: An image of the row cannot be read any more.
        """
        async with self._turns:
            seed = seed_of(self._drawing, task, row, sample)
            opened = await self._told("POST", "", self._opening(seed))
            place = f"/{opened['session_id']}"
            stopped, log = threading.Event(), AgentLog()
            try:
                work = AgentWork(
                    prompt=row.prompt(prompt),
                    base_url=opened["base_url"],
                    session_url=opened["base_url"].removesuffix("/v1"),
                    api_key=opened["key"],
                    model=self._model,
                    log=log,
                )
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, self._agent.run, work, stopped)
                return self._played(await self._ended(place, result))
            except AgentFailedError as error:
                last = log.text().rstrip()[-LAST_CHARACTERS:]
                told = f". Its log ends: {on_one_line(last)}" if last else ""
                raise UnansweredError(f"the agent failed: {error}{told}") from error
            finally:
                stopped.set()
                # An endpoint that is gone has forgotten it, and why must not be hidden by this.
                with contextlib.suppress(httpx.HTTPError):
                    await self._client.delete(f"{self._root}/sessions{place}")

    def _opening(self, seed: int) -> dict[str, Any]:
        drawing = self._drawing
        return {
            "seed": seed,
            "max_calls": self._spec.max_turns,
            "max_sampled_tokens": self._spec.max_tokens,
            "drawing": {
                "temperature": drawing.temperature,
                "top_p": drawing.top_p,
                "top_k": drawing.top_k,
                "max_new_tokens": drawing.max_tokens,
            },
        }

    async def _ended(self, place: str, result: AgentResult) -> Mapping[str, Any]:
        """The session, after what the agent gave it at its end."""
        session: Mapping[str, Any] = await self._told("GET", place)
        for _ in range(SETTLE_TRIES):
            if not session["num_running"]:
                break
            await asyncio.sleep(SETTLE_S)
            session = await self._told("GET", place)
        if session["state"] == "open":
            given = {"reward": result.reward, "call_rewards": dict(result.call_rewards)}
            await self._told("POST", f"{place}/end", given)
            session = await self._told("GET", place)
        elif result.reward is not None or result.call_rewards:
            raise UnansweredError(
                "the agent gave its reward twice, to the session and at its end: let it give one"
            )
        return session

    def _played(self, session: Mapping[str, Any]) -> Played:
        branches = session["branches"]
        rewards = [branch["reward"] for branch in branches if branch["reward"] is not None]
        if not branches:
            raise UnansweredError("the agent has made no call of the policy that counts")
        if not rewards:
            raise UnansweredError("the agent has given no reward")
        last = branches[-1]
        tokens = last["completion_tokens"]
        return Played(
            completion=Completion(
                text=""
                if self._tokenizer is None
                else self._tokenizer.decode(tokens, skip_special_tokens=True),
                finish_reason=last["finish_reason"],
                num_tokens=sum(len(call["sampled_tokens"]) for call in session["calls"]),
            ),
            # A branch without a reward of its own counts as a run counts it.
            score=sum(rewards) / len(branches),
        )

    async def _told(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self._root}/sessions{path}"
        try:
            response = await self._client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise EndpointGoneError(
                f"{masked_url(self._root)} does not answer: {type(error).__name__} {error}"
            ) from error
        if response.status_code in (404, 405) and not path:
            raise EndpointGoneError(
                f"{masked_url(self._root)} has no sessions: agents are scored at an endpoint of "
                "rolemesh (serve-policy, or a run's); name a run, a checkpoint or a model folder"
            )
        if response.status_code == 403 and not path:
            raise EndpointGoneError(
                f"{masked_url(self._root)} opens no session for this key: give --key-variable the "
                "variable that holds the endpoint's key"
            )
        if not response.is_success:
            raise UnansweredError(f"status {response.status_code}: {message_of(response)}")
        return response.json()

    async def close(self) -> None:
        """Ends what the agent keeps, and all connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._agent.close()
        await self._client.aclose()
