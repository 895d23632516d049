"""Tests of which requests are answered."""

import httpx
import pytest
from support.rest_servers import client_of, refused, tokens_of

from rolemesh.coordinator.api.http.guard import MAX_BODY_BYTES
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore

TOKEN = "correct-horse"
OPEN = ("/healthz", "/readyz", "/openapi.json", "/")
CLOSED = ("/api/v1/runs", "/api/v1/services", "/api/v1/nothing", "/metrics")


def client(token: str | None = None) -> httpx.AsyncClient:
    return client_of(StoreOperations(MemoryStateStore()), tokens=tokens_of(token))


async def test_without_a_token_nobody_is_asked_for_one() -> None:
    async with client() as open_client:
        for path in ("/api/v1/runs", "/metrics", *OPEN[:3]):
            assert (await open_client.get(path)).status_code == 200


async def test_a_token_is_asked_for_where_runs_are_told_of() -> None:
    async with client(TOKEN) as guarded:
        for path in CLOSED:
            answer = await guarded.get(path)
            refused(answer, 401, "TOKEN_MISSING")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in OPEN:
            assert (await guarded.get(path)).status_code in (200, 404)


@pytest.mark.parametrize(
    "sent",
    [
        "Bearer wrong",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        "Bearer \xe9",
    ],
)
async def test_another_token_is_refused(sent: str) -> None:
    async with client(TOKEN) as guarded:
        headers = {"authorization": sent.encode("latin-1")}
        refused(await guarded.get("/api/v1/runs", headers=headers), 401, "TOKEN_INVALID")


async def test_the_token_opens_and_stands_in_no_query() -> None:
    async with client(TOKEN) as guarded:
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {TOKEN}"}
            assert (await guarded.get("/api/v1/runs", headers=headers)).status_code == 200
        for place in ("/api/v1/runs?", "/?", "/api/v1/runs?ä=%FF&page_size=1&access_"):
            for headers in ({}, {"authorization": f"Bearer {TOKEN}"}):
                answer = await guarded.get(f"{place}token={TOKEN}", headers=headers)
                assert TOKEN not in answer.text
                refused(answer, 400, "TOKEN_IN_QUERY")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8321", "127.0.0.1", "127.0.0.1:1", "127.0.0.5", "[::1]:8321"]
)
async def test_names_of_loopback_are_answered(host: str) -> None:
    async with client() as open_client:
        assert (await open_client.get("/healthz", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8321", "localhost.evil.example", "10.0.0.1", "", "[", "a@b:c"],
)
async def test_a_name_rebound_to_loopback_is_refused(host: str) -> None:
    async with client() as open_client:
        for path in ("/", "/api/v1/runs", "/openapi.json"):
            refused(await open_client.get(path, headers={"host": host}), 403, "HOST_REFUSED")


async def routes(asked: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Method and path of every route that there is, and of a few that are none."""
    paths = (await asked.get("/openapi.json", headers={"host": "localhost"})).json()["paths"]
    named = [(method.upper(), path) for path in paths for method in paths[path]]
    assert len(named) > 15
    others = [(method, path) for path in OPEN for method in ("GET", "HEAD", "OPTIONS", "PUT")]
    return [(method, path.replace("{", "").replace("}", "")) for method, path in named + others]


async def test_a_rebound_name_reaches_no_route_by_any_method() -> None:
    async with client() as open_client:
        for method, path in await routes(open_client):
            answer = await open_client.request(method, path, headers={"host": "evil.example"})
            assert answer.status_code == 403, (method, path)
            assert answer.headers["content-type"] == "application/problem+json"


async def test_a_page_of_another_origin_reaches_no_route_that_changes_something() -> None:
    headers = {"origin": "https://evil.example", "host": "localhost:8321"}
    changing = 0
    async with client() as open_client:
        for method, path in await routes(open_client):
            if method not in ("GET", "HEAD", "OPTIONS"):
                changing += 1
                refused(
                    await open_client.request(method, path, headers=headers), 403, "ORIGIN_REFUSED"
                )
    assert changing > 4


async def test_no_page_of_another_origin_may_read_an_answer() -> None:
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with client() as open_client:
        for method, path in await routes(open_client):
            for asked in {method, "OPTIONS"}:
                headers = {**preflight, "host": "localhost:8321"}
                answer = await open_client.request(asked, path, headers=headers)
                given = [name for name in answer.headers if name.startswith("access-control-")]
                assert given == [], (asked, path)


async def test_with_a_token_any_name_may_lead_here() -> None:
    async with client(TOKEN) as guarded:
        headers = {"host": "mesh.example", "authorization": f"Bearer {TOKEN}"}
        assert (await guarded.get("/api/v1/runs", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:9", "null", "", "file://", "http://["]
)
async def test_a_page_of_another_origin_changes_nothing(origin: str) -> None:
    async with client() as open_client:
        headers = {"origin": origin, "host": "localhost:8321"}
        answer = await open_client.post("/api/v1/runs/r/stop", headers=headers)
        refused(answer, 403, "ORIGIN_REFUSED")


@pytest.mark.parametrize("headers", [{}, {"origin": "http://localhost:8321"}])
async def test_the_own_page_and_other_clients_may(headers: dict[str, str]) -> None:
    async with client() as open_client:
        headers = {"host": "localhost:8321", **headers}
        answer = await open_client.post("/api/v1/runs/r/stop", headers=headers)
        refused(answer, 404, "RUN_NOT_FOUND")


async def test_a_body_beyond_the_bound_is_refused() -> None:
    recipe = "x" * (MAX_BODY_BYTES + 1)
    async with client() as open_client:
        answer = await open_client.post("/api/v1/runs", json={"run_id": "a", "recipe": recipe})
        refused(answer, 413, "BODY_TOO_LARGE")
        largest = {"run_id": "a", "recipe": recipe[:-100]}
        refused(await open_client.post("/api/v1/runs", json=largest), 409, "CREATION_UNAVAILABLE")


async def test_every_answer_carries_the_headers_that_keep_a_browser_in_bounds() -> None:
    async with client(TOKEN) as guarded:
        for path in ("/healthz", "/api/v1/runs", "/nothing"):
            headers = (await guarded.get(path)).headers
            assert "default-src 'self'" in headers["content-security-policy"]
            # Of images alone also data URLs.
            assert headers["content-security-policy"].count("data:") == 1
            assert "img-src 'self' data:" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"


async def test_a_body_that_nests_too_deep_is_refused_by_name() -> None:
    async with client() as open_client:
        answer = await open_client.post("/api/v1/runs/made/steps", content="[" * 500_000)
        problem = refused(answer, 400, "REQUEST_INVALID")
        assert "body is JSON of more than 64 levels, more than the limit of 64" in problem["detail"]


async def test_of_many_faults_of_a_body_some_are_told() -> None:
    async with client() as open_client:
        body = {"fencing_epoch": 1, "step": 1, "metrics": {f"m{n}": "x" for n in range(200)}}
        answer = await open_client.post("/api/v1/runs/made/steps", json=body)
        assert len(refused(answer, 400, "REQUEST_INVALID")["errors"]) == 50
