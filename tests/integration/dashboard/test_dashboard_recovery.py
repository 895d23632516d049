"""Tests of the dashboard of runs that recover, and of runs that are resumed, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.browser import wait_for
from support.dashboard_pages import plotted, records_of
from support.page_server import PageServer

from rolemesh.coordinator.state.store import RunState
from rolemesh.v1 import coordinator_pb2


@pytest.mark.slow
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


@pytest.mark.slow
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
