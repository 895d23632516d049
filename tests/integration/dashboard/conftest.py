"""The browser, a coordinator with three runs, and pages of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from support.browser import BrowserMissingError, drawn_after_ms, open_browser
from support.dashboard_pages import (
    HISTORY_STEPS,
    LIVE_STEPS,
    Watched,
)
from support.page_server import PageServer


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
