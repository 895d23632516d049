"""Who may ask an endpoint what, from where, how much, and over which connection."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.coordinator_doors import written
from support.endpoints import Sampler, Served, halted, serving_endpoint

from rolemesh.rpc.members.authority import Authority
from rolemesh.services.endpoint.routes.fields import ROUTES

KEY = "owner-key"
ASK: dict[str, Any] = {"model": "policy", "prompt": "a", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(sampler: Sampler) -> Iterator[Served]:
    """An endpoint that asks for a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLICY_KEY", KEY)
        with serving_endpoint(sampler, token_variable="POLICY_KEY") as endpoint:
            yield endpoint


def opened(locked: Served, **given: Any) -> dict[str, str]:
    answer = locked.http.post("/sessions", json=given, headers=bearer(KEY))
    assert answer.status_code == 201
    session: dict[str, str] = answer.json()
    return session


def asked(locked: Served, key: str | None, path: str = "/v1/completions") -> int:
    headers = {} if key is None else bearer(key)
    return locked.http.post(path, json=ASK, headers=headers).status_code


# --- keys -----------------------------------------------------------------------------------


def test_the_owners_key_opens_all(locked: Served) -> None:
    session = opened(locked)
    assert asked(locked, KEY) == 200
    assert asked(locked, KEY, f"/sessions/{session['session_id']}/v1/completions") == 200
    place = f"/sessions/{session['session_id']}"
    assert len(locked.http.get(place, headers=bearer(KEY)).json()["calls"]) == 1
    assert locked.http.delete(place, headers=bearer(KEY)).status_code == 204
    assert locked.http.get(place, headers=bearer(KEY)).status_code == 404
    # A session's key opens nothing once it is gone.
    assert asked(locked, session["key"]) == 401


@pytest.mark.parametrize("key", [None, "other", KEY + "x", KEY[:-1], "k\u00e9y"])
def test_a_wrong_key_opens_nothing(locked: Served, key: str | None) -> None:
    session = opened(locked)
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    place = f"/sessions/{session['session_id']}"
    for method, path in (
        *(("POST", route) for route in ROUTES),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("POST", "/sessions"),
        ("GET", place),
        ("POST", f"{place}/end"),
        ("DELETE", place),
        ("POST", f"{place}/v1/completions"),
        ("GET", f"{place}/v1/models"),
    ):
        answer = locked.http.request(method, path, json=ASK, headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
    client = openai.OpenAI(base_url=f"{locked.endpoint.url}/v1", api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_sessions_key_opens_that_session_alone(locked: Served) -> None:
    mine, other = opened(locked), opened(locked)
    key, own, others = mine["key"], *(f"/sessions/{one['session_id']}" for one in (mine, other))
    assert asked(locked, key, f"{own}/v1/completions") == 200
    assert locked.http.get(own, headers=bearer(key)).status_code == 200
    # By the key alone it is a call of the session as well.
    assert asked(locked, key) == 200
    assert len(locked.http.get(own, headers=bearer(key)).json()["calls"]) == 2
    assert asked(locked, key, f"{others}/v1/completions") == 401
    assert locked.http.get(others, headers=bearer(key)).status_code == 403
    assert locked.http.post(f"{others}/end", json={}, headers=bearer(key)).status_code == 403
    assert locked.http.post("/sessions", json={}, headers=bearer(key)).status_code == 403
    assert locked.http.delete(own, headers=bearer(key)).status_code == 403
    # Which sessions there are is not told either.
    assert asked(locked, key, "/sessions/none/v1/completions") == 401
    assert locked.http.get("/sessions/none", headers=bearer(key)).status_code == 403
    found = locked.http.get(others, headers=bearer(KEY)).json()
    assert (found["state"], found["calls"]) == ("open", [])


def test_a_sessions_base_url_and_key_are_all_that_a_client_needs(locked: Served) -> None:
    session = opened(locked, session_id="my-rollout_1.a")
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["key"])
    assert [model.id for model in client.models.list()] == ["policy"]
    client.completions.create(**ASK)
    place = "/sessions/my-rollout_1.a"
    assert len(locked.http.get(place, headers=bearer(KEY)).json()["calls"]) == 1


def test_a_key_that_is_not_set_is_told(sampler: Sampler) -> None:
    with (
        pytest.raises(ValueError, match=r"endpoint\.token_variable is 'UNSET_KEY', which is not"),
        serving_endpoint(sampler, token_variable="UNSET_KEY"),
    ):
        pass


# --- without a key: this machine alone ------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example", 401),
        ("evil.example:8000", 401),
        ("127.0.0.1.evil.example", 401),
        ("localhost.evil.example:80", 401),
        ("", 401),
    ],
)
def test_a_request_must_name_this_machine(served: Served, host: str, status: int) -> None:
    """A page whose name was made to point here is asked for by its own name."""
    answer = served.http.post("/v1/completions", json=ASK, headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_web_page_may_ask_nothing(served: Served, origin: str) -> None:
    for path in ("/v1/completions", "/sessions"):
        answer = served.http.post(path, json=ASK, headers={"origin": origin})
        assert answer.status_code == 401
    assert served.http.get("/v1/models", headers={"origin": origin}).status_code == 401
    preflight = served.http.options("/v1/completions", headers={"origin": origin})
    assert "access-control-allow-origin" not in preflight.headers


def test_a_sessions_key_is_no_owner_without_a_key_either(served: Served) -> None:
    session, other = served.session(), served.session()
    place = f"/sessions/{other.session_id}"
    assert served.http.get(place, headers=bearer(session.key)).status_code == 403
    path = f"{place}/v1/completions"
    assert served.http.post(path, json=ASK, headers=bearer(session.key)).status_code == 401


# --- bounds ---------------------------------------------------------------------------------


def test_routes_that_are_not_served_are_not_there(served: Served) -> None:
    for method, path in (
        ("POST", "/v1/embeddings"),
        ("POST", "/detokenize"),
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/v1/responses"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
    ):
        answer = served.http.request(method, path, json={})
        assert answer.status_code == 404, path
        assert "/v1/chat/completions" in answer.json()["error"]["message"]
    assert served.http.get("/v1/completions").status_code in (400, 405)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(served: Served, body: bytes) -> None:
    answer = served.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_told", [True, False], ids=["length", "chunks"])
def test_a_request_has_a_longest_length(sampler: Sampler, is_told: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 64

    with serving_endpoint(sampler, max_body_bytes=2048) as served:
        content = b" " * 4096 if is_told else chunks()
        answer = served.http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert "endpoint.max_body_bytes" in answer.json()["error"]["message"]
        answer = served.http.post("/sessions", content=b" " * 4096)
        assert answer.status_code == 413
        assert served.http.post("/v1/completions", json=ASK).status_code == 200


def test_more_calls_than_may_wait_are_refused(sampler: Sampler) -> None:
    with serving_endpoint(sampler, max_waiting_calls=2) as served, ThreadPoolExecutor(2) as pool:
        with halted(sampler) as (has_stopped, _):
            first = pool.submit(served.http.post, "/v1/completions", json=ASK)
            assert has_stopped.wait(60)
            # One that asks for two completions takes two places.
            answer = served.http.post("/v1/completions", json={**ASK, "n": 2})
            assert answer.status_code == 503
            assert "endpoint.max_waiting_calls is 2" in answer.json()["error"]["message"]
        assert first.result().status_code == 200
        assert served.http.post("/v1/completions", json={**ASK, "n": 2}).status_code == 200


def test_sessions_are_bounded_and_told_so(sampler: Sampler) -> None:
    with serving_endpoint(sampler, max_sessions=1) as served:
        session = served.session(max_calls=1)
        answer = served.http.post("/sessions", json={})
        assert answer.status_code == 400
        assert "endpoint.max_sessions is 1" in answer.json()["error"]["message"]
        session.client.completions.create(**ASK)
        for stream in (False, True):
            # A stream that has begun could say so in its text alone.
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                session.client.completions.create(**ASK, stream=stream)
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                session.chat([{"role": "user", "content": "a"}], stream=stream)


# --- addresses ------------------------------------------------------------------------------


def test_a_port_in_use_is_told(sampler: Sampler, served: Served) -> None:
    port = int(served.endpoint.url.rpartition(":")[2])
    before = threading.active_count()
    with (
        pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 cannot be bound"),
        serving_endpoint(sampler, port=port),
    ):
        pass
    assert threading.active_count() == before
    assert served.http.post("/v1/completions", json=ASK).status_code == 200


def test_an_endpoint_speaks_tls(sampler: Sampler, tmp_path: Path) -> None:
    authority = Authority.make()
    certificate = written(authority.issue("actor", hosts=["127.0.0.1"]), tmp_path / "actor.pem")
    trusted = tmp_path / "authority.crt"
    trusted.write_bytes(authority.issue("actor").authority)
    with serving_endpoint(sampler, certificate=certificate) as served:
        assert served.endpoint.url.startswith("https://127.0.0.1:")
        verified = ssl.create_default_context(cafile=trusted)
        with httpx.Client(base_url=served.endpoint.url, verify=verified) as client:
            assert client.post("/v1/completions", json=ASK).status_code == 200
            session = client.post("/sessions", json={}).json()
            assert session["base_url"].startswith("https://")
        with pytest.raises(httpx.ConnectError):
            served.http.get("/v1/models")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{served.endpoint.url.replace('https', 'http')}/v1/models")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("tool_parser", "no-such", r"endpoint\.tool_parser is 'no-such'.*hermes"),
        ("reasoning_parser", "no-such", r"endpoint\.reasoning_parser is 'no-such'.*qwen3"),
        ("chat_template", "/no/such.jinja", r"endpoint\.chat_template cannot be read"),
        ("certificate", "/no/such.pem", r"/no/such\.pem"),
    ],
)
def test_what_cannot_be_served_is_told_at_the_start(
    sampler: Sampler, field: str, value: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told), serving_endpoint(sampler, **{field: value}):
        pass


def test_tools_that_the_template_would_not_show_are_refused(
    sampler: Sampler, tmp_path: Path
) -> None:
    from support.endpoints import ADD
    from support.tiny_models import tiny_tokenizer

    template = tmp_path / "plain.jinja"
    template.write_text(str(tiny_tokenizer().chat_template))
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with serving_endpoint(sampler, chat_template=template, tool_parser="hermes") as served:
        answer = served.http.post("/v1/chat/completions", json={**body, "tools": [ADD]})
        assert answer.status_code == 400
        assert "endpoint.chat_template" in answer.json()["error"]["message"]
        none = {**body, "tools": [ADD], "tool_choice": "none"}
        assert served.http.post("/v1/chat/completions", json=none).status_code == 200
