"""Calls whose clients go, calls that wait, and the end of an endpoint."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.endpoints import PATIENCE_S, Sampler, Served, halted, serving_endpoint, wait_until
from support.rollout_checks import make_requests

from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.specs import SamplingSpec
from rolemesh.services.endpoint.turns import RankTurns

ASK: dict[str, Any] = {"model": "policy", "prompt": "a", "max_tokens": 8, "ignore_eos": True}


class Asking:
    """A request on a thread of its own, whose connection can be cut."""

    def __init__(self, url: str, **asked: Any) -> None:
        self.answer: httpx.Response | None = None
        self.error: Exception | None = None
        self._client = httpx.Client(timeout=PATIENCE_S)
        self._thread = threading.Thread(target=self._ask, args=(url, {**ASK, **asked}))
        self._thread.start()

    def _ask(self, url: str, body: dict[str, Any]) -> None:
        try:
            self.answer = self._client.post(url, json=body)
        except httpx.HTTPError as error:
            self.error = error

    def cut(self) -> None:
        """The client goes, in the middle of its request."""
        import socket

        for connection in self._client._transport._pool.connections:  # type: ignore[attr-defined]
            stream = connection._connection._network_stream
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)

    def done(self) -> httpx.Response:
        """Its answer."""
        self._thread.join(PATIENCE_S)
        assert self.answer is not None, self.error
        return self.answer


@pytest.mark.parametrize("kind", ["whole", "several", "stream"])
def test_a_call_whose_client_goes_leaves_the_engine_and_the_session(
    sampler: Sampler, served: Served, kind: str
) -> None:
    session, other = served.session(), served.session()
    more: dict[str, Any] = {"whole": {}, "several": {"n": 3}, "stream": {"stream": True}}[kind]
    with halted(sampler) as (has_stopped, goes_on):
        gone = Asking(f"{session.base_url}/completions", **more)
        assert has_stopped.wait(PATIENCE_S)
        stays = Asking(f"{other.base_url}/completions")
        calls = served.endpoint._calls
        wait_until(lambda: calls.num_open == 2)
        gone.cut()
        assert gone.error is not None
        # The front hears of it, while the engine is still in the middle of a turn.
        wait_until(lambda: session.read()["num_running"] == 0)
        goes_on.set()
        assert stays.done().status_code == 200
    wait_until(lambda: calls.is_empty)
    assert sampler.do(lambda: sampler.num_in_engine) == 0
    found = session.read()
    assert (found["calls"], found["num_running"]) == ([], 0)
    assert len(other.read()["calls"]) == 1
    assert len(other.read()["calls"][0]["sampled_tokens"]) == 8


def test_calls_of_the_same_name_are_two_calls(sampler: Sampler, served: Served) -> None:
    """A name is a client's to choose; it must not mix what two clients are told."""
    sessions = [served.session(seed=seed) for seed in (1, 2)]
    headers = {"x-request-id": "mine"}
    with ThreadPoolExecutor(2) as pool, halted(sampler) as (has_stopped, goes_on):
        asked = [
            pool.submit(served.http.post, f"{one.base_url}/completions", json=ASK, headers=headers)
            for one in sessions
        ]
        assert has_stopped.wait(PATIENCE_S)
        wait_until(lambda: served.endpoint._calls.num_open == 2)
        goes_on.set()
        texts = [one.result().json()["choices"][0]["text"] for one in asked]
    kept = [session.read()["calls"][0]["sampled_tokens"] for session in sessions]
    decode = sampler.tokenizer.decode
    assert texts == [decode(tokens, skip_special_tokens=True) for tokens in kept]
    assert kept[0] != kept[1]


def test_calls_wait_while_the_sampler_may_not_be_used(sampler: Sampler, served: Served) -> None:
    served.may_sample.clear()
    waiting = Asking(f"{served.endpoint.url}/v1/completions")
    wait_until(lambda: served.endpoint._calls.num_open == 1)
    assert sampler.do(lambda: sampler.num_in_engine) == 0
    served.may_sample.set()
    assert waiting.done().status_code == 200


def test_calls_wait_for_weights(sampler: Sampler, served: Served) -> None:
    version = sampler.backend.policy_version
    sampler.do(lambda: sampler.backend.drop_weights("a test takes them"))
    waiting = Asking(f"{served.endpoint.url}/v1/completions")
    wait_until(lambda: served.endpoint._calls.num_open == 1)
    with pytest.raises(WeightsStaleError):
        sampler.do(lambda: sampler.backend.serve(lambda: True))
    assert waiting.answer is None
    sampler.update(version)
    assert waiting.done().status_code == 200


def test_a_turn_makes_way_for_other_work(sampler: Sampler, served: Served) -> None:
    with halted(sampler) as (has_stopped, goes_on), ThreadPoolExecutor(1) as pool:
        asked = Asking(f"{served.endpoint.url}/v1/completions")
        assert has_stopped.wait(PATIENCE_S)
        # It is queued behind the turn; once the step is over, it is next, before the call ends.
        other = pool.submit(sampler.do, lambda: sampler.num_in_engine)
        wait_until(sampler.compute.has_waiting)
        goes_on.set()
        assert other.result(PATIENCE_S) == 1
    assert asked.done().status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_row_that_is_scored_between_two_turns_takes_nothing_from_a_call(
    sampler: Sampler, served: Served, stream: bool
) -> None:
    """A run compares its sampler with its trainer so; the call ends during its steps."""
    row = list(range(4, 12))
    alone = sampler.do(lambda: sampler.backend.score(row))
    url = f"{served.endpoint.url}/v1/completions"
    expected = Asking(url, seed=1, max_tokens=2, return_token_ids=True).done()
    with halted(sampler) as (has_stopped, goes_on), ThreadPoolExecutor(1) as pool:
        asked = Asking(url, seed=1, max_tokens=2, return_token_ids=True, stream=stream)
        assert has_stopped.wait(PATIENCE_S)
        scored = pool.submit(sampler.do, lambda: sampler.backend.score(row))
        wait_until(sampler.compute.has_waiting)
        goes_on.set()
        assert scored.result(PATIENCE_S) == pytest.approx(alone, abs=1e-5)
    answer = asked.done()
    assert answer.status_code == 200
    ids = expected.json()["choices"][0]["token_ids"]
    assert len(ids) == 2
    if not stream:
        assert answer.json()["choices"][0]["token_ids"] == ids
    else:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        choices = [one for event in events for one in json.loads(event)["choices"]]
        assert [token for one in choices for token in one["token_ids"] or ()] == ids


def test_calls_are_sampled_beside_a_generation_and_change_no_token_of_it(
    sampler: Sampler, served: Served
) -> None:
    requests = make_requests(4)
    sampling = SamplingSpec(max_new_tokens=24)

    def generated() -> dict[int, tuple[list[int], list[float]]]:
        return {
            one.row: (list(one.completion_tokens), list(one.logprobs))
            for one in sampler.backend.generate(requests, sampling)
        }

    alone = sampler.do(generated)
    asked: list[Asking] = []

    def between_steps() -> None:
        if not asked:
            asked.append(Asking(f"{served.endpoint.url}/v1/completions", seed=1))
            wait_until(lambda: served.endpoint._calls.num_open == 1)

    sampler.backend.between_steps = between_steps
    beside = sampler.do(generated)
    sampler.backend.between_steps = None
    assert asked[0].done().status_code == 200
    assert {row: one[0] for row, one in beside.items()} == {
        row: one[0] for row, one in alone.items()
    }


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "first of several"])
def test_an_error_of_a_step_is_told_and_later_calls_are_sampled(
    sampler: Sampler, served: Served, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    if not is_alone:
        # Then the turn fails as well, for the other ranks to hear.
        calls = sampler.backend.endpoint_calls
        assert calls is not None
        monkeypatch.setattr(served.endpoint, "_ranks", RankTurns(calls))
    session = served.session()
    with monkeypatch.context() as patch:

        def broken() -> None:
            raise RuntimeError("the step broke")

        patch.setattr(sampler.backend.engine, "step", broken)
        answer = Asking(f"{session.base_url}/completions").done()
        assert answer.status_code == 500
    assert Asking(f"{session.base_url}/completions").done().status_code == 200
    found = session.read()
    assert (len(found["calls"]), found["num_running"]) == (1, 0)
    assert sampler.do(lambda: sampler.num_in_engine) == 0


def test_the_end_of_an_endpoint_ends_calls_that_wait(sampler: Sampler) -> None:
    before = threading.active_count()
    with serving_endpoint(sampler) as served:
        served.may_sample.clear()
        waiting = [
            Asking(f"{served.endpoint.url}/v1/completions", **more)
            for more in ({}, {"n": 2}, {"stream": True})
        ]
        wait_until(lambda: served.endpoint._calls.num_open == 3)
    answers = [one.done() for one in waiting]
    assert [answer.status_code for answer in answers[:2]] == [500, 500]
    assert "error" in answers[2].text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.endpoint.url}/health")
    wait_until(lambda: threading.active_count() <= before)


def test_a_call_in_the_engine_ends_with_the_endpoint(sampler: Sampler) -> None:
    with serving_endpoint(sampler) as served, halted(sampler) as (has_stopped, goes_on):
        asked = Asking(f"{served.endpoint.url}/v1/completions", max_tokens=400)
        assert has_stopped.wait(PATIENCE_S)
        # The turn ends with its step, since the end waits for the thread.
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(sampler.do, served.endpoint.close)
            wait_until(sampler.compute.has_waiting)
            goes_on.set()
            ended.result(PATIENCE_S)
        assert asked.done().status_code == 500
        assert sampler.do(lambda: sampler.num_in_engine) == 0


# --- sessions over HTTP ---------------------------------------------------------------------


def test_a_session_ends_once_with_its_reward(served: Served) -> None:
    session = served.session()
    for _ in range(2):
        session.client.completions.create(model="policy", prompt="a", max_tokens=2)
    place = f"/sessions/{session.session_id}"
    given = {"reward": 0.5, "call_rewards": {"1": 2.0}}
    assert served.http.post(f"{place}/end", json=given).json()["state"] == "ended"
    found = session.read()
    assert (found["state"], found["reward"]) == ("ended", 0.5)
    assert [call["reward"] for call in found["calls"]] == [None, 2.0]
    assert [branch["reward"] for branch in found["branches"]] == [0.5, 2.5]
    assert served.http.post(f"{place}/end", json={}).status_code == 400
    answer = served.http.post(f"{place}/v1/completions", json=ASK)
    assert answer.status_code == 400
    assert "has ended" in answer.json()["error"]["message"]
    assert served.http.delete(place).status_code == 204
    assert served.http.get(place).status_code == 404


@pytest.mark.parametrize(
    "given",
    [
        {"reward": "much"},
        {"rewards": 1.0},
        {"call_rewards": {"0": 1.0}},
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
    ],
)
def test_a_reward_that_is_none_is_refused(served: Served, given: Any) -> None:
    session = served.session()
    place = f"/sessions/{session.session_id}/end"
    content = {"content": given} if isinstance(given, bytes) else {"json": given}
    headers = {"content-type": "application/json"}
    assert served.http.post(place, headers=headers, **content).status_code in (400, 422)
    assert session.read()["state"] == "open"


def test_a_session_does_not_end_while_a_call_runs(sampler: Sampler, served: Served) -> None:
    session = served.session()
    place = f"/sessions/{session.session_id}"
    with halted(sampler) as (has_stopped, _):
        asked = Asking(f"{session.base_url}/completions")
        assert has_stopped.wait(PATIENCE_S)
        answer = served.http.post(f"{place}/end", json={})
        assert answer.status_code == 409
        assert "1 calls that have not ended" in answer.text
    assert asked.done().status_code == 200
    assert served.http.post(f"{place}/end", json={}).status_code == 200


def test_seeds_of_a_session_give_its_calls_again(served: Served) -> None:
    texts = []
    for _ in range(2):
        session = served.session(seed=9)
        for _ in range(2):
            answer = session.client.completions.create(**{**_openai(ASK), "prompt": "a"})
            texts.append(answer.choices[0].text)
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def _openai(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "ignore_eos"}


def test_tokens_of_a_session_are_bounded(served: Served) -> None:
    session = served.session(max_sampled_tokens=10)
    lengths = []
    for _ in range(2):
        session.client.completions.create(**_openai(ASK), extra_body={"ignore_eos": True})
        lengths.append(len(session.read()["calls"][-1]["sampled_tokens"]))
    assert lengths == [8, 2]
    answer = served.http.post(f"{session.base_url}/completions", json=ASK)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]
