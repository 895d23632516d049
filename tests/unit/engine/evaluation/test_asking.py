"""Tests of what an endpoint is asked, and what becomes of its failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rolemesh.engine.data.rows import PromptRow
from rolemesh.engine.evaluation import asking
from rolemesh.engine.evaluation.asking import Asker, EndpointGoneError, UnansweredError
from rolemesh.engine.evaluation.tasks import EvaluatedRow
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec


def evaluated(row: PromptRow, key: str = "k") -> EvaluatedRow:
    return EvaluatedRow(key=key, row=row, prompt_id=0)


ROW = evaluated(PromptRow(messages=[{"role": "user", "content": "2 + 2"}]))
ANSWER = {
    "choices": [{"message": {"content": "4"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 2},
}

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_PAUSE_S", 0.0)


def asker(handler: Handler, url: str = "http://127.0.0.1:1/v1", **drawing: Any) -> Asker:
    made = Asker(AskedSpec(url=url, model="m"), DrawingSpec(**drawing), key=None, tokenizer=None)
    made._client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return made


def keeping(bodies: list[dict[str, Any]], *statuses: int) -> Handler:
    """Keeps what comes, and answers with these statuses first, then rightly."""
    left = list(statuses)

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if left:
            return httpx.Response(left.pop(0), json={"error": {"message": "not now"}})
        return httpx.Response(200, json=ANSWER)

    return handle


async def test_each_completion_has_a_seed_of_task_prompt_and_number_alone() -> None:
    bodies: list[dict[str, Any]] = []
    made = asker(keeping(bodies), temperature=0.7, top_p=0.9, max_tokens=5, seed=1)
    for task, key, sample in [("t", "k", 0), ("t", "k", 1), ("t", "l", 0), ("u", "k", 0)] * 2:
        await made.ask(task, evaluated(ROW.row, key), sample)
    seeds = [body["seed"] for body in bodies]
    # Four draws of 31 bits are distinct but for one in 10^8.
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == seeds[:4]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert bodies[0]["temperature"] == 0.7
    assert bodies[0]["top_p"] == 0.9
    assert bodies[0]["max_tokens"] == 5
    assert bodies[0]["messages"] == [{"role": "user", "content": "2 + 2"}]
    assert not {"top_k", "stop", "stop_token_ids"} & set(bodies[0])


async def test_an_answer_that_has_begun_is_sent_to_be_continued() -> None:
    bodies: list[dict[str, Any]] = []
    row = PromptRow(messages=ROW.row.messages, assistant_prefix="2 + 2 =")
    found = await asker(keeping(bodies)).ask("t", evaluated(row), 0)
    assert bodies[0]["messages"][-1] == {"role": "assistant", "content": "2 + 2 ="}
    assert bodies[0]["continue_final_message"] is True
    assert (found.text, found.finish_reason, found.num_tokens) == ("4", "stop", 2)


async def test_what_may_pass_is_asked_again_with_the_same_seed() -> None:
    bodies: list[dict[str, Any]] = []
    found = await asker(keeping(bodies, 503, 429)).ask("t", ROW, 0)
    assert found.text == "4"
    assert len(bodies) == 3
    assert len({body["seed"] for body in bodies}) == 1


async def test_a_refusal_is_told_and_not_repeated() -> None:
    bodies: list[dict[str, Any]] = []
    with pytest.raises(UnansweredError, match="status 400: not now"):
        await asker(keeping(bodies, 400)).ask("t", ROW, 0)
    assert len(bodies) == 1


async def test_a_row_is_given_up_after_so_many_tries() -> None:
    bodies: list[dict[str, Any]] = []
    with pytest.raises(UnansweredError, match=r"status 500: not now \(5 tries\)"):
        await asker(keeping(bodies, *[500] * 9)).ask("t", ROW, 0)
    assert len(bodies) == asking.TRIES


async def test_an_answer_without_a_completion_is_no_empty_completion() -> None:
    made = asker(lambda request: httpx.Response(200, json={"choices": []}))
    with pytest.raises(UnansweredError, match="has no completion"):
        await made.ask("t", ROW, 0)


async def test_an_endpoint_that_is_gone_ends_the_evaluation_and_not_each_row_of_it() -> None:
    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    made = asker(refused)
    for _ in range(asking.GONE_AFTER - 1):
        with pytest.raises(UnansweredError):
            await made.ask("t", ROW, 0)
    with pytest.raises(EndpointGoneError, match="no answer to the last 20 rows"):
        await made.ask("t", ROW, 0)


async def test_the_model_is_the_first_that_is_listed() -> None:
    made = asker(lambda request: httpx.Response(200, json={"data": [{"id": "x"}, {"id": "y"}]}))
    made._model = None
    assert await made.open() == "x"


async def test_the_longest_sequence_is_that_of_the_model_that_is_asked() -> None:
    cards = [{"id": "x", "max_model_len": 32}, {"id": "m", "max_model_len": 64}, {"id": "y"}]
    made = asker(lambda request: httpx.Response(200, json={"data": cards}))
    assert await made.longest_sequence() == 64
    made._model = "y"
    assert await made.longest_sequence() is None


class Spelling:
    """Token ids are characters; 300 is the first byte of one that has two."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        return str(conversation[-1]["content"])

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in text]}

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return "".join("\N{REPLACEMENT CHARACTER}" if t == 300 else chr(t) for t in token_ids)


@pytest.mark.parametrize(
    ("told", "text"),
    [({}, "4"), ({"token_ids": [52, 300]}, "4\N{REPLACEMENT CHARACTER}"), ({"token_ids": 3}, "4")],
)
async def test_a_completion_is_read_from_its_tokens_where_they_are_told(
    told: dict[str, Any], text: str
) -> None:
    bodies: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        choice = {"text": "4", "finish_reason": "length", **told}
        return httpx.Response(200, json={"choices": [choice]})

    spec = AskedSpec(url="http://127.0.0.1:1/v1", model="m")
    drawing = DrawingSpec(stop=("x",), stop_token_ids=(3,))
    made = Asker(spec, drawing, key=None, tokenizer=Spelling())
    made._client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    assert (await made.ask("t", ROW, 0)).text == text
    assert bodies[0]["return_token_ids"] is True
    # A stop text is a part of what was sampled, as in a run.
    stops = {"stop": ["x"], "stop_token_ids": [3], "include_stop_str_in_output": True}
    assert stops.items() <= bodies[0].items()
    assert bodies[0]["prompt"] == [ord(one) for one in "2 + 2"]


@pytest.mark.parametrize(("status", "hint"), [(401, "--key-variable"), (404, "/v1")])
async def test_an_endpoint_that_lists_no_model_says_what_to_give(status: int, hint: str) -> None:
    made = asker(lambda request: httpx.Response(status), url="http://127.0.0.1:1")
    made._model = None
    with pytest.raises(EndpointGoneError, match=hint):
        await made.open()


def test_a_key_does_not_travel_in_clear() -> None:
    spec = AskedSpec(url="http://elsewhere.example/v1")
    with pytest.raises(ValueError, match="not encrypted"):
        Asker(spec, DrawingSpec(), key="secret", tokenizer=None)
