"""The OpenAPI document is true: schemathesis finds nothing, and nothing is undocumented."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fill_store
from support.rest_servers import PROBLEM, served, tokens_of

from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.routes import router
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.errors import RunExistsError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, StateStore
from rolemesh.rpc.errors import PreconditionError
from rolemesh.v1 import coordinator_pb2

TOKEN = "a-token"

# All checks are on. An id of an event is opaque, so the document cannot say which ones there are.
CONFIG = """
seed = 5
max-stream-events = 20
request-timeout = 10
{parameters}
[generation]
max-examples = {examples}
[[operations]]
include-operation-id = "watch_run"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "410"]
"""


class Creator:
    """Takes every recipe."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._recipes: dict[str, tuple[str, tuple[str, ...]]] = {}

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        wish = (recipe, tuple(overrides))
        if self._recipes.get(run_id) == wish:
            return
        record = RunRecord(
            run_id=run_id, name="n", num_steps=1, directory="", created_at=1.0, updated_at=1.0
        )
        try:
            await self._store.create_run(record)
        except RunExistsError as error:
            raise PreconditionError(str(error), reason="RUN_EXISTS") from error
        self._recipes[run_id] = wish

    async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        await self._store.update_run(run_id, pause_requested=False)


@pytest.mark.parametrize(
    ("parameters", "examples"),
    [
        pytest.param("", 5, id="any-run"),
        pytest.param("", 15, id="any-run-longer", marks=pytest.mark.slow),
        pytest.param(
            '[parameters]\nrun_id = "live-1"\nlog = "actor"',
            15,
            id="live-run",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_schemathesis_finds_no_failure(
    parameters: str, examples: int, tmp_path: Path
) -> None:
    store = MemoryStateStore()
    await fill_store(store, "live-1", tmp_path / "live-1", num_steps=8, is_live=True)
    await fill_store(store, "ended-1", tmp_path / "ended-1", num_steps=8)
    settings = CONFIG.format(parameters=parameters, examples=examples)
    (tmp_path / "schemathesis.toml").write_text(settings)
    operations = StoreOperations(store, Creator(store))
    async with served(operations, tokens=tokens_of(TOKEN), stream_lifetime_s=0.2) as (client, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{client.base_url}/openapi.json",
            f"--header=Authorization: Bearer {TOKEN}",
            "--checks=all",
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()

    text = output.decode()
    assert process.returncode == 0, text
    num_operations = len(list(operations_of(make_app(operations).openapi())))
    assert f"Tested: {num_operations}" in text


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def document_of(token: str | None = None) -> dict[str, Any]:
    app = make_app(StoreOperations(MemoryStateStore()), tokens=tokens_of(token))
    document: dict[str, Any] = app.openapi()
    return document


def test_every_operation_is_named_described_and_tagged() -> None:
    document = document_of()
    found = list(operations_of(document))
    names = [operation["operationId"] for _, _, operation in found]
    assert len(set(names)) == len(names)
    tags = {tag["name"] for tag in document["tags"]}
    for path, _, operation in found:
        assert operation["description"], path
        assert set(operation["tags"]) <= tags, path
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (path, parameter["name"])
    assert document["info"]["version"]


def test_every_error_is_declared_as_a_problem_with_an_example() -> None:
    for path, _, operation in operations_of(document_of(TOKEN)):
        errors = {
            status: declared
            for status, declared in operation["responses"].items()
            if int(status) >= 400
        }
        assert {"403", "500"} <= set(errors), path
        assert ("401" in errors) == (path.startswith("/api/") or path == "/metrics"), path
        for status, declared in errors.items():
            assert list(declared["content"]) == [PROBLEM], (path, status)
            content = declared["content"][PROBLEM]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert content["example"]["status"] == int(status)


def test_a_token_is_declared_where_it_is_asked_for() -> None:
    assert "securitySchemes" not in document_of()["components"]
    document = document_of(TOKEN)
    scheme = document["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, _, operation in operations_of(document):
        assert ("security" in operation) == (path.startswith("/api/") or path == "/metrics"), path


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = document_of()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
            for part in value.values():
                yield from references(part)
        elif isinstance(value, list):
            for part in value:
                yield from references(part)

    named = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert named <= set(schemas)


def test_every_rpc_but_attach_run_has_a_route() -> None:
    # Whoever attaches goes on over gRPC to the services of the run.
    methods = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods
    named = {operation["operationId"] for _, _, operation in operations_of(document_of())}
    rpcs = {"".join(f"_{c.lower()}" if c.isupper() else c for c in m.name)[1:] for m in methods}
    assert rpcs - named == {"attach_run"}
    assert {route.name for route in router.routes} == named & rpcs  # type: ignore[attr-defined]
