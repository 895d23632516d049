"""Pages of the dashboard in a browser: what they complain about, and what they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page
from support.page_server import PageServer

HISTORY_STEPS = 1000
LIVE_STEPS = 12


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
