"""Measures how long the dashboard takes until all of its panels are drawn.

    python tests/benchmarks/dashboard.py [--steps 1000] [--rounds 10]

A real Chromium without a screen opens the page of a run with so many steps, of one that goes on
(after those steps, its next one in progress) and of one that has ended, in turn. Milliseconds from
the beginning of the navigation to the frame after the one that draws every panel, as the page's
own clock has it; server and browser share the machine. cold: a browser profile without a cache.
warm: the page is loaded again in the same profile.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import drawn_after_ms, open_browser
from support.page_server import PageServer


def time_page(browser: Browser, url: str) -> dict[str, float]:
    """One load without a cache, and one with it."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(url)
    cold = drawn_after_ms(page)
    # What the page reads after it is drawn must not count to the next load.
    page.wait_for_timeout(500)
    page.reload()
    warm = drawn_after_ms(page)
    context.close()
    return {"cold": cold, "warm": warm}


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median, and the range."""
    return {
        "median_ms": round(statistics.median(milliseconds)),
        "least_ms": round(min(milliseconds)),
        "most_ms": round(max(milliseconds)),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Times the dashboard.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {
        run: {"cold": [], "warm": []} for run in ("live", "ended")
    }
    with tempfile.TemporaryDirectory() as folder, PageServer() as server, open_browser() as browser:
        began = time.time() - given.steps * 10
        for run in found:
            server.fill(
                run, Path(folder) / run, num_steps=given.steps, is_live=run == "live",
                created_at=began, with_leases=run == "live",
            )  # fmt: skip
        # The first page also starts the browser's processes.
        time_page(browser, f"{server.url}?run=live")
        load = psutil.getloadavg()[0]
        for _ in range(given.rounds):
            for run, times in found.items():
                for kind, took in time_page(browser, f"{server.url}?run={run}").items():
                    times[kind].append(took)
        version = browser.version
    print(
        json.dumps(
            {
                "benchmark": "dashboard",
                "steps": given.steps,
                "rounds": given.rounds,
                **{
                    run: {kind: summary(values) for kind, values in times.items()}
                    for run, times in found.items()
                },
                "load_before": round(load, 2),
                "cores": os.cpu_count(),
                "chromium": version,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main()
