"""Tests that what docs/observability.md shows works."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec
from rolemesh.coordinator.trackers.outside import OutsideTracker
from rolemesh.coordinator.trackers.tracker import RunFacts

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "observability.md").read_text()
FINISH_S = 60.0


def block(language: str) -> str:
    """The page's only block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    text: str = found
    return text


def test_the_section_of_trackers_is_one(tmp_path: Path) -> None:
    shown = yaml.safe_load(block("yaml"))
    section = tmp_path / "trackers.yaml"
    section.write_text(block("yaml"))
    recipe = load_recipe([REPOSITORY / "recipes" / "quickstart-ppo.yaml", section])
    assert [spec.type for spec in recipe.trackers] == [one["type"] for one in shown["trackers"]]


async def test_the_tracker_of_your_own_keeps_what_it_is_told(tmp_path: Path) -> None:
    code, kept = tmp_path / "mine.py", tmp_path / "kept"
    code.write_text(block("python"))
    events: list[str] = []
    spec = CustomTrackerSpec(tracker=f"{code}:Mine", options={"path": str(kept)})
    tracker = OutsideTracker(spec, "custom", tmp_path / "log", events.append)
    await tracker.start(RunFacts(run_id="r", name="r", directory=str(tmp_path)), {})
    tracker.log(3, {"reward/mean": 0.5})
    await tracker.finish("succeeded", FINISH_S)
    assert (kept.read_text(), events) == ("3 0.5\n", [])
