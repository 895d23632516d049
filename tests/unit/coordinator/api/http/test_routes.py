"""Every route over a store that an invented run was written to."""

import json
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from support.fake_run import LOGS, SERVICES, fill_store
from support.planned_runs import EXPECTED, MEASURED_STEP_S, write_planned_run
from support.rest_servers import JSON, client_of, refused

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.journal import LOG_OPERATION
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream, StateStore
from rolemesh.v1 import coordinator_pb2, experience_pb2

NUM_STEPS = 12
LIVE = "/api/v1/runs/live-1"
ENDED = "/api/v1/runs/ended-1"


class Creator:
    """Starts runs by writing them down."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.wishes: list[tuple[str, str, Sequence[str]]] = []

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        self.wishes.append((run_id, recipe, overrides))
        await self._store.create_run(
            RunRecord(
                run_id=run_id, name="n", num_steps=1, directory="", created_at=9e9, updated_at=9e9
            )
        )

    async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        self.wishes.append((run_id, "", overrides))
        await self._store.update_run(run_id, state=RunState.STARTING)


@pytest.fixture
def store() -> StateStore:
    return MemoryStateStore()


@pytest.fixture
def creator(store: StateStore) -> Creator:
    return Creator(store)


@pytest.fixture
async def client(
    store: StateStore, creator: Creator, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    await fill_store(store, "ended-1", tmp_path / "ended-1", num_steps=NUM_STEPS)
    await fill_store(
        store, "live-1", tmp_path / "live-1", num_steps=NUM_STEPS, is_live=True, created_at=1.9e9
    )
    async with client_of(StoreOperations(store, creator)) as client:
        yield client


@pytest.fixture
async def empty(store: StateStore, creator: Creator) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(StoreOperations(store, creator)) as client:
        yield client


async def test_runs_are_listed_newest_first(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/v1/runs")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == JSON
    assert [run["run_id"] for run in answer.json()["runs"]] == ["live-1", "ended-1"]
    newest = (await client.get("/api/v1/runs", params={"page_size": 1})).json()["runs"]
    assert [run["run_id"] for run in newest] == ["live-1"]


async def test_a_run_is_described(client: httpx.AsyncClient) -> None:
    run = (await client.get(ENDED)).json()

    assert run["state"] == "succeeded"
    assert run["step"] == run["num_steps"] == NUM_STEPS
    assert run["algorithm"] == "ppo"
    assert run["metrics"]["step"] == NUM_STEPS
    assert datetime.fromisoformat(run["created_at"]).timestamp() == 1_800_000_000.0


async def test_a_run_is_created_and_found_at_its_location(
    client: httpx.AsyncClient, creator: Creator
) -> None:
    wish = {"run_id": "new-1", "recipe": "algorithm: {type: grpo}", "overrides": ["a.b=1"]}
    answer = await client.post("/api/v1/runs", json=wish)

    assert answer.status_code == 201
    assert creator.wishes == [("new-1", "algorithm: {type: grpo}", ["a.b=1"])]
    assert (await client.get(answer.headers["location"])).json() == answer.json()


async def test_a_run_is_paused_resumed_and_stopped(
    client: httpx.AsyncClient, store: StateStore
) -> None:
    assert (await client.post(f"{LIVE}/pause")).json()["state"] == "pausing"
    assert (await store.get_run("live-1")).pause_requested
    assert (await client.post(f"{LIVE}/resume")).json()["state"] == "running"
    assert (await client.post(f"{LIVE}/stop")).json()["state"] == "stopping"
    assert (await store.get_run("live-1")).stop_requested


async def test_a_run_that_failed_is_resumed_with_another_recipe(
    client: httpx.AsyncClient, store: StateStore, creator: Creator
) -> None:
    await store.update_run("live-1", state=RunState.FAILED)
    wish = {"overrides": ["run.steps=40"]}
    assert (await client.post(f"{LIVE}/resume", json=wish)).json()["state"] == "starting"
    assert creator.wishes == [("live-1", "", ["run.steps=40"])]
    refused(await client.post(f"{LIVE}/resume", json={"steps": 3}), 400, "REQUEST_INVALID")


async def test_a_checkpoint_is_asked_for_under_the_given_name_or_a_new_one(
    client: httpx.AsyncClient, store: StateStore
) -> None:
    named = await client.post(f"{LIVE}/checkpoint", json={"request_id": "mine"})
    unnamed = [await client.post(f"{LIVE}/checkpoint") for _ in range(2)]

    assert {answer.status_code for answer in (named, *unnamed)} == {200}
    entries = await store.read_entries("live-1", RunStream.CHECKPOINT_WISHES)
    wishes = [entry.payload.decode() for entry in entries]
    assert wishes[0] == "mine"
    assert len(set(wishes)) == 3


async def test_a_client_logs_a_step_of_its_run(
    client: httpx.AsyncClient, store: StateStore
) -> None:
    refused(await client.post(f"{LIVE}/steps", json={}), 400, "REQUEST_INVALID")
    # JSON has one type of number.
    step = {"fencing_epoch": 1.0, "step": 99, "metrics": {"loss": 1}}
    refused(await client.post(f"{LIVE}/steps", json=step), 409, "RUN_NOT_EXTERNAL")
    await store.update_run("live-1", algorithm="external")
    epoch = await store.next_epoch("live-1")
    refused(await client.post(f"{LIVE}/steps", json=step), 409, "STALE_EPOCH")
    rows = [{"row": 3, "prompt": "a", "completion": "b"}]
    logged = {**step, "fencing_epoch": epoch, "samples": rows}
    assert (await client.post(f"{LIVE}/steps", json=logged)).status_code == 200
    refused(await client.post(f"{LIVE}/steps", json={**logged, "step": 98}), 409, "STEP_LOGGED")
    (entry,) = [e for e in await store.read_journal("live-1") if e.operation == LOG_OPERATION]
    assert entry.result == {"record": {"step": 99, "loss": 1.0}, "num_samples": 1}
    (shown,) = (await client.get(f"{LIVE}/samples?step=99")).json()["samples"]
    assert (shown["row"], shown["completion"], shown["reward"]) == (3, "b", None)


async def test_an_ended_run_takes_no_wish(client: httpx.AsyncClient) -> None:
    for wish in ("pause", "resume", "checkpoint"):
        refused(await client.post(f"{ENDED}/{wish}"), 409, "RUN_ENDED")
    assert (await client.post(f"{ENDED}/stop")).json()["state"] == "succeeded"


async def test_metrics_come_in_columns_that_agree_with_the_file(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    lines = (tmp_path / "ended-1" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]

    metrics = (await client.get(f"{ENDED}/metrics")).json()

    assert metrics["steps"] == list(range(1, NUM_STEPS + 1))
    assert metrics["next_step"] is None
    assert metrics["series"]["reward/mean"] == [record["reward/mean"] for record in records]
    # Evaluated each fifth step: null where there is no score.
    scores = [record.get("held_out/score") for record in records]
    assert metrics["series"]["held_out/score"] == scores
    assert None in scores


async def test_metrics_are_chosen_by_name_step_and_number(client: httpx.AsyncClient) -> None:
    query = {"names": ["reward/*", "entropy"], "from_step": 3, "max_steps": 4}
    metrics = (await client.get(f"{ENDED}/metrics", params=query)).json()

    assert metrics["steps"] == [3, 4, 5, 6]
    assert metrics["next_step"] == 7
    assert {name.partition("/")[0] for name in metrics["series"]} == {"reward", "entropy"}
    thin = {"max_steps": 4, "thin": "true"}
    assert (await client.get(f"{ENDED}/metrics", params=thin)).json()["steps"] == [3, 6, 9, 12]


async def test_the_graph_of_a_step_and_of_the_step_in_progress(client: httpx.AsyncClient) -> None:
    made = (await client.get(f"{LIVE}/dataflow", params={"step": 2})).json()
    going = (await client.get(f"{LIVE}/dataflow")).json()

    assert (made["step"], made["is_made"]) == (2, True)
    assert all(node["ended_s"] > node["started_s"] for node in made["nodes"])
    assert any(node["is_critical"] for node in made["nodes"])
    assert (going["step"], going["is_made"]) == (NUM_STEPS + 1, False)
    assert None in [node["ended_s"] for node in going["nodes"]]
    refused(await client.get(f"{LIVE}/dataflow?step=99"), 404, "STEP_NOT_FOUND")


async def test_samples_have_a_log_prob_a_token(client: httpx.AsyncClient) -> None:
    answer = (await client.get(f"{ENDED}/samples", params={"step": 3})).json()

    assert answer["step"] == 3
    assert answer["steps"] == list(range(1, NUM_STEPS + 1))
    for sample in answer["samples"]:
        assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["loss_mask"])
        assert sample["reward_parts"] == {"python/acc": sample["reward"]}
        assert sample["session"] is None
    refused(await client.get(f"{ENDED}/samples?step=99"), 404, "STEP_NOT_FOUND")


async def test_loads_of_experts_are_numbers_by_role_and_layer(
    store: StateStore, client: httpx.AsyncClient
) -> None:
    assert (await client.get(f"{ENDED}/experts")).json() == {"step": 0, "roles": [], "steps": []}
    layers = [experience_pb2.LayerLoads(layer=layer, choices=[3, 0, 2**53 - 1]) for layer in (1, 4)]
    told = coordinator_pb2.GetExpertLoadsResponse(
        step=3, roles=[coordinator_pb2.RoleLoads(role="actor", layers=layers)]
    )
    await store.append_entry("ended-1", RunStream.EXPERTS, told.SerializeToString(), step=3)
    expected = {
        "step": 3,
        "roles": [
            {
                "role": "actor",
                "layers": [
                    {"layer": 1, "choices": [3, 0, 2**53 - 1]},
                    {"layer": 4, "choices": [3, 0, 2**53 - 1]},
                ],
            }
        ],
        "steps": [3],
    }
    for query in ("", "?step=3"):
        assert (await client.get(f"{ENDED}/experts{query}")).json() == expected
    refused(await client.get(f"{ENDED}/experts?step=2"), 404, "STEP_NOT_FOUND")


async def test_device_use_is_read_on_from_the_newest_time(client: httpx.AsyncClient) -> None:
    all_times = (await client.get(f"{ENDED}/devices")).json()["devices"][0]["times"]
    later = await client.get(f"{ENDED}/devices", params={"since": all_times[3]})

    for series in later.json()["devices"]:
        assert series["times"] == all_times[3:]
        assert len(series["busy"]) == len(series["memory_bytes"]) == len(series["times"])


@pytest.mark.parametrize(
    "since",
    ["2026", "2026-01-01", "1767225600", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00", "now"],
)
async def test_a_time_that_is_not_rfc_3339_is_refused(empty: httpx.AsyncClient, since: str) -> None:
    problem = refused(
        await empty.get(f"{ENDED}/devices", params={"since": since}), 400, "REQUEST_INVALID"
    )
    assert repr(since) in problem["detail"]


async def test_a_plan_stands_beside_what_steps_took_and_is_null_without_one(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get(f"{LIVE}/plan")).json() == {"plan": None}
    store = MemoryStateStore()
    await write_planned_run(store, "planned")
    async with client_of(StoreOperations(store)) as planned:
        plan = (await planned.get("/api/v1/runs/planned/plan")).json()["plan"]
    assert (plan["step_s"], plan["measured_step_s"]) == (6.0, MEASURED_STEP_S)
    assert {task["name"]: (task["predicted_s"], task["measured_s"]) for task in plan["tasks"]} == {
        name: (pytest.approx(predicted), pytest.approx(measured))
        for name, (predicted, measured) in EXPECTED.items()
    }
    assert plan["tasks"][-1]["start_s"] is None


async def test_alerts_are_a_list(client: httpx.AsyncClient) -> None:
    assert isinstance((await client.get(f"{LIVE}/alerts")).json()["alerts"], list)


async def test_a_log_is_read_piece_by_piece_and_from_its_end(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    text = (tmp_path / "live-1" / "logs" / "actor.log").read_text()
    read, offset = "", 0
    while offset < len(text):
        query = {"offset": offset, "max_bytes": 1000}
        piece = (await client.get(f"{LIVE}/logs/actor", params=query)).json()
        assert piece["offset"] == offset
        read, offset = read + piece["text"], piece["next_offset"]

    assert read == text
    assert piece["logs"] == sorted(LOGS)
    tail = (await client.get(f"{LIVE}/logs/actor", params={"offset": -10})).json()
    assert tail["text"] == text[-10:]
    refused(await client.get(f"{LIVE}/logs/passwd"), 404, "LOG_NOT_FOUND")


async def test_services_are_listed(client: httpx.AsyncClient) -> None:
    services = (await client.get("/api/v1/services")).json()["services"]
    assert sorted(service["role"] for service in services) == sorted(SERVICES.values())


@pytest.mark.parametrize(
    "path",
    [
        *("", "/metrics", "/dataflow", "/plan", "/samples", "/devices", "/alerts", "/logs/actor"),
        *("/events", "/experts"),
    ],
)
async def test_every_reading_route_says_that_a_run_is_unknown(
    empty: httpx.AsyncClient, path: str
) -> None:
    problem = refused(await empty.get(f"/api/v1/runs/nobody{path}"), 404, "RUN_NOT_FOUND")
    assert problem["run_id"] == "nobody"


@pytest.mark.parametrize("wish", ["stop", "pause", "resume", "checkpoint"])
async def test_every_steering_route_says_that_a_run_is_unknown(
    empty: httpx.AsyncClient, wish: str
) -> None:
    refused(await empty.post(f"/api/v1/runs/nobody/{wish}"), 404, "RUN_NOT_FOUND")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/v1/runs?page_size=0", "query.page_size"),
        ("/api/v1/runs?page_size=1001", "query.page_size"),
        (f"{ENDED}/metrics?max_steps=1001", "query.max_steps"),
        (f"{ENDED}/metrics?from_step=-1", "query.from_step"),
        (f"{ENDED}/metrics?from_step={2**63}", "query.from_step"),
        (f"{ENDED}/metrics?thin=yes", "query.thin"),
        (f"{ENDED}/dataflow?step=x", "query.step"),
        (f"{ENDED}/experts?step=-1", "query.step"),
        (f"{ENDED}/logs/actor?max_bytes=0", "query.max_bytes"),
        ("/api/v1/runs/a%20b", "path.run_id"),
        (f"{ENDED}/logs/.hidden", "path.log"),
    ],
)
async def test_a_request_that_is_wrong_names_its_field(
    empty: httpx.AsyncClient, path: str, field: str
) -> None:
    problem = refused(await empty.get(path), 400, "REQUEST_INVALID")
    assert [error["field"] for error in problem["errors"]] == [field]
    assert field in problem["detail"]


async def test_an_unknown_query_parameter_is_refused(client: httpx.AsyncClient) -> None:
    problem = refused(await client.get(f"{ENDED}/metrics?step_from=3"), 400, "REQUEST_INVALID")
    assert "'step_from'" in problem["detail"]
    assert "from_step" in problem["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"run_id": "a"}',
        b'{"run_id": "a", "recipe": 3}',
        b'{"run_id": "a", "recipe": "r", "more": 1}',
        b'{"run_id": "../a", "recipe": "r"}',
        b'{"run_id": "a", "recipe": "\\ud800"}',
    ],
)
async def test_a_wrong_body_is_refused_and_starts_nothing(
    empty: httpx.AsyncClient, creator: Creator, body: bytes
) -> None:
    answer = await empty.post("/api/v1/runs", content=body, headers={"content-type": JSON})
    refused(answer, 400, "REQUEST_INVALID")
    assert creator.wishes == []


async def test_a_body_that_does_not_say_that_it_is_json_is_refused(
    empty: httpx.AsyncClient,
) -> None:
    # What a form of another page can send without asking first.
    body = b'{"run_id": "a", "recipe": "r"}'
    answer = await empty.post("/api/v1/runs", content=body, headers={"content-type": "text/plain"})
    refused(answer, 400, "REQUEST_INVALID")


async def test_health_and_readiness(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    assert (await client.get("/readyz")).json() == {"status": "ok"}
