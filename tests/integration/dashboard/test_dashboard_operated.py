"""What an operator does with the dashboard, and how it looks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.browser import wait_for
from support.page_server import PageServer

from rolemesh.coordinator.state.store import RunState, RunStream

PHONE = {"width": 390, "height": 844}

CONTRAST = 4.5
"""WCAG 2.2, 1.4.3: least contrast of text that is not large, level AA."""


def test_shortcuts_pause_resume_and_save(opened: Any, server: PageServer) -> None:
    page = opened("live")

    def record() -> Any:
        return server.call(server.store.get_run("live"))

    page.keyboard.press("p")
    wait_for(lambda: record().pause_requested, "the run is asked to pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.keyboard.press("p")
    wait_for(lambda: not record().pause_requested, "the run is asked to go on")
    page.keyboard.press("c")
    wait_for(
        lambda: server.call(server.store.read_entries("live", RunStream.CHECKPOINT_WISHES)),
        "a checkpoint is asked for",
    )


def test_stop_asks_again(opened: Any, server: PageServer, tmp_path: Path) -> None:
    server.fill("unwanted", tmp_path, num_steps=2, is_live=True, with_leases=False)
    page = opened("unwanted")

    def is_asked_to_stop() -> bool:
        return server.call(server.store.get_run("unwanted")).stop_requested

    page.keyboard.press("s")
    expect(page.get_by_role("dialog")).to_contain_text("Stop run unwanted?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert not is_asked_to_stop()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop the run").click()
    wait_for(is_asked_to_stop, "the run is asked to stop")
    expect(page.locator("#state")).to_have_text("stopping")
    server.call(server.store.update_run("unwanted", state=RunState.STOPPED))


def test_every_shortcut_is_told_and_leads_somewhere(opened: Any) -> None:
    page = opened("begun")
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog")
    for key in "12345678pcsr[]ft?":
        assert help_dialog.locator("kbd", has_text=re.compile(f"^{re.escape(key)}$")).count() == 1
    page.keyboard.press("Escape")
    for key, panel in enumerate(
        ("flow", "mesh", "devices", "curves", "samples", "events", "rewards", "logs"), 1
    ):
        page.keyboard.press(str(key))
        assert page.evaluate("document.activeElement.id") == panel
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    # In a field, letters are letters.
    page.get_by_label("Filter lines").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_smoothing_is_an_unbiased_moving_mean(looked_at: Any) -> None:
    page = looked_at("begun")
    values, weight = [4.0, -1.0, 2.5, 0.0, 8.0], 0.7
    shown = page.evaluate(
        "async ([values, weight]) => (await import('/series.js')).smoothed(values, weight)",
        [values, weight],
    )
    # The definition as a weighted mean: weights of older values shrink by the factor.
    for end, smooth in enumerate(shown, 1):
        weights = [weight ** (end - 1 - place) for place in range(end)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(smooth, mean, rel_tol=1e-12)


def test_thinned_lines_keep_every_peak(looked_at: Any) -> None:
    page = looked_at("begun")
    points = page.evaluate(
        """async () => {
          const values = Array.from({ length: 100000 }, (_, i) => Math.sin(i / 900));
          values[77777] = 50; values[12345] = -50;
          const xs = values.map((_, i) => i);
          return (await import('/series.js')).thinned(xs, values, (x) => x / 250, (y) => y);
        }"""
    )
    heights = [y for _, y in points]
    assert max(heights) == 50
    assert min(heights) == -50
    assert len(points) <= 2 * 401


def test_every_control_has_a_name(looked_at: Any) -> None:
    nameless = looked_at("begun").evaluate(
        """() => [...document.querySelectorAll("button, select, input, summary, [role=img], [tabindex]")]
        .filter((one) => one.id !== "main" && !(one.getAttribute("aria-label")
          || one.getAttribute("aria-labelledby") || one.labels?.length || one.textContent.trim()))
        .map((one) => one.outerHTML.slice(0, 120))"""  # noqa: E501
    )
    assert nameless == []


def test_a_phone_needs_no_sideways_scrolling(opened: Any) -> None:
    page = opened("begun", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(opened: Any, scheme: str) -> None:
    page = opened("begun", color_scheme=scheme)
    colours = page.evaluate(
        """async () => {
          const { colour } = await import("/theme.js");
          const names = ["page", "card", "sunk", "text", "quiet", "accent", "good", "warn", "bad",
            "on-kind", "sample", "infer", "update", "eval"];
          return Object.fromEntries(names.map((name) => [name,
            colour(name).match(/[\\d.]+/g).slice(0, 3).map(Number)]));
        }"""
    )

    def luminance(name: str) -> float:
        # WCAG 2.2, relative luminance of sRGB.
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
            for v in (channel / 255 for channel in colours[name])
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        dark, light = sorted((luminance(one), luminance(other)))
        return (light + 0.05) / (dark + 0.05)

    assert (luminance("page") < 0.05) is (scheme == "dark")
    pairs = [(text, ground) for text in ("text", "quiet") for ground in ("page", "card", "sunk")]
    pairs += [(text, "card") for text in ("accent", "good", "warn", "bad")]
    pairs += [("on-kind", kind) for kind in ("sample", "infer", "update", "eval")]
    assert {pair: contrast(*pair) for pair in pairs if contrast(*pair) < CONTRAST} == {}


def test_nothing_moves_for_those_who_want_no_motion(opened: Any) -> None:
    page = opened("begun", reduced_motion="reduce")
    assert page.locator("#flow .state-running").count() > 0
    assert page.evaluate("document.getAnimations().length") == 0
