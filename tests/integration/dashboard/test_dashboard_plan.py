"""The panel of a run's plan: predicted beside measured, and nothing where there is no plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from support.page_server import PageServer
from support.planned_runs import PLAN, planned_recipe, write_planned_run

from rolemesh.coordinator.api.reads.plans import kept_plan
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.v1 import coordinator_pb2

DASH, MINUS = "\u2013", "\u2212"


def cells(page: Page, region: str) -> list[list[str]]:
    table = page.get_by_role("region", name=region).locator("table")
    rows: list[list[str]] = table.evaluate(
        "(table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows[1:]


def test_predicted_and_measured_seconds_stand_beside_each_other(
    opened: Any, server: PageServer
) -> None:
    server.call(write_planned_run(server.store, "planned"))
    server.call(server.store.update_run("planned", state=RunState.SUCCEEDED))
    page = opened("planned", is_quiet=False)
    panel = page.locator("#plan")
    expect(panel).to_contain_text(
        "A step: planned 6.00 s, measured 5.00 s (median of 3 steps), error +20 %."
    )
    expect(panel).to_contain_text("8 rows of 30 tokens: 500 tokens a step, measured 400.")
    expect(panel).to_contain_text("Predicted: a calibration of h100, off by 12 %.")
    assert cells(page, "Planned calls") == [
        ["actor.generate", "actor", "3.00 s", "2.00 s", "+50 %", ""],
        ["critic.compute_values", "critic", "300 ms", "600 ms", f"{MINUS}50 %", ""],
        ["reward.compute_reward", "no device", "500 ms", DASH, DASH, ""],
        ["actor.update", "actor", "1.60 s", "1.60 s", "0 %", ""],
        ["reference.compute_logprobs", "not planned", DASH, "200 ms", DASH, ""],
        ["step", "", "6.00 s", "5.00 s", "+20 %", ""],
    ]
    assert cells(page, "Planned pools") == [
        ["actor", "2 h100: actor 1-1-2 fsdp 2", "cuda:0: actor 1-1-1 differs"],
        ["critic", "1 h100: critic 1-1-1", "cuda:1: critic 1-1-1"],
        ["judges", DASH, "cpu: reference 1-1-1, reward 1-1-1 differs"],
    ]
    # Each bar lies where its call does in the planned step of six seconds.
    bars = panel.locator(".planned-lane i").evaluate_all(
        "(bars) => bars.map((bar) => [bar.style.left, bar.style.width].map(Number.parseFloat))"
    )
    tasks = PLAN["tasks"]
    assert len(bars) == len(tasks)
    for (left, width), task in zip(bars, tasks, strict=True):
        assert abs(left - 100 * task["start_s"] / 6) < 0.01
        assert abs(width - 100 * (task["end_s"] - task["start_s"]) / 6) < 0.01
    page.get_by_role("link", name="Plan").click()
    expect(page).to_have_url(f"{server.url}?run=planned#plan")


def test_a_run_without_a_plan_shows_nothing_of_one(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    server.fill("left", tmp_path, num_steps=4, with_leases=False)
    server.call(server.store.update_run("left", plan=kept_plan(planned_recipe())))
    page = opened("live")
    expect(page.locator("#plan")).to_be_hidden()
    expect(page.get_by_role("link", name="Plan")).to_have_count(0)
    # The panel goes with the run that it tells of.
    page.locator("#run").select_option("left")
    expect(page.locator("#plan .planned-lane i").first).to_be_visible()
    page.locator("#run").select_option("live")
    expect(page.locator("#plan")).to_be_hidden()


def test_the_panel_follows_the_steps(opened: Any, server: PageServer) -> None:
    server.call(write_planned_run(server.store, "goes-on", num_steps=2))
    page = opened("goes-on", is_quiet=False)
    expect(page.locator("#plan")).to_contain_text("planned 6.00 s, measured after the third step.")
    record = {"step": 3, "time/step": 12.0, "tokens": 50.0}
    server.call(server.store.append_metrics("goes-on", record))
    graph = json.dumps({"step": 3, "nodes": []}).encode()
    server.call(server.store.append_entry("goes-on", RunStream.GRAPHS, graph, step=3))
    made = coordinator_pb2.RunEvent(step_made=coordinator_pb2.StepMade(metrics=record))
    server.tell("goes-on", made, step=3)
    expect(page.locator("#plan")).to_contain_text(
        f"measured 12.0 s (median of 1 step), error {MINUS}50 %."
    )


def test_a_pool_that_is_not_as_planned_is_told(looked_at: Any) -> None:
    page = looked_at("begun")
    roles = {"planned_roles": ["actor 1-1-2"], "roles": ["actor 1-1-2"]}
    cases = [
        ({"planned_devices": "2 h100", "devices": ["cuda:4", "cuda:5"], **roles}, True),
        ({"planned_devices": "4 cpu", "devices": ["cpu"], **roles}, True),
        ({"planned_devices": "2 h100", "devices": ["cuda:4"], **roles}, False),
        ({"planned_devices": "1 h100", "devices": ["cpu"], **roles}, False),
        ({"planned_devices": "1 cpu", "devices": ["cuda:0"], **roles}, False),
        ({"planned_devices": "1 cpu", "devices": [], **roles}, False),
        ({"planned_devices": "", "devices": ["cuda:0"], **roles}, False),
        (
            {"planned_devices": "4 cpu", "devices": ["cpu"], **roles, "roles": ["actor 1-2-1"]},
            False,
        ),
    ]
    found = page.evaluate(
        "async (pools) => pools.map((await import('/plan.js')).isAsPlanned)",
        [pool for pool, _ in cases],
    )
    assert found == [is_same for _, is_same in cases]


def test_a_hostile_plan_stays_text_and_goes_with_its_run(opened: Any, server: PageServer) -> None:
    hostile = '<img src=x onerror="window.stolen=1">'
    server.call(write_planned_run(server.store, "hostile-plan"))
    pools = {hostile: {"devices": hostile, "roles": {hostile: hostile}}, **PLAN["pools"]}
    kept = {"predicted": {**PLAN, "basis": hostile, "pools": pools}, "pools": {}}
    server.call(server.store.update_run("hostile-plan", plan=kept))
    page = opened("hostile-plan", is_quiet=False)
    expect(page.locator("#plan-body")).to_contain_text(f"Predicted: {hostile}.")
    assert page.locator("#plan img").count() == 0
    assert page.evaluate("window.stolen") is None
    page.route("**/runs/live/plan", lambda route: route.fulfill(status=503, json={"title": "away"}))
    page.locator("#run").select_option("live")
    expect(page.locator("#plan")).to_be_hidden()
