"""Takes the pictures of the dashboard in this folder, of a real run that it starts.

    python docs/images/take.py

The run is the quickstart with the settings of dashboard.yaml. It needs what the quickstart needs
(`make model`), and a Chromium. It is stopped when the pictures are taken, and leaves no files.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parent
ROOT = IMAGES.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import drawn_after_ms, open_browser, wait_for  # noqa: E402

RECIPES = ("recipes/quickstart-ppo.yaml", "docs/images/dashboard.yaml")
STEPS = 12
"""Steps that are made before the first picture: the tiles compare with the ten before."""
WAIT_S = 3600.0
MAX_BYTES = 160_000
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}}


def open_page(browser: Browser, url: str, **context: Any) -> Page:
    """Opens the dashboard, and returns when it is drawn."""
    page = browser.new_context(reduced_motion="reduce", **context).new_page()
    page.goto(url)
    drawn_after_ms(page)
    return page


def take(page: Page, name: str, panel: str = "") -> None:
    """Takes a picture of the top of the page, or of a panel and what follows it."""
    if panel:
        page.evaluate("(id) => document.getElementById(id).scrollIntoView()", panel)
        # The head of the page lies over the panel before.
        page.wait_for_timeout(200)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path.name} has more than {MAX_BYTES} bytes: show less")


def take_all(url: str) -> None:
    """Takes all pictures of a run, in a step whose last call computes."""
    with open_browser() as browser:
        page = open_page(browser, url, color_scheme="light", **DESKTOP)

        def shown(selector: str) -> str:
            return page.locator(selector).text_content() or ""

        def is_done(steps: int) -> bool:
            made = re.search(r"step (\d+) of", shown("#progress-text"))
            return made is not None and int(made.group(1)) >= steps

        wait_for(lambda: is_done(STEPS), f"{STEPS} steps are made", WAIT_S)
        wait_for(lambda: "now actor.update" in shown(".flow-summary"), "an update", WAIT_S)
        take(page, "dashboard-light")
        phone = open_page(browser, url, color_scheme="light", **PHONE)
        take(phone, "dashboard-phone")
        take(page, "dashboard-samples", "samples")
        take(open_page(browser, url, color_scheme="dark", **DESKTOP), "dashboard-dark", "curves")


def main() -> None:
    """Starts the run, takes the pictures and stops it."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        out = Path(folder) / "run"
        train = ("-m", "rolemesh.coordinator.commands.cli", "train", *RECIPES, "--out", str(out))
        run = subprocess.Popen([sys.executable, *train], cwd=ROOT)
        try:
            log = out / "logs" / "coordinator.log"
            told = wait_for(
                lambda: (
                    _is_going(run)
                    and log.exists()
                    and re.search(r"dashboard and REST: (\S+)", log.read_text())
                ),
                "the dashboard is served",
                WAIT_S,
            )
            token = (out / "api-token").read_text().strip()
            take_all(f"{told.group(1)}#token={token}")
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(WAIT_S)


def _is_going(run: subprocess.Popen[bytes]) -> bool:
    if run.poll() is not None:
        raise SystemExit(f"the run ended with {run.returncode} before its dashboard was served")
    return True


if __name__ == "__main__":
    main()
