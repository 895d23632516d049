"""Takes the pictures of the dashboard in docs/images.

    python tests/support/take_screenshots.py

The runs are invented. A picture is at most 300 KB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import drawn_after_ms, open_browser
from support.page_server import PageServer

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 300_000
NUM_STEPS = 150
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5}


def take(browser: Browser, url: str, name: str, *, at: str = "", **context: Any) -> None:
    """One picture of a page, of what is seen first or of a panel and what follows it."""
    opened = browser.new_context(reduced_motion="reduce", **context)
    page = opened.new_page()
    page.goto(url)
    drawn_after_ms(page)
    if at:
        _go_to(page, at)
    page.screenshot(path=IMAGES / f"{name}.png")
    opened.close()
    size = (IMAGES / f"{name}.png").stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{name}.png has {size} bytes, more than {MAX_BYTES}: show less")


def _go_to(page: Page, panel: str) -> None:
    page.evaluate("(id) => document.getElementById(id).scrollIntoView()", panel)
    # The head of the page lies over the panel before.
    page.wait_for_timeout(200)


def main() -> None:
    """Takes all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, PageServer() as server, open_browser() as browser:
        now = time.time()
        for age, run in enumerate(("arithmetic-3", "arithmetic-2")):
            server.fill(
                run, Path(folder) / run, num_steps=NUM_STEPS, is_live=age == 0, seed=age,
                created_at=now - (NUM_STEPS + 2) * 10 * (age + 1), with_leases=age == 0,
            )  # fmt: skip
        first = f"{server.url}?run=arithmetic-3"
        both = f"{first}&compare=arithmetic-2"
        take(browser, first, "dashboard-light", color_scheme="light", **DESKTOP)
        take(browser, both, "dashboard-dark", at="curves", color_scheme="dark", **DESKTOP)
        take(browser, first, "dashboard-samples", at="samples", color_scheme="light", **DESKTOP)
        take(browser, first, "dashboard-phone", color_scheme="light", **PHONE)


if __name__ == "__main__":
    main()
