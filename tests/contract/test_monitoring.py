"""Prometheus and Grafana as compose starts them: what they ask for is what our processes tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.compose_files import BASE_FILE, mounts, resolve
from support.fake_run import fill_store
from support.rest_servers import client_of
from support.services import ToyRole

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.sections.api_section import TokenFiles
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.service_server import ServiceServer

REPOSITORY = Path(__file__).resolve().parents[2]
GRAFANA = REPOSITORY / "deploy" / "grafana"
TARGET_LABELS = {"job", "instance", "role"}
"""What Prometheus adds to each series of deploy/prometheus.yml."""

Labels = dict[str, set[str]]
"""Label names by the name of the sample."""


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    variables = {"ROLEMESH_API_TOKEN_FILE": "./api-token", "ROLEMESH_API_HOST": "0.0.0.0"}
    resolved = resolve(BASE_FILE, variables=variables, profiles=("monitoring",))
    found: dict[str, Any] = resolved["services"]
    return found


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "rolemesh.json").read_text())
    return loaded


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["query"]["query"]


def told(text: str) -> Labels:
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def told_by_a_service() -> Labels:
    server = ServiceServer(ToyRole(), ServiceConfig(role="toy", metrics_port=0))
    await server.start()
    try:
        # Series with labels begin with the first call.
        with server.metrics.call("/rolemesh.v1.ValueService/ComputeValues"):
            server.metrics.reward_request("helpful", "ok", 0.1)
        assert server.metrics_page is not None
        async with httpx.AsyncClient() as client:
            page = f"http://127.0.0.1:{server.metrics_page.port}/metrics"
            return told((await client.get(page, follow_redirects=True)).text)
    finally:
        await server.stop()


async def told_by_the_coordinator(folder: Path) -> Labels:
    store = MemoryStateStore()
    await fill_store(store, "live-1", folder, num_steps=2, is_live=True)
    async with client_of(StoreOperations(store)) as client:
        await client.get("/api/v1/runs")
        return told((await client.get("/metrics")).text)


async def test_every_query_of_the_dashboard_asks_for_what_our_processes_tell(
    dashboard: dict[str, Any], tmp_path: Path
) -> None:
    known = {**await told_by_a_service(), **await told_by_the_coordinator(tmp_path), "up": set()}
    asked = set()
    for query in queries(dashboard):
        names = re.findall(r"\b(?:rolemesh_\w+|up)\b", query)
        assert names, query
        allowed = set(TARGET_LABELS)
        for name in names:
            assert name in known, f"{query}: nobody tells {name}"
            allowed |= known[name]
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        for group in re.findall(r"\bby \(([^)]*)\)", query):
            labels |= {label.strip() for label in group.split(",")}
        assert labels <= allowed, query
        asked |= set(names)
    # Nothing that we tell of runs, calls and rewards is left out.
    ours = {re.sub(r"_(bucket|count|sum|created|total)$", "", n) for n in known if "rolemesh_" in n}
    shown = {re.sub(r"_(bucket|count|sum|created|total)$", "", name) for name in asked}
    assert ours <= shown


def test_every_panel_asks_the_provisioned_source(dashboard: dict[str, Any]) -> None:
    folder = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    wanted = {"type": source["type"], "uid": source["uid"]}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == wanted
            assert all(target["datasource"] == wanted for target in panel["targets"])
    assert dashboard["templating"]["list"][0]["datasource"] == wanted
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_do_not_lie_upon_each_other(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_grafana_finds_what_it_is_given_and_lets_nobody_in(services: dict[str, Any]) -> None:
    grafana = services["grafana"]
    mounted = {target: source for target, (source, _) in mounts(grafana).items()}
    (provider,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "dashboards" / "rolemesh.yml").read_text()
    )["providers"]
    assert mounted[provider["options"]["path"]] == str(GRAFANA / "dashboards")
    assert mounted["/etc/grafana/provisioning"] == str(GRAFANA / "provisioning")
    environment = grafana["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (GRAFANA / "dashboards" / home.name).is_file()
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    for name in ("grafana", "prometheus"):
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"]), "not pinned"


def test_prometheus_shows_the_coordinator_a_token_that_may_look_alone(
    services: dict[str, Any],
) -> None:
    scrape = yaml.safe_load((REPOSITORY / "deploy" / "prometheus.yml").read_text())
    (job,) = [job for job in scrape["scrape_configs"] if job["job_name"] == "coordinator"]
    environment = services["coordinator"]["environment"]
    # The one that allows everything is none of its business.
    assert "secrets" not in services["prometheus"]
    place = Path(job["authorization"]["credentials_file"])
    for name in ("prometheus", "coordinator"):
        assert mounts(services[name])[str(place.parent)] == ("read_token", False)
    (recipe, *_) = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    api = load_recipe([recipe], environment=environment).api
    assert job["static_configs"] == [{"targets": [f"coordinator:{api.http_port}"]}]
    assert api.host == "0.0.0.0"
    assert api.tokens == TokenFiles(read=place)
    assert str(api.token_file) == "/run/secrets/rolemesh_api_token"
