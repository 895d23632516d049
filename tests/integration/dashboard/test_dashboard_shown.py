"""What the dashboard shows of a run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.browser import drawn_after_ms
from support.dashboard_pages import (
    HISTORY_STEPS,
    is_painted,
    plotted,
    records_of,
)
from support.page_server import PageServer
from support.tiny_images import noise, png

from rolemesh.coordinator.state.store import RunRecord, RunStream
from rolemesh.engine.images.prompt_images import data_url
from rolemesh.v1 import coordinator_pb2

HOSTILE = (
    '<img src=x onerror="window.stolen=1"><script>window.stolen=1</script></pre>'
    "<iframe srcdoc='<script>parent.stolen=1</script>'></iframe>\u202e javascript:alert(1) {{7*7}}"
)

ALERTS = [
    {"level": "critical", "rule": "NOT_FINITE", "text": "No number: loss.", "remedy": "Stop."},
    {"level": "warning", "rule": "ROLE_WAITS", "text": "critic waits for actor 63 % of the time.",
     "remedy": "Give the actor more devices."},
]  # fmt: skip

TRAINED, SHARED, UNTRAINED = (
    coordinator_pb2.CALL_USE_TRAINED,
    coordinator_pb2.CALL_USE_SHARED,
    coordinator_pb2.CALL_USE_UNTRAINED,
)


@pytest.mark.parametrize("run", ["history", "begun"])
def test_every_panel_is_drawn_without_a_complaint(
    looked_at: Any, server: PageServer, history: str, run: str
) -> None:
    page = looked_at(run)
    painted = is_painted(page, "figure.chart") + is_painted(page, "#devices")
    assert len(painted) > 15
    assert all(painted)
    nodes = page.request.get(f"{server.url}api/v1/runs/{run}/dataflow").json()["nodes"]
    begun = [node for node in nodes if node["ready_s"] is not None]
    assert page.locator("#flow .call").count() == len(begun) > 7
    assert page.locator("#numbers .tile").count() == 8
    assert page.locator("#samples .token").count() >= 12
    expect(page.locator("#logs-body")).to_contain_text("coordinator[0] line 199")
    # Services of other runs are not shown: those of an ended one have gone.
    expect(page.locator("#mesh tbody tr")).to_have_count(0 if run == "history" else 6)
    expect(page.locator("#live")).to_have_text("ended" if run == "history" else "live")


def test_curves_agree_with_the_metrics_file(
    looked_at: Any, server: PageServer, history: str
) -> None:
    page = looked_at(history)
    records = records_of(server, history)
    for title, lines in {
        "Reward": {"mean": "reward/mean"},
        "KL to reference": {"KL": "kl/mean"},
        "Gradient norm": {"actor": "actor/grad_norm", "critic": "critic/grad_norm"},
        "Held-out score": {"score": "held_out/score"},
        "Time by phase": {"update actor": "time/update_actor", "generate": "time/generate"},
    }.items():
        shown = plotted(page, title)
        for label, name in lines.items():
            has = [record for record in records if name in record]
            assert shown[""] == [record["step"] for record in has]
            # The same float64 through JSON: not a digit is lost.
            assert shown[label] == [record[name] for record in has]


LOSSES = [
    {"step": 0.0, "held_out/loss": 0.75, "held_out/preference_accuracy": 0.5},
    {"step": 1.0, "loss": 0.5, "preference_accuracy": 0.5},
    {"step": 2.0, "loss": 0.25, "preference_accuracy": 1.0,
     "held_out/loss": 0.375, "held_out/preference_accuracy": 0.75},
]  # fmt: skip


def test_a_run_without_a_score_shows_its_held_out_loss_from_the_start(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    record = RunRecord(
        run_id="dpo",
        name="dpo",
        num_steps=2,
        step=2,
        directory=str(tmp_path),
        created_at=1.0,
        updated_at=2.0,
    )
    server.call(server.store.create_run(record))
    for metrics in LOSSES:
        server.call(server.store.append_metrics("dpo", metrics))
    # It has metrics alone: what else the page asks for is not found.
    page = opened("dpo", is_quiet=False)
    tiles = page.locator("#numbers .tile")
    expect(tiles.filter(has_text="Held-out loss").locator("b")).to_have_text("0.375")
    expect(tiles.filter(has_text="Held-out accuracy").locator("b")).to_have_text(re.compile("75"))
    expect(page.locator('figure[data-chart="Held-out score"]')).to_have_count(0)
    for title, metric in {"Loss": "loss", "Pairs told apart": "preference_accuracy"}.items():
        shown = plotted(page, title)
        assert shown[""] == [0.0, 1.0, 2.0]
        held_out = [value for value in shown["held out"] if not math.isnan(value)]
        assert held_out == [LOSSES[0][f"held_out/{metric}"], LOSSES[2][f"held_out/{metric}"]]


def test_other_metrics_are_shown_on_request(looked_at: Any, server: PageServer) -> None:
    page = looked_at("live")
    page.get_by_text("All other metrics").click()
    page.get_by_label("Filter other metrics").fill("coordinator/c")
    expect(page.locator('.more figure[data-chart="coordinator/calls"]')).to_be_visible()
    expect(page.locator(".more figure")).to_have_count(1)
    made = server.call(server.store.get_run("live")).step
    assert plotted(page, "coordinator/calls")["coordinator/calls"] == [24.0] * made


def test_runs_are_compared_in_colours_of_their_own(opened: Any, history: str) -> None:
    page = opened("live")
    page.get_by_text("Compare").click()
    page.locator("#compare-runs input[value=history]").check()
    page.keyboard.press("Escape")
    expect(page.locator("#compare-runs")).to_be_hidden()
    legend = page.locator('figure[data-chart="Reward"] .legend')
    expect(legend).to_contain_text("history")
    colours = legend.locator(".key").evaluate_all(
        "(keys) => keys.map((key) => getComputedStyle(key).borderTopColor)"
    )
    assert len(set(colours)) == 2
    assert "compare=history" in page.url
    assert set(plotted(page, "Reward")) == {"", "live", "history"}


def test_charts_are_read_by_arrow_keys(looked_at: Any, history: str) -> None:
    page = looked_at(history)
    plot = page.locator('figure[data-chart="KL to reference"] .plot')
    assert "newest" in (plot.get_attribute("aria-label") or "")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    cursors = page.locator("figure.chart:not([hidden]) .cursor").evaluate_all(
        "(all) => new Set(all.map((one) => one.dataset.at)).size"
    )
    assert cursors == 1
    expect(plot.locator(".cursor")).to_have_attribute("data-at", "step 2")
    page.keyboard.press("End")
    expect(plot.locator(".cursor")).to_have_attribute("data-at", f"step {HISTORY_STEPS:,}")
    page.keyboard.press("Enter")
    expect(page.locator(".flow-summary")).to_contain_text(f"Step {HISTORY_STEPS:,}: ")


def test_the_critical_path_is_marked_in_the_flow_and_told_in_words(
    looked_at: Any, history: str
) -> None:
    page = looked_at(history)
    path = page.locator("#flow .path li")
    assert page.locator("#flow .call.critical").count() == path.count()
    expect(path.last).to_contain_text("actor.publish_weights")
    bar = page.locator("#flow .call.critical").last
    bar.focus()
    expect(page.locator("#tip")).to_contain_text("on the critical path")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_a_step_is_chosen_and_followed_again(looked_at: Any, server: PageServer) -> None:
    page = looked_at("live")
    page.get_by_role("spinbutton", name="step").fill("3")
    page.keyboard.press("Enter")
    expect(page.locator(".flow-summary")).to_contain_text("Step 3: ")
    page.keyboard.press("Tab")
    page.keyboard.press("]")
    expect(page.locator(".flow-summary")).to_contain_text("Step 4: ")
    page.keyboard.press("f")
    made = server.call(server.store.get_run("live")).step
    expect(page.locator(".flow-summary")).to_contain_text(f"Step {made + 1} in progress")


def test_alerts_are_shown_with_their_remedies(browser: Browser, server: PageServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("**/alerts", lambda route: route.fulfill(json={"alerts": ALERTS}))
    page.goto(f"{server.url}?run=live")
    drawn_after_ms(page)
    shown = page.locator("#alerts .alert")
    assert shown.count() == 2
    expect(shown.nth(0)).to_contain_text("Critical")
    expect(shown.nth(1)).to_contain_text("waits for actor 63 % of the time. Give the actor more")
    context.close()


def test_hostile_completions_stay_text(
    browser: Browser, server: PageServer, tmp_path: Path, opened: Any
) -> None:
    server.fill("hostile", tmp_path, num_steps=2, with_leases=False)
    sample = coordinator_pb2.Sample(
        row=0, prompt=HOSTILE, completion=HOSTILE, answer=HOSTILE, reward=1.0,
        token_ids=[1, 2], logprobs=[-0.1, -9.0], loss_mask=[True, False], advantages=[1.0, 0.0],
    )  # fmt: skip
    written = coordinator_pb2.ListSamplesResponse(step=3, samples=[sample]).SerializeToString()
    server.call(server.store.append_entry("hostile", RunStream.SAMPLES, written))
    page = opened("hostile")
    blocks = page.locator("#samples .text-block pre")
    assert [blocks.nth(place).text_content() for place in range(3)] == [HOSTILE] * 3
    assert page.locator("#samples img, #samples iframe, #samples script").count() == 0
    assert page.evaluate("window.stolen") is None


def test_the_images_of_a_prompt_are_shown_or_named(
    browser: Browser, server: PageServer, tmp_path: Path, opened: Any
) -> None:
    server.fill("seeing", tmp_path, num_steps=2, with_leases=False)
    url = data_url(png(noise(width=20, height=10)))
    here = coordinator_pb2.SampledImage(sha256="aa" * 32, num_bytes=600, url=url)
    there = coordinator_pb2.SampledImage(sha256="aa" * 32, num_bytes=600)
    large = coordinator_pb2.SampledImage(sha256="bb" * 32, num_bytes=9_000_000)
    # From a service of any make: nothing is asked of another host, and no script runs.
    hostile = coordinator_pb2.SampledImage(
        sha256=HOSTILE, num_bytes=1, url="http://127.0.0.1:9/seen.png"
    )
    samples = [
        coordinator_pb2.Sample(row=0, prompt="Which?", completion="a", images=[here, large]),
        coordinator_pb2.Sample(row=1, prompt="Which?", completion="b", images=[there, hostile]),
        coordinator_pb2.Sample(row=2, prompt="Which?", completion="c", has_large_images=True),
        coordinator_pb2.Sample(row=3, prompt="Hi", completion="d"),
    ]
    written = coordinator_pb2.ListSamplesResponse(step=3, samples=samples)
    server.call(server.store.append_entry("seeing", RunStream.SAMPLES, written.SerializeToString()))
    page = opened("seeing")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    images = page.locator("#samples .prompt-images img")
    names = page.locator("#samples .prompt-images figcaption")

    def chosen(row: int) -> None:
        page.locator(f"#samples .sample-item[data-row='{row}']").click()

    chosen(0)
    expect(images).to_have_count(1)
    assert images.evaluate("image => image.decode().then(() => image.naturalWidth)") == 20
    expect(names.nth(1)).to_have_text("image 2 of 2, bbbbbbbbbbbb, 9,000,000 bytes")
    chosen(1)
    expect(images).to_have_count(1)
    expect(images).to_have_attribute("src", url)
    expect(names).to_have_count(2)
    chosen(2)
    expect(page.locator("#samples .sample-detail")).to_contain_text("too large to be shown")
    chosen(3)
    expect(page.locator("#samples .prompt-images")).to_have_count(0)
    assert not any("seen.png" in one for one in asked)
    assert page.evaluate("window.stolen") is None


def branch(row: int, number: int, calls: list[dict[str, Any]], **more: Any) -> Any:
    """A row of a session of two branches; `calls` say how many tokens, and what becomes of them."""
    tokens: list[bool] = []
    for place, call in enumerate(calls):
        tokens += [False] * (call["num_added_tokens"] if place else 0)
        tokens += [call["use"] == TRAINED] * call["num_sampled_tokens"]
    return coordinator_pb2.Sample(
        row=row, prompt="What is 2 + 2?", completion=f"way {number}", reward=float(number),
        token_ids=range(len(tokens)), logprobs=[-0.1] * len(tokens), loss_mask=tokens,
        session=coordinator_pb2.SampledSession(
            prompt_id=7, sample_index=1, branch=number, num_branches=2, attempts=2,
            calls=[coordinator_pb2.SampledCall(**call) for call in calls], **more,
        ),
    )  # fmt: skip


def call_of(number: int, added: int, sampled: int, use: int) -> dict[str, Any]:
    counts = {"num_added_tokens": added, "num_sampled_tokens": sampled}
    return {"number": number, **counts, "use": use}


def test_rows_of_one_session_stand_together_and_say_what_they_share(
    server: PageServer, tmp_path: Path, opened: Any
) -> None:
    server.fill("agents", tmp_path, num_steps=2, with_leases=False)
    judge = coordinator_pb2.SampledCall(**call_of(3, 4, 5, UNTRAINED))
    first = branch(
        0, 0, [call_of(0, 9, 2, TRAINED), call_of(1, 1, 3, TRAINED)],
        left_out=[judge], log=f"looked it up\n{HOSTILE}",
    )  # fmt: skip
    second = branch(
        4, 1, [call_of(0, 9, 2, SHARED), call_of(2, 2, 1, UNTRAINED), call_of(4, 1, 2, TRAINED)]
    )
    other = coordinator_pb2.Sample(row=2, prompt="What is 3 + 3?", completion="6", reward=2.0)
    written = coordinator_pb2.ListSamplesResponse(step=3, samples=[first, other, second])
    server.call(server.store.append_entry("agents", RunStream.SAMPLES, written.SerializeToString()))
    page = opened("agents")

    items = page.locator("#samples .sample-item")
    rows = "(all) => all.map((one) => Number(one.dataset.row))"
    assert items.evaluate_all(rows) == [0, 4, 2]
    # A row brings its session with it.
    page.get_by_label("Order of the samples").select_option("best")
    assert items.evaluate_all(rows) == [2, 0, 4]
    page.get_by_label("Order of the samples").select_option("worst")
    assert items.evaluate_all(rows) == [0, 4, 2]
    expect(items.nth(1)).to_contain_text("branch 2 of 2")
    expect(items.nth(1)).to_have_class(re.compile("follows"))

    turns = page.locator("#samples .tokens .turn-name")
    expect(turns).to_have_text(["turn 1, call 0", "not trained", "turn 2, call 1"])
    page.locator("#samples .sample-item[data-row='4']").click()
    expect(turns).to_have_text([
        "turn 1, call 0: trained in row 0", "not trained",
        "turn 2, call 2: kept out of training", "not trained", "turn 3, call 4",
    ])  # fmt: skip
    cells = page.locator("#samples .tokens .token")
    classes = cells.evaluate_all("(all) => all.map((one) => one.classList.contains('foreign'))")
    assert classes == [True] * 6 + [False] * 2
    cells.first.focus()
    expect(page.locator("#tip")).to_contain_text("trained in row 0: takes no part in the loss of")

    # Each call of the session once, and its log, beside each of its rows.
    lines = page.locator("#samples .session-calls tbody tr")
    assert lines.all_inner_texts() == [
        "0\t2\t0, 4\ttrained in row 0",
        "1\t3\t0\ttrained in row 0",
        "2\t1\t4\tkept out of training",
        "3\t5\tnone\tkept out of training",
        "4\t2\t4\ttrained in row 4",
    ]
    expect(page.locator("#samples .session-log pre")).to_have_text(f"looked it up\n{HOSTILE}")
    assert page.locator("#samples img, #samples iframe, #samples script").count() == 0
    expect(page.locator("#samples .facts")).to_contain_text("prompt 7, sample 1")
    # A row of no agent has nothing of it.
    items.nth(2).click()
    assert page.locator("#samples .session-calls, #samples .session-log").count() == 0


def test_where_the_policy_answers_is_shown_while_the_run_goes_on(
    opened: Any, server: PageServer
) -> None:
    record = server.call(server.store.get_run("begun"))
    name = next(iter(record.services))
    url = "http://127.0.0.1:8000/v1"
    services = {**record.services, name: {**record.services[name], "endpoint": url}}
    server.call(server.store.update_run("begun", services=services))
    page = opened("begun")
    expect(page.locator("#mesh .endpoint").filter(has_text=f"answers at {url}")).to_have_count(1)
    server.call(server.store.update_run("begun", services=record.services))


def test_health_of_outside_rewards_is_shown(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    server.fill("judged", tmp_path, num_steps=2, with_leases=False)
    health = {
        "reward/helpful/mean": 0.25, "reward/helpful/latency_p99_seconds": 1.5,
        "reward/helpful/errors": 3.0, "reward/short/mean": -0.5,
    }  # fmt: skip
    server.call(server.store.append_metrics("judged", {"step": 3, **health}))
    page = opened("judged")
    rows = page.locator("#rewards tbody tr")
    assert rows.all_inner_texts() == ["helpful\t0.25\t1.50 s\t3", "short\t-0.5\t\u2013\t\u2013"]
    expect(rows.first.locator(".trouble")).to_have_text("3")


def test_tokens_are_coloured_by_log_prob_and_foreign_ones_are_hatched(
    looked_at: Any, history: str
) -> None:
    page = looked_at(history)
    cells = page.locator("#samples .tokens .token")
    assert cells.count() == 12
    expect(cells.last).to_have_class(re.compile("foreign"))
    # A heading stands before each turn of the policy, and before what is not trained.
    turns = page.locator("#samples .tokens .turn-name")
    expect(turns).to_have_text(["turn 1", "not trained"])
    cells.first.focus()
    expect(page.locator("#tip")).to_contain_text("log-prob")
    expect(page.locator("#tip")).to_contain_text("advantage")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("token 2 of 12")
