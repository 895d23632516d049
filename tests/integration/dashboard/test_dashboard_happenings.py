"""What the dashboard does when something happens, and when nothing answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Route, expect
from support.browser import drawn_after_ms, wait_for
from support.dashboard_pages import (
    Watched,
    plotted,
    records_of,
)
from support.page_server import PageServer
from support.rest_servers import tokens_of


def test_steps_appear_when_they_are_made_and_after_a_cut(opened: Any, server: PageServer) -> None:
    # A refused connection is a line of the browser's console that no page can prevent.
    page = opened("live", is_quiet=False)
    live = page.locator("#live")
    expect(live).to_have_text("live")
    made = server.make_step("live")
    expect(page.locator("#progress-text")).to_contain_text(f"step {made} of")
    wait_for(lambda: plotted(page, "Reward")[""][-1] == made, "the new step is plotted")
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
    with PageServer(tokens_of("opensesame")) as guarded:
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


def test_the_printed_address_opens_the_page_and_leaves_no_token_behind(
    browser: Browser, tmp_path: Path
) -> None:
    with PageServer(tokens_of("opensesame")) as guarded:
        guarded.fill("run", tmp_path, num_steps=2)
        asked: list[str] = []
        context = browser.new_context()
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{guarded.url}?run=run#token=opensesame")
        drawn_after_ms(page)
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.evaluate("location.href") == f"{guarded.url}?run=run"
        page.reload()
        drawn_after_ms(page)
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert not [url for url in asked if "opensesame" in url.partition("#")[0]]
        context.close()


def test_a_token_that_may_look_shows_a_run_and_cannot_change_it(
    browser: Browser, tmp_path: Path
) -> None:
    with PageServer(tokens_of("all", read="look", drive="steer")) as guarded:
        guarded.fill("run", tmp_path, num_steps=2, is_live=True)
        works = {}
        for token in ("look", "steer"):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{guarded.url}#token={token}")
            drawn_after_ms(page)
            buttons = [page.locator(f"#{name}") for name in ("pause", "checkpoint", "stop")]
            for button in buttons:
                expect(button).to_be_visible()
            works[token] = [button.is_enabled() for button in buttons]
            if token == "look":
                expect(buttons[2]).to_have_attribute("title", "Needs a token of the scope drive.")
                # Nor does the key that stands for the button.
                page.keyboard.press("p")
                page.wait_for_timeout(200)
            context.close()
        assert works == {"look": [False] * 3, "steer": [True] * 3}
        assert not guarded.call(guarded.store.get_run("run")).pause_requested


def test_a_coordinator_without_runs_says_how_to_start_one(browser: Browser) -> None:
    with PageServer() as empty:
        watched = Watched(browser, empty.url)
        expect(watched.page.locator("#empty")).to_contain_text("rolemesh train recipes/")
        watched.context.close()
        assert watched.complaints == []
