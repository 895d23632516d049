from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.browser import BrowserMissingError, drawn_after_ms, open_browser, wait_for
from support.page_server import PageServer

from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.v1 import coordinator_pb2

PHONE = {"width": 390, "height": 844}
HISTORY_STEPS = 1000
LIVE_STEPS = 12

CONTRAST = 4.5
"""WCAG 2.2, 1.4.3: least contrast of text that is not large, level AA."""

HOSTILE = (
    '<img src=x onerror="window.stolen=1"><script>window.stolen=1</script></pre>'
    "<iframe srcdoc='<script>parent.stolen=1</script>'></iframe>\u202e javascript:alert(1) {{7*7}}"
)

ALERTS = [
    {"level": "critical", "rule": "NOT_FINITE", "text": "No number: loss.", "remedy": "Stop."},
    {"level": "warning", "rule": "ROLE_WAITS", "text": "critic waits for actor 63 % of the time.",
     "remedy": "Give the actor more devices."},
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: its loop would be in the way of tests that are coroutines.
    try:
        with open_browser() as opened:
            yield opened
    except BrowserMissingError as missing:
        pytest.fail(str(missing))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with PageServer() as running:
        folder = tmp_path_factory.mktemp("runs")
        running.fill("history", folder / "history", num_steps=HISTORY_STEPS, with_leases=False)
        # Tests make steps of one, and leave the other where it is.
        for run in ("live", "begun"):
            running.fill(run, folder / run, num_steps=LIVE_STEPS, is_live=True)
        yield running


class Watched:
    """A page, and all that it complained about."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.goto(url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


@pytest.fixture
def opened(browser: Browser, server: PageServer) -> Iterator[Any]:
    """Opens the page of a run; in the end it must not have complained."""
    pages: list[Watched] = []

    def open_run(run: str, *, is_quiet: bool = True, **context: Any) -> Page:
        watched = Watched(browser, f"{server.url}?run={run}", **context)
        drawn_after_ms(watched.page)
        if is_quiet:
            pages.append(watched)
        return watched.page

    yield open_run
    complaints = [each.complaints for each in pages]
    for context in list(browser.contexts):
        context.close()
    assert complaints == [[]] * len(pages)


def plotted(page: Page, title: str) -> dict[str, list[float]]:
    """What a chart plots, by line, read from its table; oldest first, "" holds the x axis."""
    figure = page.locator(f'figure[data-chart="{title}"]')
    button = figure.get_by_role("button")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    rows = figure.locator("table").evaluate(
        "(table) => [...table.rows].map((row) => [...row.cells].map("
        "(cell) => cell.dataset.value ?? cell.textContent))"
    )
    heads, body = rows[0], rows[:0:-1]
    columns = {head: [float(row[place]) for row in body] for place, head in enumerate(heads[1:], 1)}
    return {"": [float(row[0].replace(",", "")) for row in body], **columns}


def records_of(server: PageServer, run_id: str) -> list[dict[str, float]]:
    directory = server.call(server.store.get_run(run_id)).directory
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def is_painted(page: Page, selector: str) -> list[bool]:
    """Whether something is drawn on each canvas that is shown."""
    return page.locator(f"{selector} canvas").evaluate_all(  # type: ignore[no-any-return]
        "(all) => all.filter((one) => one.offsetParent !== null).map((one) => one"
        ".getContext('2d').getImageData(0, 0, one.width, one.height).data.some((v) => v > 0))"
    )


# --- what is shown ---


@pytest.mark.parametrize("run", ["history", "begun"])
def test_every_panel_is_drawn_without_a_complaint(
    opened: Any, server: PageServer, run: str
) -> None:
    page = opened(run)
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


def test_curves_agree_with_the_metrics_file(opened: Any, server: PageServer) -> None:
    page = opened("history")
    records = records_of(server, "history")
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


def test_other_metrics_are_shown_on_request(opened: Any, server: PageServer) -> None:
    page = opened("live")
    page.get_by_text("All other metrics").click()
    page.get_by_label("Filter other metrics").fill("coordinator/c")
    expect(page.locator('.more figure[data-chart="coordinator/calls"]')).to_be_visible()
    expect(page.locator(".more figure")).to_have_count(1)
    made = server.call(server.store.get_run("live")).step
    assert plotted(page, "coordinator/calls")["coordinator/calls"] == [24.0] * made


def test_smoothing_is_an_unbiased_moving_mean(opened: Any) -> None:
    page = opened("live")
    values, weight = [4.0, -1.0, 2.5, 0.0, 8.0], 0.7
    shown = page.evaluate(
        "async ([values, weight]) => (await import('/series.js')).smoothed(values, weight)",
        [values, weight],
    )
    # The definition as a weighted mean: weights of older values shrink by the factor.
    for end, smooth in enumerate(shown, 1):
        weights = [weight ** (end - 1 - place) for place in range(end)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(smooth, mean, rel_tol=1e-12)


def test_thinned_lines_keep_every_peak(opened: Any) -> None:
    page = opened("live")
    points = page.evaluate(
        """async () => {
          const values = Array.from({ length: 100000 }, (_, i) => Math.sin(i / 900));
          values[77777] = 50; values[12345] = -50;
          const xs = values.map((_, i) => i);
          return (await import('/series.js')).thinned(xs, values, (x) => x / 250, (y) => y);
        }"""
    )
    heights = [y for _, y in points]
    assert max(heights) == 50
    assert min(heights) == -50
    assert len(points) <= 2 * 401


def test_runs_are_compared_in_colours_of_their_own(opened: Any) -> None:
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


def test_the_critical_path_is_marked_in_the_flow_and_told_in_words(opened: Any) -> None:
    page = opened("history")
    path = page.locator("#flow .path li")
    assert page.locator("#flow .call.critical").count() == path.count()
    expect(path.last).to_contain_text("actor.publish_weights")
    bar = page.locator("#flow .call.critical").last
    bar.focus()
    expect(page.locator("#tip")).to_contain_text("on the critical path")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_a_step_is_chosen_and_followed_again(opened: Any, server: PageServer) -> None:
    page = opened("live")
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


def test_tokens_are_coloured_by_log_prob_and_foreign_ones_are_hatched(opened: Any) -> None:
    page = opened("history")
    cells = page.locator("#samples .tokens .token")
    assert cells.count() == 12
    expect(cells.last).to_have_class(re.compile("foreign"))
    cells.first.focus()
    expect(page.locator("#tip")).to_contain_text("log-prob")
    expect(page.locator("#tip")).to_contain_text("advantage")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("token 2 of 12")


# --- what happens ---


def test_a_step_appears_when_it_is_made(opened: Any, server: PageServer) -> None:
    page = opened("live")
    expect(page.locator("#live")).to_have_text("live")
    made = server.make_step("live")
    expect(page.locator("#progress-text")).to_contain_text(f"step {made} of")
    newest = records_of(server, "live")[-1]
    wait_for(lambda: plotted(page, "Reward")[""][-1] == made, "the new step is plotted")
    assert plotted(page, "Reward")["mean"][-1] == newest["reward/mean"]


def test_a_cut_is_shown_and_no_step_is_missed(opened: Any, server: PageServer) -> None:
    # A refused connection is a line of the browser's console that no page can prevent.
    page = opened("live", is_quiet=False)
    live = page.locator("#live")
    expect(live).to_have_text("live")
    server.stop()
    try:
        expect(live).to_contain_text("disconnected", timeout=15_000)
        for _ in range(3):
            made = server.make_step("live")
    finally:
        server.start()
    expect(live).to_have_text("live", timeout=30_000)
    wait_for(lambda: plotted(page, "Reward")[""][-1] == made, "steps made meanwhile are plotted")
    shown = plotted(page, "Reward")
    records = records_of(server, "live")
    assert shown[""] == [record["step"] for record in records] == list(range(1, made + 1))
    assert shown["mean"] == [record["reward/mean"] for record in records]


def test_a_read_that_fails_when_a_run_is_opened_does_not_keep_the_page_from_watching_it(
    browser: Browser, server: PageServer
) -> None:
    page = browser.new_context().new_page()
    problem = {"title": "Unavailable", "detail": "the store is away", "reason": "STORE_AWAY"}
    page.route("**/alerts", lambda route: route.fulfill(status=503, json=problem))
    page.goto(f"{server.url}?run=live")
    expect(page.locator("#live")).to_have_text("live")
    made = server.make_step("live")
    wait_for(lambda: plotted(page, "Reward")[""][-1] == made, "the new step is plotted")
    page.context.close()


def test_a_page_that_was_away_for_longer_than_events_are_kept_begins_anew(
    opened: Any, server: PageServer
) -> None:
    page = opened("live", is_quiet=False)
    expect(page.locator("#live")).to_have_text("live")
    asked: list[str] = []

    def refuse_resuming(route: Route) -> None:
        asked.append(route.request.headers.get("last-event-id", ""))
        if asked[-1]:
            problem = {"title": "Gone", "detail": "no longer kept", "reason": "EVENTS_EXPIRED"}
            route.fulfill(status=410, json=problem)
        else:
            route.continue_()

    page.route("**/events", refuse_resuming)
    server.stop()
    try:
        expect(page.locator("#live")).to_contain_text("disconnected", timeout=15_000)
        made = server.make_step("live")
    finally:
        server.start()
    expect(page.locator("#live")).to_have_text("live", timeout=30_000)
    wait_for(lambda: plotted(page, "Reward")[""][-1] == made, "the missed step is plotted")
    assert plotted(page, "Reward")[""] == list(range(1, made + 1))
    assert asked[0] != ""
    assert asked[-1] == ""


def test_steps_that_are_made_again_replace_what_they_were(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    record = server.fill("again", tmp_path, num_steps=6, is_live=True, with_leases=False)
    page = opened("again")
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#events-body li")).not_to_have_count(0)
    # The run resumed from a checkpoint of step 3.
    server.call(server.store.update_run("again", step=3))
    for _ in range(2):
        server.make_step("again")
    wait_for(lambda: plotted(page, "Reward")[""][-1] == 5, "the steps made again are plotted")
    lines = records_of(server, "again")
    assert record.step == 6
    assert plotted(page, "Reward") == {
        "": [1, 2, 3, 4, 5],
        "mean": [line["reward/mean"] for line in lines[:3] + lines[6:8]],
    }


def test_a_recovery_is_shown_while_it_lasts_and_no_step_is_shown_twice(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    server.fill("recovers", tmp_path, num_steps=6, is_live=True, with_leases=False)
    page = opened("recovers")
    expect(page.locator("#live")).to_have_text("live")
    cause = "actor rank 0 was killed by signal 9"
    died = coordinator_pb2.RunStateChange(
        state=coordinator_pb2.RUN_STATE_RECOVERING, failure=f"{cause}; actor is started again"
    )
    server.tell(
        "recovers",
        coordinator_pb2.RunEvent(state=died),
        state=RunState.RECOVERING,
        activity="initialize",
        recoveries=1,
    )
    expect(page.locator("#state")).to_have_text("recovering")
    expect(page.locator("#recovering-from")).to_have_text(f"from: {cause}; actor is started again")
    expect(page.locator("#recovering-for")).to_have_text(re.compile(r"for [1-9][0-9.]* s"))
    expect(page).to_have_title(re.compile("^recovering 6/12 recovers"))
    expect(page.locator("#recoveries")).to_be_hidden()
    # Only a checkpoint of step 3 is left.
    epoch = server.call(server.store.next_epoch("recovers"))
    server.call(server.store.rewind("recovers", 3, epoch=epoch))
    recovered = coordinator_pb2.Recovered(
        step=3, cause=cause, seconds=4.5, restarted=["actor"], lost_steps=3
    )
    server.tell("recovers", coordinator_pb2.RunEvent(recovered=recovered), step=3)
    wait_for(lambda: plotted(page, "Reward")[""] == [1, 2, 3], "steps taken back are gone")
    running = coordinator_pb2.RunStateChange(state=coordinator_pb2.RUN_STATE_RUNNING)
    server.tell("recovers", coordinator_pb2.RunEvent(state=running), state=RunState.RUNNING)
    for _ in range(2):
        server.make_step("recovers")
    wait_for(lambda: plotted(page, "Reward")[""][-1] == 5, "the steps made again are plotted")
    expect(page.locator("#recovering")).to_be_hidden()
    expect(page.locator("#recoveries")).to_have_text("recovered once")
    expect(page.locator("#events .event-recovered")).to_contain_text(
        f"recovered in 4.50 s from: {cause}; loaded anew: actor; 3 steps are made again"
    )
    chart = page.locator('figure[data-chart="Reward"] .plot')
    expect(chart).to_have_attribute("aria-label", re.compile("recovered after step 3"))
    lines = records_of(server, "recovers")
    expected = {
        "": [1, 2, 3, 4, 5],
        "mean": [line["reward/mean"] for line in lines[:3] + lines[6:8]],
    }
    assert plotted(page, "Reward") == expected
    # A reader who comes now hears of all of it, and sees the same.
    later = opened("recovers")
    expect(later.locator("#events .event-recovered")).to_have_count(1)
    expect(later.locator("#live")).to_have_text("live")
    wait_for(lambda: plotted(later, "Reward") == expected, "no step is there twice")


def test_a_run_that_is_resumed_after_its_end_is_followed_on(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    server.fill("resumed", tmp_path, num_steps=4, is_live=True, with_leases=False)
    failed = coordinator_pb2.RunStateChange(
        state=coordinator_pb2.RUN_STATE_FAILED, failure="no memory"
    )
    server.tell(
        "resumed",
        coordinator_pb2.RunEvent(state=failed),
        state=RunState.FAILED,
        failure="no memory",
    )
    page = opened("resumed", is_quiet=False)
    expect(page.locator("#live")).to_have_text("ended")
    expect(page.locator("#failure")).to_have_text("The run failed: no memory")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("dialog")).to_contain_text("Start run resumed again?")
    page.get_by_role("button", name="Start it again").click()
    # The coordinator of this test makes no runs.
    expect(page.locator("#failure")).to_contain_text(f"rolemesh train --resume {tmp_path}")
    starting = coordinator_pb2.RunStateChange(state=coordinator_pb2.RUN_STATE_STARTING)
    server.tell(
        "resumed", coordinator_pb2.RunEvent(state=starting), state=RunState.STARTING, failure=""
    )
    told = coordinator_pb2.Resumed(step=4, where="its journal: 4 steps")
    server.tell("resumed", coordinator_pb2.RunEvent(resumed=told), state=RunState.RUNNING)
    # The list of runs is read every ten seconds.
    expect(page.locator("#live")).to_have_text("live", timeout=15_000)
    expect(page.locator("#events .event-resumed")).to_contain_text("its journal: 4 steps")
    server.make_step("resumed")
    wait_for(lambda: plotted(page, "Reward")[""] == [1, 2, 3, 4, 5], "its next step is plotted")
    expect(page.locator("#failure")).to_be_hidden()


def test_a_coordinator_that_is_away_is_shown_also_of_an_ended_run(
    browser: Browser, tmp_path: Path
) -> None:
    with PageServer() as leaving:
        leaving.fill("over", tmp_path, num_steps=2)
        page = Watched(browser, leaving.url).page
        drawn_after_ms(page)
        expect(page.locator("#live")).to_have_text("ended")
        leaving.stop()
        expect(page.locator("#live")).to_have_text("ended, coordinator gone", timeout=15_000)
        leaving.start()
        expect(page.locator("#live")).to_have_text("ended", timeout=15_000)
        page.context.close()


def test_a_token_is_asked_for_once_and_kept_for_the_tab(browser: Browser, tmp_path: Path) -> None:
    with PageServer(token="opensesame") as guarded:
        guarded.fill("run", tmp_path, num_steps=2)
        context = browser.new_context()
        page = context.new_page()
        page.goto(guarded.url)
        expect(page.get_by_role("dialog")).to_contain_text("wants a token")
        page.get_by_role("textbox", name="Token").fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_timeout(200)
        expect(page.get_by_role("dialog")).to_contain_text("wants a token")
        page.get_by_role("textbox", name="Token").fill("opensesame")
        page.keyboard.press("Enter")
        drawn_after_ms(page)
        page.reload()
        drawn_after_ms(page)
        expect(page.get_by_role("dialog")).to_have_count(0)
        context.close()


def test_a_coordinator_without_runs_says_how_to_start_one(browser: Browser) -> None:
    with PageServer() as empty:
        watched = Watched(browser, empty.url)
        expect(watched.page.locator("#empty")).to_contain_text("rolemesh train recipes/")
        watched.context.close()
        assert watched.complaints == []


# --- what an operator does ---


def test_shortcuts_pause_resume_and_save(opened: Any, server: PageServer) -> None:
    page = opened("live")

    def record() -> Any:
        return server.call(server.store.get_run("live"))

    page.keyboard.press("p")
    wait_for(lambda: record().pause_requested, "the run is asked to pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.keyboard.press("p")
    wait_for(lambda: not record().pause_requested, "the run is asked to go on")
    page.keyboard.press("c")
    wait_for(
        lambda: server.call(server.store.read_entries("live", RunStream.CHECKPOINT_WISHES)),
        "a checkpoint is asked for",
    )


def test_stop_asks_again(opened: Any, server: PageServer, tmp_path: Path) -> None:
    server.fill("unwanted", tmp_path, num_steps=2, is_live=True, with_leases=False)
    page = opened("unwanted")

    def is_asked_to_stop() -> bool:
        return server.call(server.store.get_run("unwanted")).stop_requested

    page.keyboard.press("s")
    expect(page.get_by_role("dialog")).to_contain_text("Stop run unwanted?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert not is_asked_to_stop()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop the run").click()
    wait_for(is_asked_to_stop, "the run is asked to stop")
    expect(page.locator("#state")).to_have_text("stopping")
    server.call(server.store.update_run("unwanted", state=RunState.STOPPED))


def test_every_shortcut_is_told_and_leads_somewhere(opened: Any) -> None:
    page = opened("history")
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog")
    for key in "12345678pcsr[]ft?":
        assert help_dialog.locator("kbd", has_text=re.compile(f"^{re.escape(key)}$")).count() == 1
    page.keyboard.press("Escape")
    for key, panel in enumerate(
        ("flow", "mesh", "devices", "curves", "samples", "events", "rewards", "logs"), 1
    ):
        page.keyboard.press(str(key))
        assert page.evaluate("document.activeElement.id") == panel
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    # In a field, letters are letters.
    page.get_by_label("Filter lines").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_charts_are_read_by_arrow_keys(opened: Any, server: PageServer) -> None:
    page = opened("history")
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


def test_every_control_has_a_name(opened: Any) -> None:
    nameless = opened("live").evaluate(
        """() => [...document.querySelectorAll("button, select, input, summary, [role=img], [tabindex]")]
        .filter((one) => one.id !== "main" && !(one.getAttribute("aria-label")
          || one.getAttribute("aria-labelledby") || one.labels?.length || one.textContent.trim()))
        .map((one) => one.outerHTML.slice(0, 120))"""  # noqa: E501
    )
    assert nameless == []


# --- how it looks ---


@pytest.mark.parametrize("run", ["history", "begun"])
def test_a_phone_needs_no_sideways_scrolling(opened: Any, run: str) -> None:
    page = opened(run, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(opened: Any, scheme: str) -> None:
    page = opened("history", color_scheme=scheme)
    colours = page.evaluate(
        """async () => {
          const { colour } = await import("/theme.js");
          const names = ["page", "card", "sunk", "text", "quiet", "accent", "good", "warn", "bad",
            "on-kind", "sample", "infer", "update", "eval"];
          return Object.fromEntries(names.map((name) => [name,
            colour(name).match(/[\\d.]+/g).slice(0, 3).map(Number)]));
        }"""
    )

    def luminance(name: str) -> float:
        # WCAG 2.2, relative luminance of sRGB.
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
            for v in (channel / 255 for channel in colours[name])
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        dark, light = sorted((luminance(one), luminance(other)))
        return (light + 0.05) / (dark + 0.05)

    assert (luminance("page") < 0.05) is (scheme == "dark")
    pairs = [(text, ground) for text in ("text", "quiet") for ground in ("page", "card", "sunk")]
    pairs += [(text, "card") for text in ("accent", "good", "warn", "bad")]
    pairs += [("on-kind", kind) for kind in ("sample", "infer", "update", "eval")]
    assert {pair: contrast(*pair) for pair in pairs if contrast(*pair) < CONTRAST} == {}


def test_nothing_moves_for_those_who_want_no_motion(opened: Any) -> None:
    page = opened("begun", reduced_motion="reduce")
    assert page.locator("#flow .state-running").count() > 0
    assert page.evaluate("document.getAnimations().length") == 0
