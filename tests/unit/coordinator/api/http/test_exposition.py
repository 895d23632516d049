from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.fake_run import fill_store
from support.rest_servers import client_of

from rolemesh.coordinator.api.http.exposition import (
    MAX_TOLD_METRICS,
    MAX_TOLD_RUNS,
    RequestMetrics,
    expose,
)
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.v1 import coordinator_pb2

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values_of(text: str) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_runs_requests_and_the_process_are_told(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await fill_store(store, "live-1", tmp_path / "live-1", num_steps=5, is_live=True)
    await fill_store(store, "ended-1", tmp_path / "ended-1", num_steps=5)
    await store.update_run("live-1", recoveries=2)
    reward = (await store.get_run("live-1")).metrics["reward/mean"]
    async with client_of(StoreOperations(store)) as client:
        for run_id in ("live-1", "live-1", "nobody"):
            await client.get(f"/api/v1/runs/{run_id}")
        await client.get("/nothing")
        answer = await client.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = values_of(answer.text)
    assert told["rolemesh_store_up", ()] == 1
    assert told["rolemesh_runs", (("state", "running"),)] == 1
    assert told["rolemesh_runs", (("state", "succeeded"),)] == 1
    assert told["rolemesh_run_step", (("run_id", "live-1"),)] == 5
    assert told["rolemesh_run_recoveries_total", (("run_id", "live-1"),)] == 2
    metric = (("name", "reward/mean"), ("run_id", "live-1"))
    assert told["rolemesh_run_metric", metric] == reward
    assert not any(("run_id", "ended-1") in labels for _, labels in told)
    route = ("route", "/api/v1/runs/{run_id}")
    requests = "rolemesh_http_requests_total"
    assert told[requests, (("method", "GET"), route, ("status", "200"))] == 2
    assert told[requests, (("method", "GET"), route, ("status", "404"))] == 1
    assert told[requests, (("method", "GET"), ("route", "none"), ("status", "404"))] == 1
    assert told["rolemesh_http_request_seconds_count", (route,)] == 3
    assert told["process_resident_memory_bytes", ()] > 0


def test_the_number_of_label_sets_is_bounded() -> None:
    metrics = {f"m{number}": 1.0 for number in range(MAX_TOLD_METRICS + 50)}
    runs = [
        coordinator_pb2.Run(
            run_id=f"r{number}", state=coordinator_pb2.RUN_STATE_RUNNING, metrics=metrics
        )
        for number in range(MAX_TOLD_RUNS + 5)
    ]

    told = values_of(expose(RequestMetrics(), runs).decode())

    steps = [labels for name, labels in told if name == "rolemesh_run_step"]
    assert steps == [(("run_id", f"r{number}"),) for number in range(MAX_TOLD_RUNS)]
    assert len([1 for name, _ in told if name == "rolemesh_run_metric"]) == (
        MAX_TOLD_RUNS * MAX_TOLD_METRICS
    )
    assert told["rolemesh_runs", (("state", "running"),)] == len(runs)


async def test_an_invented_method_makes_no_label_of_its_own() -> None:
    async with client_of(StoreOperations(MemoryStateStore())) as client:
        for number in range(3):
            await client.request(f"VERB{number}", "/api/v1/runs")
        told = values_of((await client.get("/metrics")).text)

    methods = {dict(labels).get("method") for name, labels in told if "requests" in name}
    assert methods == {"other"}
