"""A real Chromium without a screen, through playwright, and what tests ask of a page."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ARGUMENTS = (
    # Containers give no user namespaces to unprivileged processes, and the pages are our own.
    "--no-sandbox",
    "--disable-gpu",
    # Nothing but the page may be asked for over the network.
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

WAIT_S = 20.0
"""A page of a busy machine with two cores draws within two seconds."""


class BrowserMissingError(RuntimeError):
    """There is no Chromium on this machine."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser of this machine; nothing is downloaded.

    Raises:
        BrowserMissingError: There is none; says how to install it.
    """
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise BrowserMissingError(
            f"none of {', '.join(BROWSERS)} is on PATH: run requirements/system_packages.sh test"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, headless=True, args=list(ARGUMENTS)
        )
        try:
            yield browser
        finally:
            browser.close()


def wait_for(told: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Asks until the answer is true, and returns it.

    playwright's wait_for_function evaluates text within the page, which our pages forbid.
    """
    ends = time.monotonic() + wait_s
    while not (answer := told()):
        if time.monotonic() > ends:
            raise AssertionError(f"not within {wait_s} s: {what}")
        time.sleep(0.02)
    return answer


def drawn_after_ms(page: Page) -> float:
    """Waits until all panels are drawn; milliseconds since the navigation began."""
    asked = "performance.getEntriesByName('rolemesh:drawn').map((mark) => mark.startTime)"
    times = wait_for(lambda: page.evaluate(asked), "all panels are drawn")
    return float(times[0])
