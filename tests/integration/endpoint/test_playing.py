"""Agents that play the rows of an evaluation, in sessions of a real endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.agents import write_agents
from support.endpoints import Served, Session
from support.evaluations import by_row, scored, told_of

from rolemesh.engine.specs import SamplingSpec
from rolemesh.engine.specs.evaluation import EvaluationQuestion

ASK = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agents(tmp_path_factory.mktemp("agents"))


def question(served: Served, folder: Path, *agents: dict[str, Any], **drawing: Any) -> str:
    """Has each agent play three rows, as a task of its own."""
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"count to {number}", "answer": number, "level": 3}) + "\n"
            for number in range(3)
        )
    )
    other = folder / "train.jsonl"
    other.write_text('{"prompt": "trained on", "answer": "9", "level": 3}\n')
    data = {"type": "jsonl", "path": str(other), "held_out_path": str(rows)}
    return EvaluationQuestion.model_validate(
        {
            "asked": {"url": f"{served.endpoint.url}/v1", "tokenizer": str(served.sampler.folder)},
            "drawing": {"samples": 2, "temperature": 0.8, "max_tokens": 5, **drawing},
            "tasks": [
                {"name": f"task-{number}", "data": data, "agent": agent}
                for number, agent in enumerate(agents)
            ],
        }
    ).model_dump_json()


def split_by_task(told: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each task, in the order of the data."""
    found: list[list[dict[str, Any]]] = []
    for one in told:
        if one["type"] == "task":
            found.append([])
        elif one["type"] == "row":
            found[-1].append(one)
    return [by_row(rows) for rows in found]


def test_rows_are_scored_as_an_agent_plays_them(
    served: Served, agents: Path, tmp_path: Path
) -> None:
    asked = question(served, tmp_path, {"type": "python_agent", "run": f"{agents}:run"})
    first = scored(asked)
    assert [(one["row"], one["sample"]) for one in first] == [
        (row, sample) for row in range(3) for sample in range(2)
    ]
    for one in first:
        # Its reward is the length of its answers, which stand in the text of its row.
        assert one["score"] > 0
        assert one["num_tokens"] == 10
        assert f"{one['row']} and on" in one["completion"]
        assert one["answer"] == str(one["row"])
    assert len({one["completion"] for one in first}) > 3
    # The agent asks for one seed and a low temperature; the evaluation draws by its own.
    assert scored(asked) == first
    assert len(served.endpoint.sessions) == 0


def test_an_agent_that_fails_or_gives_no_reward_leaves_a_row_unscored(
    served: Served, agents: Path, tmp_path: Path
) -> None:
    fails = (
        ({"type": "python_agent", "run": f"{agents}:unrewarded"}, "no reward"),
        ({"type": "python_agent", "run": f"{agents}:silent"}, "made no call"),
        ({"type": "program", "command": ["python", str(agents), "exit"]}, "what went wrong"),
    )
    falls = {"type": "python_agent", "run": f"{agents}:falls"}
    asked = question(served, tmp_path, *(agent for agent, _ in fails), falls, samples=1)
    by_task = split_by_task(told_of(asked))
    assert len(by_task) == len(fails) + 1
    for (_, why), rows in zip(fails, by_task, strict=False):
        assert [one["score"] for one in rows] == [None] * 3
        assert all(why in one["why"] for one in rows), rows[0]["why"]
    one_falls = by_task[-1]
    assert [one["score"] is None for one in one_falls] == [False, True, False]
    assert "the tool is out of order" in one_falls[1]["why"]
    assert len(served.endpoint.sessions) == 0


def test_a_trajectory_of_several_rows_counts_with_their_mean(
    served: Served, agents: Path, tmp_path: Path
) -> None:
    rows = scored(
        question(served, tmp_path, {"type": "python_agent", "run": f"{agents}:forks"}, samples=1)
    )
    # Reward 1 for both branches, and 0.5 more for a call of the first one.
    assert [one["score"] for one in rows] == [1.25] * 3


def test_a_session_draws_as_it_was_opened_with(served: Served) -> None:
    def sampled(session: Session) -> list[int]:
        session.chat(ASK, seed=1, temperature=1.5, max_tokens=8)
        (call,) = session.read()["calls"]
        return list(call["sampled_tokens"])

    greedy = {"temperature": 0, "max_new_tokens": 6}
    first, second = (sampled(served.session(seed=seed, drawing=greedy)) for seed in (1, 2))
    assert first == second
    assert len(first) <= 6
    drawn = [sampled(served.session(seed=seed, drawing={"temperature": 1.0})) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    opened = served.endpoint.sessions.of_id(served.session(drawing={"top_k": 3}).session_id)
    assert opened is not None
    assert opened.rules.sampling == SamplingSpec(max_new_tokens=1 << 20, top_k=3)
    answer = served.http.post("/sessions", json={"drawing": {"temperature": -1}})
    assert answer.status_code in (400, 422)
    assert "temperature" in answer.text


@contextmanager
def stranger(*, goes: bool) -> Iterator[str]:
    """A server that lists a model and has no sessions; or opens one, and answers no more."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "other"}]})

        def do_POST(self) -> None:
            if not goes:
                self.send_error(404)
                return
            server.socket.close()
            base_url = f"http://127.0.0.1:{server.server_port}/sessions/s/v1"
            self._answer(201, {"session_id": "s", "base_url": base_url, "key": "k"})

        def _answer(self, status: int, said: Any) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("goes", "told"), [(False, "has no sessions"), (True, "does not answer")])
def test_an_endpoint_that_has_no_sessions_or_goes_is_told(
    served: Served, agents: Path, tmp_path: Path, goes: bool, told: str
) -> None:
    asked = question(served, tmp_path, {"type": "python_agent", "run": f"{agents}:silent"})
    with stranger(goes=goes) as url:
        given = json.loads(asked)
        given["asked"] |= {"url": f"{url}/v1", "tokenizer": None, "concurrency": 1}
        told_lines = told_of(json.dumps(given))
    (error,) = [one for one in told_lines if one["type"] == "error"]
    assert told in error["text"]
    assert not error["is_input"]
