from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec, WandbSpec
from rolemesh.coordinator.run.session import InputError, Session
from rolemesh.coordinator.trackers.registry import check_trackers, make_tracker

WHOLE = """
class Whole:
    def __init__(self, colour="red"):
        self.colour = colour
    def start(self, run, config): ...
    def log(self, step, scalars): ...
    def finish(self, state): ...

class Half:
    def start(self, run, config): ...

whole = Whole()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(WHOLE)
    return path


def test_a_class_of_a_file_gets_its_options(code: Path) -> None:
    spec = CustomTrackerSpec(tracker=f"{code}:Whole", options={"colour": "blue"})
    check_trackers([spec])
    assert make_tracker(spec).colour == "blue"  # type: ignore[attr-defined]


def test_another_package_offers_a_tracker_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    dist = site / "offering-1.0.dist-info"
    dist.mkdir(parents=True)
    (site / "offering.py").write_text(WHOLE)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[rolemesh.trackers]\nwhole = offering:Whole\n")
    monkeypatch.syspath_prepend(str(site))
    made = make_tracker(CustomTrackerSpec(tracker="whole"))
    assert type(made).__module__ == "offering"
    del sys.modules["offering"]


@pytest.mark.parametrize(
    ("tracker", "problem"),
    [
        ("nothing-of-that-name", "there is no such class"),
        ("{code}:Half", "lacks log, finish"),
        ("{code}:whole", "there is no such class"),
        ("{code}:None", "has no 'None'"),
    ],
)
def test_a_class_that_is_no_tracker_is_refused(code: Path, tracker: str, problem: str) -> None:
    spec = CustomTrackerSpec(tracker=tracker.format(code=code))
    with pytest.raises(ValueError, match=problem):
        check_trackers([spec])


def test_a_missing_package_is_named_with_its_extra_before_anything_starts(tmp_path: Path) -> None:
    recipe = fake_recipe().model_copy(update={"trackers": (WandbSpec(),)})
    with pytest.raises(InputError, match=r"trackers\.0\.type is 'wandb'.*rolemesh\[wandb\]"):
        Session(recipe, tmp_path / "run", QuietObserver())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("trackers", "problem"),
    [
        ([{"type": "wand"}], r"trackers\.0\.type is 'wand'.*did you mean 'wandb'"),
        ([{"type": "wandb", "projct": "x"}], r"trackers\.0\.projct: unknown key.*project"),
        ([{"type": "mlflow"}], r"trackers\.0\.tracking_uri: required"),
    ],
)
def test_a_wrong_section_is_named(tmp_path: Path, trackers: object, problem: str) -> None:
    path = tmp_path / "recipe.yaml"
    recipe = fake_recipe().model_dump(mode="json") | {"trackers": trackers}
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(RecipeError, match=problem):
        load_recipe([path])
