"""The browser, a coordinator with runs, and pages of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
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
        # Tests make steps of one, and leave the other where it is.
        for run in ("live", "begun"):
            running.fill(run, folder / run, num_steps=LIVE_STEPS, is_live=True)
        yield running


@pytest.fixture(scope="module")
def history(server: PageServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A long run that has ended, which takes a second to write."""
    folder = tmp_path_factory.mktemp("history")
    server.fill("history", folder, num_steps=HISTORY_STEPS, with_leases=False)
    return "history"


@contextmanager
def pages_of(browser: Browser, server: PageServer) -> Iterator[Any]:
    """Opens the page of a run; in the end it must not have complained."""
    pages: list[tuple[Watched, bool]] = []

    def open_run(run: str, *, is_quiet: bool = True, **context: Any) -> Page:
        watched = Watched(browser, f"{server.url}?run={run}", **context)
        pages.append((watched, is_quiet))
        drawn_after_ms(watched.page)
        return watched.page

    yield open_run
    complaints = [each.complaints for each, is_quiet in pages if is_quiet]
    for each, _ in pages:
        each.context.close()
    assert complaints == [[]] * len(complaints)


@pytest.fixture
def opened(browser: Browser, server: PageServer) -> Iterator[Any]:
    """Opens pages for one test."""
    with pages_of(browser, server) as open_run:
        yield open_run


@pytest.fixture(scope="module")
def looked_at(browser: Browser, server: PageServer) -> Iterator[Any]:
    """The page of a run, the same one for all tests of a file: they leave it as they find it."""
    with pages_of(browser, server) as open_run:
        yield functools.cache(open_run)
