"""The dashboard of a real run: real services, the real command line, a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.browser import drawn_after_ms, open_browser, wait_for
from support.mesh_runs import CliRun, tiny_model, tiny_recipe

STEPS = 30
"""About eight seconds: long enough to be seen."""

START_S = 120.0
"""Five processes that import torch on a busy machine with two cores."""


@pytest.mark.slow
def test_a_live_run_is_followed_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = CliRun(tiny_recipe(tiny_model(tmp_path / "model"), run__steps=STEPS), tmp_path)
    try:
        with open_browser() as browser:
            run.wait_until(lambda: bool(run.url), START_S)
            page = browser.new_page()
            complaints: list[str] = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "console",
                lambda said: (
                    complaints.append(f"{said.text} {said.location}")
                    if said.type != "log"
                    else None
                ),
            )
            token = run.authorization["authorization"].removeprefix("Bearer ")
            page.goto(f"{run.url}#token={token}")
            drawn_after_ms(page)
            # It is read before the run ends, and the coordinator with it.
            expect(page.locator("#state")).to_have_text("running", timeout=START_S * 1000)
            expect(page.locator("#mesh tbody tr")).to_have_count(4)
            assert complaints == []
            expect(page.locator("#state")).to_have_text("succeeded", timeout=START_S * 1000)
            figure = page.locator('figure[data-chart="Policy loss"]')
            figure.get_by_role("button").click()
            cells = figure.locator("tbody td")
            wait_for(lambda: cells.count() == STEPS, "all steps are plotted")
            shown = [float(cell.get_attribute("data-value") or "nan") for cell in cells.all()]
            lines = (run.out / "metrics.jsonl").read_text().splitlines()
            assert shown[::-1] == [json.loads(line)["policy_loss"] for line in lines]
            assert page.locator("#samples .token").count() > 0
            expect(page.locator("#devices")).to_contain_text("actor 0 \u00b7 cpu")
        assert run.wait(START_S) == 0
    finally:
        run.close()
